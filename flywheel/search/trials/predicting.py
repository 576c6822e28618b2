"""Evaluating by prediction. Worker processes import it, so it imports neither Optuna nor SQL."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flywheel.cost_model import MODEL_VERSION, STOCK, Predictor
from flywheel.ir import MegakernelProgram
from flywheel.measure.environment import Environment
from flywheel.measure.outcome import Predicted
from flywheel.measure.record import TrialRecord

if TYPE_CHECKING:
    from flywheel.store.sql import Store


def look(
    store: Store,
    gpu: str,
    dtype: str,
    program_id: str,
    environment: Environment | None = None,
    *,
    version: str = MODEL_VERSION,
) -> TrialRecord | None:
    """The earlier prediction of a program by that version of the cost model, made on any machine; None without one."""
    return store.seen(program_id, gpu=gpu, dtype=dtype, measure="predict", predictor=version)


def predict_outcome(program: MegakernelProgram, predictor: Predictor = STOCK) -> Predicted:
    """The cost model's prediction for a validated program."""
    return Predicted(predictor.predict(program))
