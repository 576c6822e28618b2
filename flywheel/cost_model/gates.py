"""What tasks signal and await, by numbers, and who of them looks at the data instead of a counter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.cost_model.units import Ints, Units
from flywheel.ir import MegakernelProgram, Runs, Stretch, Tile
from flywheel.ir.layers import Layers
from flywheel.ir.repeating import repeated
from flywheel.ir.tiles import stretches_of
from flywheel.plan import KernelVariant
from flywheel.plan.handoff import HandOffs, by_data, shares_pages
from flywheel.plan.nodes import group_tasks

Marks = npt.NDArray[np.bool_]

_BRIEF: Final = 2
"""Templates in a program that shows the hand-offs of all: who asks for a counter is in its layer or the next one. So
the first stands for all but the last."""


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
    """Per gate: whether those who wait look at the data instead of the counter."""


def gates_of(program: MegakernelProgram, variant: KernelVariant, units: Units, entries: Ints) -> Gates:
    """The gates of a program; `entries` are, by queue entry, numbers of units of all layers, and of their sets."""
    signals = units.counters([unit.signal for unit in units.units])
    who, counters, thresholds = units.awaited()
    base = int(thresholds.max(initial=0)) + 1
    pairs, gates = np.unique(counters * base + thresholds, return_inverse=True)
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
        by_data=~np.isin(pairs, _asked(program, variant, units, base)),
    )


def _asked(program: MegakernelProgram, variant: KernelVariant, units: Units, base: int) -> Ints:
    """The pairs that some task asks a counter for, as `counter * base + threshold`."""
    layers = units.layers
    if not variant.data_hand_offs or shares_pages(program):
        _, counters, thresholds = units.awaited()
        return counters * base + thresholds
    brief = program if layers is None or layers.times <= _BRIEF else repeated(program, _BRIEF)
    hand_offs = _by_data(replace(brief, pages=None))
    pairs = sorted({(wait.counter, wait.threshold) for waits in hand_offs.waits for wait in waits})
    if layers is not None and brief is not program:
        pairs = [(counter, threshold) for each, threshold in pairs for counter in _in_all_layers(each, layers)]
    return np.array([counter * base + threshold for counter, threshold in pairs], np.int64)


def _by_data(program: MegakernelProgram) -> HandOffs:
    """The hand-offs of a program; a stretch of its tiles is looked at as one that is as wide."""
    tasks = program.tasks
    if not isinstance(tasks, Runs):
        return by_data(program, group_tasks(tasks))
    wide: dict[int, tuple[Tile, ...]] = {}
    for run in tasks.runs:
        if id(run.tiles) not in wide:
            wide[id(run.tiles)] = tuple([_as_one(each) for each in stretches_of(run.tiles)])
    runs = [replace(run, tiles=wide[id(run.tiles)]) for run in tasks.runs]
    grouping = group_tasks(Runs(runs, [0] * sum([len(run.tiles) for run in runs])))
    counts = np.array([each.n_tiles for run in tasks.runs for each in stretches_of(run.tiles)], np.int64)
    sizes = np.zeros(len(grouping.firsts), np.int64)
    np.add.at(sizes, grouping.node_of, counts)
    return by_data(program, grouping, sizes)


def _as_one(stretch: Stretch) -> Tile:
    params = stretch.params
    if stretch.n_tiles > 1:
        params = {**params, "N_tile": stretch.n_tiles * params["N_tile"]}
    return Tile(params, stretch.est_bytes, stretch.est_flops)


def _in_all_layers(counter: int, layers: Layers) -> range:
    """The counters that one of the brief program stands for."""
    span, again = layers.counters, layers.times - _BRIEF
    place = (counter - span.start) // span.size if counter >= span.start and span.size else -1
    if place < 0:
        return range(counter, counter + 1)
    first = counter if place == 0 else counter + again * span.size
    return range(first, counter + again * span.size + 1, span.size)
