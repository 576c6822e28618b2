"""One config, from proposal to outcome: lower, validate, look up, measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from flywheel.errors import ConfigError
from flywheel.ir import MegakernelProgram, ScheduleConfig, program_id, validate
from flywheel.lowering.lower import lower
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.measure.outcome import Rejected, TrialOutcome
from flywheel.measure.record import TrialRecord
from flywheel.search.workload import Workload

Measure = Callable[[MegakernelProgram], TrialOutcome]
"""Times a validated program, or says why it cannot."""

Seen = Callable[[str], TrialRecord | None]
"""The earlier trial of a program id that need not be repeated."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What became of a config. `outcome` is a TrialRecord where an earlier trial answered. Seconds are wall time."""

    outcome: TrialOutcome | TrialRecord
    program_id: str | None = None
    tasks: int | None = None
    weight_bytes: int | None = None
    floor_us: float | None = None
    lower_s: float | None = None
    validate_s: float | None = None
    measure_s: float | None = None


def evaluate(config: ScheduleConfig, workload: Workload, seen: Seen, measure: Measure) -> Evaluation:
    """Never raises for what a config can cause: that is an outcome."""
    start = perf_counter()
    try:
        program = lower(workload.graph, config, workload.target)
    except ConfigError as error:
        return Evaluation(Rejected(("config",), str(error)), lower_s=perf_counter() - start)
    lowered = perf_counter()
    result = validate(program, strict=True)
    validated = perf_counter()
    identity, weight_bytes = program_id(program), weight_bytes_read(program)
    outcome: TrialOutcome | TrialRecord | None
    if result.ok:
        outcome = seen(identity) or measure(program)
    else:
        outcome = Rejected(tuple(sorted({found.code for found in result.errors})), str(result.errors[0]))
    return Evaluation(
        outcome=outcome,
        program_id=identity,
        tasks=len(program.tasks),
        weight_bytes=weight_bytes,
        floor_us=floor_us(weight_bytes, workload.target),
        lower_s=lowered - start,
        validate_s=validated - lowered,
        measure_s=perf_counter() - validated,
    )
