"""The signals and waits of tasks, by number, and which waits poll data instead of a counter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.cost_model.units import Ints, Units
from flywheel.ir import MegakernelProgram, Run, Runs, Stretch, Wait
from flywheel.ir.layers import LayeredTable, Layers
from flywheel.ir.runs import task_of
from flywheel.ir.tiles import stretches_of
from flywheel.plan import KernelVariant
from flywheel.plan.handoff import Parts, by_data, shares_pages, waits_by_data
from flywheel.plan.nodes import group_tasks

Marks = npt.NDArray[np.bool_]

_BRIEF: Final = 2
"""Templates in a program that shows all hand-offs. A task that polls a counter is in the counter's layer or the next
one, so the first template stands for all but the last."""


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


def gates_of(program: MegakernelProgram, variant: KernelVariant, units: Units, entries: Ints) -> Gates:
    """The gates of a program.

    `entries` has, by queue entry, the number of the unit among the units of all layers, which is also the number of its
    set.
    """
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
    """The pairs for which some task polls a counter, as `counter * base + threshold`."""
    layers = units.layers
    by_counters = not variant.data_hand_offs or shares_pages(program)
    found = None if by_counters else _waits_by_data(program, layers)
    if found is None:
        _, counters, thresholds = units.awaited()
        return counters * base + thresholds
    pairs = sorted({(wait.counter, wait.threshold) for waits in found for wait in waits})
    if layers is not None and layers.times > _BRIEF:
        pairs = [(counter, threshold) for each, threshold in pairs for counter in _in_all_layers(each, layers)]
    return np.array([counter * base + threshold for counter, threshold in pairs], np.int64)


def _waits_by_data(program: MegakernelProgram, layers: Layers | None) -> Sequence[Sequence[Wait]] | None:
    """The remaining waits of a program's parts, of the brief program if it has layers; None where all waits remain."""
    tasks, buffers = program.tasks, program.buffers
    if not isinstance(tasks, Runs):
        hand_offs = by_data(replace(program, pages=None), group_tasks(tasks))
        return hand_offs.waits if hand_offs.awaited else None
    if layers is not None and isinstance(buffers, LayeredTable):
        times = min(layers.times, _BRIEF)
        looks = dict(enumerate(buffers.column(lambda each: each, times)))  # their ids are not used
        found = waits_by_data(_parts(tasks.repeated(times)), looks)
    else:
        found = waits_by_data(_parts(tasks.runs), {each.id: each for each in buffers})
    return None if found is None else found[1]


def _parts(runs: Sequence[Run]) -> Parts:
    """The stretches of some runs."""
    stretches = [(run, stretch) for run in runs for stretch in stretches_of(run.tiles)]
    return Parts(
        [task_of(run, stretch, 0, 0) for run, stretch in stretches],
        [[stretch.params] for _, stretch in stretches],
        [[_columns(stretch)] for _, stretch in stretches],
        [stretch.n_tiles for _, stretch in stretches],
    )


def _columns(stretch: Stretch) -> tuple[int, int]:
    params, n_tiles = stretch.params, stretch.n_tiles
    start = params.get("n_off", 0)
    return start, start + n_tiles * params.get("N_tile", 0)


def _in_all_layers(counter: int, layers: Layers) -> range:
    """The program's counters that a counter of the brief program stands for."""
    span, again = layers.counters, layers.times - _BRIEF
    place = (counter - span.start) // span.size if counter >= span.start and span.size else -1
    if place < 0:
        return range(counter, counter + 1)
    first = counter if place == 0 else counter + again * span.size
    return range(first, counter + again * span.size + 1, span.size)
