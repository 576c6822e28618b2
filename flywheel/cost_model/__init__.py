"""What a program should cost: a prediction of its latency from its queues and the GPU's constants."""

from flywheel.cost_model.machine import MACHINES, Consumer, Machine, machine_for
from flywheel.cost_model.predict import MODEL_VERSION, Prediction, TaskSpan, predict, timeline

__all__ = [
    "MACHINES",
    "MODEL_VERSION",
    "Consumer",
    "Machine",
    "Prediction",
    "TaskSpan",
    "machine_for",
    "predict",
    "timeline",
]
