"""Stand-ins for a measurement, in a module of their own so that a process pool can find them."""

from __future__ import annotations

import os

from flywheel.cost_model import MODEL_VERSION
from flywheel.ir import MegakernelProgram, variant_of
from flywheel.measure.latency import PredictedLatency
from flywheel.measure.outcome import Crashed, Predicted, TrialOutcome


def smooth(program: MegakernelProgram) -> TrialOutcome:
    """Best with deep prefetch and many threads."""
    variant = variant_of(program)
    latency_us = 100.0 - 2.0 * variant.prefetch_depth - variant.consumer_warps + len(program.tasks) / 100
    return Predicted(PredictedLatency(latency_us, MODEL_VERSION))


def fragile(program: MegakernelProgram) -> TrialOutcome:
    """As `smooth`, but what prefetches deeper than two instructions crashes."""
    return Crashed("too deep", transient=False) if variant_of(program).prefetch_depth > 2 else smooth(program)


def deadly(program: MegakernelProgram) -> TrialOutcome:
    """As `smooth`, but a depth of 4 takes the process with it."""
    if variant_of(program).prefetch_depth == 4:
        os._exit(3)
    return smooth(program)
