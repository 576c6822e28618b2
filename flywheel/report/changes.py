"""Which knobs mattered most, and what changing one of them cost beside the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import compared
from flywheel.report.facts import Knobs
from flywheel.search.knobs import Choice, Value
from flywheel.search.space import Dimension

Told = list[tuple[Choice, float]]
"""Choices with their latencies in us."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another value of a knob than the best's, that `trials` trials tried. Both costs are in us above the best's
    latency; below 0 they were faster.

    `alone_us` is that of the fastest trial which differs from the best in this knob and no other, None where there is
    none; `least_us` that of the fastest trial with this value.
    """

    knob: str
    best: Value
    value: Value
    trials: int
    alone_us: float | None
    least_us: float


def told(knobs: Knobs, trials: Sequence[TrialRecord]) -> Told:
    """The trials within the space that have a latency of the kind that compares."""
    kind = compared(trials)
    return [
        (choice, record.objective_us)
        for choice, record in zip(knobs.choices, trials, strict=True)
        if choice is not None and record.outcome == kind and record.objective_us is not None
    ]


def by_weight(knobs: Knobs, known: Told) -> list[Dimension]:
    """The knobs with more than one value, what mattered most first: by importance, and where that is not known, by how
    far apart the fastest trials of their values are."""
    searched = [dimension for dimension in knobs.dimensions if len(dimension.values) > 1]
    if knobs.importances:
        return sorted(searched, key=lambda each: -knobs.importances.get(each.name, 0.0))
    return sorted(searched, key=lambda each: -_range(each, known))


def changes(knobs: Knobs, trials: Sequence[TrialRecord], best: TrialRecord) -> list[Change]:
    """A change for each value that was tried, in the order of `by_weight` and of the values; none where the best lies
    outside the space.

    The best's latency is that of the trial that tried it: a final measures again, at another time.
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
