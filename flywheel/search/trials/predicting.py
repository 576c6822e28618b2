"""Evaluating by prediction. Worker processes import it, so it imports no Optuna, and SQL only for a look-up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flywheel.cost_model import MODEL_VERSION, STOCK, Predictor
from flywheel.ir import MegakernelProgram
from flywheel.measure.environment import Environment
from flywheel.measure.outcome import Predicted
from flywheel.measure.record import TrialRecord
from flywheel.search.trials.evaluate import Seen

if TYPE_CHECKING:
    from flywheel.store.sql import Store


def open_seen(store_url: str, gpu: str, dtype: str, version: str = MODEL_VERSION) -> Seen:
    """A look-up of earlier predictions by one version of the cost model. Its first call opens a connection of its own.
    """
    from flywheel.store.sql import open_store

    store: Store | None = None

    def seen(program: str) -> TrialRecord | None:
        nonlocal store
        store = store or open_store(store_url, create=False)
        return store.seen(program, gpu=gpu, dtype=dtype, measure="predict", predictor=version)

    return seen


def look(
    store: Store, gpu: str, dtype: str, program_id: str, environment: Environment, *, version: str = MODEL_VERSION
) -> TrialRecord | None:
    """The earlier prediction of a program by that version of the cost model, made on any machine; None without one."""
    return store.seen(program_id, gpu=gpu, dtype=dtype, measure="predict", predictor=version)


def predict_outcome(program: MegakernelProgram, predictor: Predictor = STOCK) -> Predicted:
    """The cost model's prediction for a validated program."""
    return Predicted(predictor.predict(program))
