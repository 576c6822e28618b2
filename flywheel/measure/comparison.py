"""Contestants for one decode step, timed alternately on one GPU, and how each compares with the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from flywheel.ir.program import MegakernelProgram
from flywheel.measure.floor import cache_bytes_read, floor_fraction, floor_us, weight_bytes_read
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Implausible, Incorrect, Measured, NoMemory, Rejected, Rounds, outcome_name
from flywheel.measure.verdict import Verdict, as_document

CompetingOutcome = Measured | Rejected | Incorrect | Implausible | NoMemory


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant. `how` describes in a few words what runs. `weight_bytes` are the bytes of weights that a step of
    it reads; None for those of the comparison's program.

    `times_us` are its samples by round, alternating with the other contestants'. `batches_us` has, for each round, the
    time of one launch among many back to back. Both are empty without a latency. Raises ValueError if they are given
    without one.
    """

    name: str
    how: str
    outcome: CompetingOutcome
    times_us: Rounds = ()
    batches_us: tuple[float, ...] = ()
    weight_bytes: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.outcome, Measured) and (self.times_us or self.batches_us):
            raise ValueError(f"{self.name}: {outcome_name(self.outcome)}, but has times")

    @property
    def latency(self) -> MeasuredLatency | None:
        """The latency; None for a contestant that does not run, fails its verdict, or has an impossible time."""
        return self.outcome.latency if isinstance(self.outcome, Measured) else None

    @property
    def strangers(self) -> int | None:
        """How many processes of others computed at any time; None if that is unknown."""
        state = None if self.latency is None else self.latency.gpu_state
        return None if state is None else state.strangers

    @property
    def verdict(self) -> Verdict | None:
        """The verdict; None if nothing ran, or if the time was impossible."""
        return self.outcome.verdict if isinstance(self.outcome, Measured | Incorrect) else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Contestants for one step of `batch` sequences at the last position of `context`. The first one is the schedule.

    `weight_bytes` is the number of bytes of weights that the step of the schedule must read, and `cache_bytes` that of
    keys and values, which every contestant reads. `floor_us` is the time for the weights at the datasheet's bandwidth,
    and `ceiling_us` at the best rate of a plain kernel in the same run.
    """

    context: int
    weight_bytes: int
    floor_us: float
    ceiling_us: float
    entries: tuple[Entry, ...]
    batch: int = 1
    cache_bytes: int = 0

    def bytes_of(self, entry: Entry) -> int:
        """The bytes of weights, keys and values that a step of an entry reads."""
        return (self.weight_bytes if entry.weight_bytes is None else entry.weight_bytes) + self.cache_bytes


@dataclass(frozen=True, slots=True)
class Standing:
    """An entry with a latency. It reads `read_bytes` a step, weights and caches, at `read_gbs`. Its fractions are what
    reading them takes, at the datasheet's bandwidth and at the best rate of a plain kernel, over its median.

    `speedups` maps the name of each other entry with a latency to how many times as fast this entry is. `over_single`
    is its median over that of the same contestant for one sequence; None where that is unknown.
    """

    latency: MeasuredLatency
    read_bytes: int
    read_gbs: float
    floor_fraction: float
    ceiling_fraction: float
    speedups: Mapping[str, float]
    over_single: float | None = None


def comparison_of(
    program: MegakernelProgram, context: int, batch: int, read_gbs: float, entries: tuple[Entry, ...]
) -> Comparison:
    """The comparison of a program's step with the others' that were timed with it. A plain kernel read at
    `read_gbs`."""
    assert program.target is not None
    nbytes = weight_bytes_read(program)
    floor, ceiling = floor_us(nbytes, program.target), nbytes / read_gbs / 1e3
    return Comparison(context, nbytes, floor, ceiling, entries, batch, cache_bytes_read(program))


def single_of(comparison: Comparison, comparisons: Sequence[Comparison]) -> Comparison | None:
    """The comparison of a single sequence at the same context; None where there is none."""
    alike = (each for each in comparisons if each.batch == 1 and each.context == comparison.context)
    return next(alike, None)


def standing(comparison: Comparison, entry: Entry, single: Comparison | None = None) -> Standing | None:
    """How an entry of the comparison compares, also with the same contestant in `single`; None without a latency."""
    latency = entry.latency
    if latency is None:
        return None
    others = {
        other.name: other.latency.median_us / latency.median_us
        for other in comparison.entries
        if other is not entry and other.latency is not None
    }
    nbytes = comparison.bytes_of(entry)
    more = nbytes / comparison.weight_bytes
    return Standing(
        latency,
        nbytes,
        nbytes / latency.median_us / 1e3,
        floor_fraction(comparison.floor_us * more, latency.median_us),
        floor_fraction(comparison.ceiling_us * more, latency.median_us),
        MappingProxyType(others),
        _over_single(entry.name, latency, single),
    )


def _over_single(name: str, latency: MeasuredLatency, single: Comparison | None) -> float | None:
    namesakes = () if single is None else (entry.latency for entry in single.entries if entry.name == name)
    return next((latency.median_us / alone.median_us for alone in namesakes if alone is not None), None)


def comparison_document(comparison: Comparison, single: Comparison | None = None) -> dict[str, Any]:
    """The comparison as a JSON-ready document. A value that an entry lacks is null, and so is an error that is not
    finite. `single` is as for `standing`."""
    return {
        "context": comparison.context,
        "batch": comparison.batch,
        "weight_bytes": comparison.weight_bytes,
        "cache_bytes": comparison.cache_bytes,
        "floor_us": comparison.floor_us,
        "ceiling_us": comparison.ceiling_us,
        "contestants": [_entry(comparison, entry, single) for entry in comparison.entries],
    }


def _entry(comparison: Comparison, entry: Entry, single: Comparison | None) -> dict[str, Any]:
    found = standing(comparison, entry, single)
    latency, state = (None, None) if found is None else (found.latency, found.latency.gpu_state)
    return {
        "name": entry.name,
        "how": entry.how,
        "outcome": outcome_name(entry.outcome),
        "reason": reason_of(entry.outcome),
        "verdict": None if entry.verdict is None else as_document(entry.verdict),
        "median_us": None if latency is None else latency.median_us,
        "p10_us": None if latency is None else latency.p10_us,
        "p90_us": None if latency is None else latency.p90_us,
        "batch_us": None if latency is None else latency.batch_us,
        "samples": None if latency is None else latency.samples,
        "l2_state": None if latency is None else latency.l2_state,
        "read_bytes": None if found is None else found.read_bytes,
        "read_gbs": None if found is None else found.read_gbs,
        "floor_fraction": None if found is None else found.floor_fraction,
        "ceiling_fraction": None if found is None else found.ceiling_fraction,
        "speedups": {} if found is None else dict(found.speedups),
        "over_single": None if found is None else found.over_single,
        "gpu_state": None if state is None else asdict(state),
        "times_us": [list(samples) for samples in entry.times_us],
        "batches_us": list(entry.batches_us),
    }


def reason_of(outcome: CompetingOutcome) -> str | None:
    """The reason why there is no latency; None where there is one."""
    match outcome:
        case Measured():
            return None
        case Incorrect(reason=reason) | Rejected(reason=reason) | NoMemory(reason=reason):
            return reason
        case Implausible(latency_us=latency_us, floor_us=floor_us):
            return f"{latency_us:.1f} us is below the weight floor of {floor_us:.1f} us"
