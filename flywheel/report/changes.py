"""Which knobs mattered most, and what changing one knob of the best schedule costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import compared
from flywheel.report.facts import Knobs
from flywheel.search.knobs import Choice, Value
from flywheel.search.space import Dimension

Told = list[tuple[Choice, float]]
"""Choices and their latencies in us."""


@dataclass(frozen=True, slots=True)
class Change:
    """A knob value that `trials` trials tried and that the best trial does not have.

    Both costs are in us relative to the best trial's latency; they are negative if a trial was faster. `alone_us` is
    the cost of the fastest trial that differs from the best in this knob alone; None if there is none. `least_us` is
    the cost of the fastest trial with this value.
    """

    knob: str
    best: Value
    value: Value
    trials: int
    alone_us: float | None
    least_us: float


def told(knobs: Knobs, trials: Sequence[TrialRecord]) -> Told:
    """The trials in the search space whose latency is of the kind that the campaign compares."""
    kind = compared(trials)
    return [
        (choice, record.objective_us)
        for choice, record in zip(knobs.choices, trials, strict=True)
        if choice is not None and record.outcome == kind and record.objective_us is not None
    ]


def by_weight(knobs: Knobs, known: Told) -> list[Dimension]:
    """The knobs with several values, ordered by the difference between the fastest trials of their values, the largest
    first."""
    searched = [dimension for dimension in knobs.dimensions if len(dimension.values) > 1]
    return sorted(searched, key=lambda each: -_range(each, known))


def changes(knobs: Knobs, trials: Sequence[TrialRecord], best: TrialRecord) -> list[Change]:
    """One change for each tried value, in the order of `by_weight` and of the values. Empty if the best trial is
    outside the search space.

    The best trial's latency is that of its first measurement. A final's is not used, since a final runs at another
    time.
    """
    chosen = knobs.best
    if chosen is None or best.objective_us is None:
        return []
    known = told(knobs, trials)
    base = min((us for choice, us in known if choice == chosen), default=best.objective_us)
    found = []
    for dimension in by_weight(knobs, known):
        name = dimension.name
        for value in dimension.values:
            with_it = [(choice, us) for choice, us in known if choice[name] == value]
            if value == chosen[name] or not with_it:
                continue
            neighbour = {**chosen, name: value}
            alone = [us for choice, us in with_it if choice == neighbour]
            found.append(
                Change(name, chosen[name], value, len(with_it), min(alone) - base if alone else None,
                       min(us for _, us in with_it) - base)
            )  # fmt: skip
    return found


def _range(dimension: Dimension, known: Told) -> float:
    fastest: dict[Value, float] = {}
    for choice, us in known:
        value = choice[dimension.name]
        fastest[value] = min(us, fastest.get(value, us))
    return max(fastest.values()) - min(fastest.values()) if fastest else 0.0
