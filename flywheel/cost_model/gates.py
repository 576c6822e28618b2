"""The signals and waits of tasks, by number, and which waits poll data instead of a counter."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flywheel.cost_model.units import Ints, Units
from flywheel.ir.compressed import Layers
from flywheel.plan.program import BRIEF, Plan

Marks = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Gates:
    """A gate is a pair (counter, threshold) that some task awaits.

    `signal` is the counter of each entry, `awaits` the number of the set of gates that it awaits: set s is
    `gates[gate_ends[s] : gate_ends[s + 1]]`. `links` [link, 2] are a gate, and the further signals of its counter that
    it takes after the one before; those of counter c are `links[link_ends[c] : link_ends[c + 1]]`.
    """

    signal: Ints
    awaits: Ints
    gate_ends: Ints
    gates: Ints
    link_ends: Ints
    links: Ints
    by_data: Marks
    """For each gate, whether its waiters poll the data instead of the counter."""


def gates_of(plan: Plan, units: Units, entries: Ints) -> Gates:
    """The gates of a program with this brief plan.

    `entries` has, by queue entry, the number of the unit among the units of all layers, which is also the number of its
    set.
    """
    signals = units.counters([unit.signal for unit in units.units])
    who, counters, thresholds = units.awaited()
    base = int(thresholds.max(initial=0)) + 1
    pairs, gates = np.unique(counters * base + thresholds, return_inverse=True)
    asked = _asked(plan, units.brief.layers, base) if plan.hand_offs.awaited else pairs
    of_gate, threshold = np.divmod(pairs, base)
    known = np.unique(np.concatenate([signals, of_gate]))
    behind = np.concatenate([[False], of_gate[1:] == of_gate[:-1]]) if len(pairs) else np.zeros(0, np.bool_)
    before = np.where(behind, np.concatenate([[0], threshold[:-1]])[: len(pairs)], 0)
    return Gates(
        signal=np.searchsorted(known, signals)[entries],
        awaits=entries,
        gate_ends=np.concatenate([[0], np.cumsum(np.bincount(who, minlength=len(signals)))]),
        gates=gates,
        link_ends=np.searchsorted(of_gate, np.append(known, np.iinfo(np.int64).max)),
        links=np.stack([np.arange(len(pairs)), threshold - before], axis=1),
        by_data=~np.isin(pairs, asked),
    )


def _asked(plan: Plan, layers: Layers, base: int) -> Ints:
    """The pairs for which some task polls a counter, as `counter * base + threshold`. The plan has data hand-offs."""
    pairs = sorted({(wait.counter, wait.threshold) for waits in plan.hand_offs.waits for wait in waits})
    if layers.times > BRIEF:
        pairs = [(counter, threshold) for each, threshold in pairs for counter in _in_all_layers(each, layers)]
    return np.array([counter * base + threshold for counter, threshold in pairs], np.int64)


def _in_all_layers(counter: int, layers: Layers) -> range:
    """The program's counters that a counter of the brief program stands for."""
    span, again = layers.counters, layers.times - BRIEF
    place = (counter - span.start) // span.size if counter >= span.start and span.size else -1
    if place < 0:
        return range(counter, counter + 1)
    first = counter if place == 0 else counter + again * span.size
    return range(first, counter + again * span.size + 1, span.size)
