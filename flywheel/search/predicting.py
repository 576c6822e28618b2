"""Evaluating by prediction. Imported by worker processes, so it stays light: no Optuna."""

from __future__ import annotations

from flywheel.cost_model import MODEL_VERSION, predict
from flywheel.ir import MegakernelProgram
from flywheel.measure.latency import PredictedLatency
from flywheel.measure.outcome import Predicted
from flywheel.measure.record import TrialRecord
from flywheel.search.evaluate import Seen
from flywheel.store.sql import Store, open_store


def open_seen(store_url: str, gpu: str, dtype: str) -> Seen:
    """Look-up of earlier trials, with a connection of its own that the first look-up opens."""
    store: Store | None = None

    def seen(program: str) -> TrialRecord | None:
        nonlocal store
        store = store or open_store(store_url)
        return store.seen(program, gpu=gpu, dtype=dtype, measure="predict", predictor=MODEL_VERSION)

    return seen


def predict_outcome(program: MegakernelProgram) -> Predicted:
    """The cost model's word on a validated program."""
    return Predicted(PredictedLatency(predict(program).latency_us, MODEL_VERSION))
