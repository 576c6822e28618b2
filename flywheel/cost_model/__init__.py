"""Predicts a program's latency from its queues and the GPU's constants."""

from flywheel.cost_model.calibration import STOCK, Predictor, open_predictor
from flywheel.cost_model.machine import MACHINES, Consumer, Machine, Vector, machine_for
from flywheel.cost_model.predict import MODEL_VERSION, Prediction, predict, timeline
from flywheel.cost_model.spans import State, TaskSpan, state_shares

__all__ = [
    "MACHINES",
    "MODEL_VERSION",
    "STOCK",
    "Consumer",
    "Machine",
    "Prediction",
    "Predictor",
    "State",
    "TaskSpan",
    "Vector",
    "machine_for",
    "open_predictor",
    "predict",
    "state_shares",
    "timeline",
]
