"""One config, from proposal to outcome: lower, validate, look up, measure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from flywheel.errors import ConfigError
from flywheel.ir import MegakernelProgram, ScheduleConfig, validate
from flywheel.lowering.lower import lower
from flywheel.measure.environment import Environment
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.measure.latency import PredictedLatency
from flywheel.measure.outcome import Contest, Rejected, TrialOutcome
from flywheel.measure.record import TrialRecord
from flywheel.plan import program_id
from flywheel.search.workload import Workload

Measure = Callable[[MegakernelProgram], TrialOutcome]
"""Times a validated program, or says why it cannot."""

Seen = Callable[[str], TrialRecord | None]
"""The earlier trial of a program id that need not be repeated."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of one config's evaluation. Seconds are wall time.

    `outcome` is a TrialRecord where an earlier trial answered. `contest` holds the samples of a config that was
    measured beside others. `environment` says where it was evaluated; None is this process. `predicted` is the cost
    model's prediction, if it was asked before a measurement.
    """

    outcome: TrialOutcome | TrialRecord
    program_id: str | None = None
    tasks: int | None = None
    weight_bytes: int | None = None
    floor_us: float | None = None
    lower_s: float | None = None
    validate_s: float | None = None
    measure_s: float | None = None
    contest: Contest | None = None
    environment: Environment | None = None
    predicted: PredictedLatency | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A config before its measurement.

    It has a program, or `refused`, the lowerer's or the validator's reason. `predicted` is its prediction, if one was
    asked for. Where nothing is left to measure, `answer` is its outcome, with the seconds that took. The program stays
    in the process that made it; only `facts` cross to another.
    """

    program: MegakernelProgram | None
    refused: Rejected | None
    program_id: str | None = None
    tasks: int | None = None
    weight_bytes: int | None = None
    floor_us: float | None = None
    lower_s: float | None = None
    validate_s: float | None = None
    predicted: PredictedLatency | None = None
    answer: TrialOutcome | None = None
    answer_s: float | None = None

    @property
    def facts(self) -> Prepared:
        """A copy without the program."""
        return replace(self, program=None)

    def ended(self, outcome: TrialOutcome | TrialRecord, measure_s: float | None = None) -> Evaluation:
        """The evaluation that ends with `outcome`."""
        return Evaluation(
            outcome, self.program_id, self.tasks, self.weight_bytes, self.floor_us, self.lower_s, self.validate_s,
            measure_s, predicted=self.predicted,
        )  # fmt: skip


def prepare(config: ScheduleConfig, workload: Workload) -> Prepared:
    """Lower a config, validate its program, and ask whether there are kernels for it.

    A config's own fault is an outcome and raises nothing.
    """
    start = perf_counter()
    try:
        program = lower(workload.graph, config, workload.target)
    except ConfigError as error:
        return Prepared(None, Rejected(("config",), str(error)), lower_s=perf_counter() - start)
    lowered = perf_counter()
    result = validate(program, strict=True)
    validated = perf_counter()
    if result.ok:
        refused = _without_kernels(program)
    else:
        refused = Rejected(tuple(sorted({found.code for found in result.errors})), str(result.errors[0]))
    weight_bytes = weight_bytes_read(program)
    return Prepared(
        program=program,
        refused=refused,
        program_id=program_id(program),
        tasks=len(program.tasks),
        weight_bytes=weight_bytes,
        floor_us=floor_us(weight_bytes, workload.target),
        lower_s=lowered - start,
        validate_s=validated - lowered,
    )


def _without_kernels(program: MegakernelProgram) -> Rejected | None:
    """The refusal of a proved program that no kernels run, as a GPU's worker would say it; None where they do."""
    # Imported here: the coordinator imports this module, and only evaluations wait for numpy.
    from flywheel.plan.program import refusal_of

    reason = refusal_of(program)
    return None if reason is None else Rejected(("load",), reason)


def evaluate(config: ScheduleConfig, workload: Workload, seen: Seen, measure: Measure) -> Evaluation:
    """Evaluate a config: lower, validate, look up an earlier trial, else measure.

    A config's own fault is an outcome and raises nothing.
    """
    prepared = prepare(config, workload)
    if prepared.refused is not None:
        return prepared.ended(prepared.refused)
    assert prepared.program is not None
    assert prepared.program_id is not None
    start = perf_counter()
    outcome = seen(prepared.program_id) or measure(prepared.program)
    return prepared.ended(outcome, perf_counter() - start)
