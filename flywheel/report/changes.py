"""What changing one knob of the best schedule costs, and which knobs cost most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import compared
from flywheel.report.facts import Knobs
from flywheel.search.knobs import Choice, Value
from flywheel.search.space import Dimension

Told = list[tuple[Choice, float]]
"""Choices and their latencies in us."""


@dataclass(frozen=True, slots=True)
class Change:
    """Another value of a knob than the best trial's; `trials` trials had it.

    Both costs are in us relative to the best trial's latency; they are negative if a schedule is faster. `alone_us` is
    the cost of the best schedule with this knob alone changed: predicted where the best is a prediction, else of the
    fastest trial of it; None if there is none. `least_us` is the cost of the fastest trial with this value, whatever
    else it changed; None without a trial.
    """

    knob: str
    best: Value
    value: Value
    trials: int
    alone_us: float | None
    least_us: float | None


def told(knobs: Knobs, trials: Sequence[TrialRecord]) -> Told:
    """The trials in the search space whose latency is of the kind that the campaign compares."""
    kind = compared(trials)
    return [
        (choice, record.objective_us)
        for choice, record in zip(knobs.choices, trials, strict=True)
        if choice is not None and record.outcome == kind and record.objective_us is not None
    ]


def costliest(found: Sequence[Change]) -> dict[str, Change]:
    """By knob, the value that costs most where nothing else changes, the most costly knob first. A knob that no trial
    changed alone is left out."""
    most: dict[str, tuple[float, Change]] = {}
    for change in found:
        if change.alone_us is not None and change.alone_us > most.get(change.knob, (-inf, change))[0]:
            most[change.knob] = change.alone_us, change
    return {knob: change for knob, (_, change) in sorted(most.items(), key=lambda each: -each[1][0])}


def by_cost(knobs: Knobs, found: Sequence[Change]) -> list[Dimension]:
    """The knobs with several values, in the order of `costliest`, then those that it leaves out."""
    searched = {dimension.name: dimension for dimension in knobs.dimensions if len(dimension.values) > 1}
    return list({**{knob: searched[knob] for knob in costliest(found)}, **searched}.values())


def changes(knobs: Knobs, trials: Sequence[TrialRecord], best: TrialRecord | None) -> list[Change]:
    """One change for each value that was tried or predicted, in the order of `by_cost` and of the values. Empty if the
    best trial is outside the search space.

    The best trial's latency is that of its first measurement. A final's is not used, since a final runs at another
    time.
    """
    chosen = knobs.best
    if chosen is None or best is None or best.objective_us is None:
        return []
    known = told(knobs, trials)
    base = min((us for choice, us in known if choice == chosen), default=best.objective_us)
    found = []
    for dimension in knobs.dimensions:
        name = dimension.name
        for value in dimension.values:
            if value == chosen[name]:
                continue
            with_it = [(choice, us) for choice, us in known if choice[name] == value]
            neighbour = {**chosen, name: value}
            alone = [us for choice, us in with_it if choice == neighbour]
            if knobs.beside is not None:
                alone = [knobs.beside[name, value]] if (name, value) in knobs.beside else []
            if with_it or alone:
                least_us = min((us for _, us in with_it), default=None)
                found.append(
                    Change(name, chosen[name], value, len(with_it), min(alone) - base if alone else None,
                           None if least_us is None else least_us - base)
                )  # fmt: skip
    places = {dimension.name: place for place, dimension in enumerate(by_cost(knobs, found))}
    return sorted(found, key=lambda change: places[change.knob])
