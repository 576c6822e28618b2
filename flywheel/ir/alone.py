"""The work of one GPU of several as a program of its own, to predict its time and count its reads."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from flywheel.ir.access import Region, tile
from flywheel.ir.compressed import NO_LAYERS, Brief, Run, Runs, Span, Tiles, as_runs, brief_of, table_of
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.operations import PRODUCTS
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.recipe import Input, Recipe, Scratch
from flywheel.ir.records import Buffer, Wait


def alone(program: MegakernelProgram, rank: int) -> MegakernelProgram:
    """The program of one GPU of a valid program: its tasks without its pushes and without waits for others' pushes.

    It is not a program to run. A matrix has only the rows that this GPU multiplies, and its product as many columns.
    Buffers and counters keep their ids; tasks are numbered anew. No buffers share a page: on several GPUs, each has
    memory of its own.
    """
    brief, tasks = brief_of(program), as_runs(program)
    layers, spelled = brief.layers, brief.runs
    homes = {buffer.id: buffer.rank for buffer in brief.buffers}
    own = [
        place
        for place, run in enumerate(spelled)
        if run.rank == rank and all(homes[number] == rank for number in run.outputs)
    ]
    kept = [spelled[place] for place in own]
    made = {number for run in kept for number in run.outputs}
    arrived = {number for run in spelled if run.rank != rank for number in run.outputs if homes[number] == rank}
    runs = _made_here(_waiting(kept), arrived - made)
    trimmed, runs = _trimmed(brief.buffers, runs)
    sms = _sms(tasks.sms, brief, set(own))
    ends = [sum(place < end for place in own) for end in (layers.runs.start, layers.runs.stop)]
    fewer = layers if layers is NO_LAYERS else replace(layers, runs=Span(*ends))
    return replace(
        program,
        ranks=1,
        buffers=table_of(trimmed, fewer),
        counters=table_of(brief.counters, fewer),
        tasks=Runs(runs, sms, fewer),
        pages=None,
    )


def _waiting(runs: Sequence[Run]) -> list[Run]:
    """The runs, with waits only for counters that these runs signal."""
    signals = Counter[int]()
    for run in runs:
        signals[run.out_counter] += len(run.tiles)
    found = []
    for run in runs:
        waits = tuple([Wait(wait.counter, signals[wait.counter]) for wait in run.waits if signals[wait.counter]])
        found.append(run if waits == run.waits else replace(run, waits=waits))
    return found


def _made_here(runs: Sequence[Run], pushed: set[int]) -> list[Run]:
    """The runs, with each summand from another GPU replaced by one of this GPU's, which has as many bytes."""
    found = []
    for run in runs:
        own = [number for number in run.inputs if number not in pushed]
        inputs = tuple([own[0] if number in pushed and own else number for number in run.inputs])
        found.append(run if inputs == run.inputs else replace(run, inputs=inputs))
    return found


def _sms(sms: array[int], brief: Brief, own: set[int]) -> array[int]:
    """The SMs of the runs `own`, once for each time that a run comes."""
    listed = [(len(run.tiles), place in own) for place, run in enumerate(brief.runs)]
    start, stop = brief.layers.runs.start, brief.layers.runs.stop
    listed[start:stop] = listed[start:stop] * brief.layers.times
    found, first = array("q"), 0
    for size, kept in listed:
        if kept:
            found.extend(sms[first : first + size])
        first += size
    return found


def _trimmed(buffers: Sequence[Buffer], runs: Sequence[Run]) -> tuple[tuple[Buffer, ...], list[Run]]:
    """(the buffers, with only the rows of matrices that runs multiply and as many columns of the products; the runs,
    with columns counted from the first of those rows)."""
    rows: dict[int, Region] = {}
    for run in runs:
        for stretch in run.tiles.stretches:
            columns = tile(stretch.params)
            for number in _multiplied(run, stretch.params) if columns is not None else ():
                assert columns is not None
                end = columns[0] + stretch.n_tiles * (columns[1] - columns[0])
                start, stop = rows.get(number, (columns[0], end))
                rows[number] = min(start, columns[0]), max(stop, end)
    shapes = {buffer.id: tuple(buffer.shape) for buffer in buffers}
    fewer = {number: ends for number, ends in rows.items() if ends[1] - ends[0] < shapes[number][0]}
    moved = []
    for run in runs:
        ends = next((fewer[number] for number in _multiplied(run, run.tiles[0].params) if number in fewer), None)
        moved.append(run if ends is None else replace(run, tiles=_shifted(run, ends[0])))
        if ends is not None:
            product = run.outputs[0]
            shapes[product] = (*shapes[product][:-1], ends[1] - ends[0])
    for number, (start, stop) in fewer.items():
        shapes[number] = (stop - start, *shapes[number][1:])
    return tuple([b if shapes[b.id] == tuple(b.shape) else replace(b, shape=shapes[b.id]) for b in buffers]), moved


def _shifted(run: Run, start: int) -> Tiles:
    return Tiles(
        [
            each._replace(params={**each.params, "n_off": each.params["n_off"] - start})
            for each in run.tiles.stretches
        ]
    )


def _multiplied(run: Run, params: Mapping[str, Any]) -> list[int]:
    """The matrices of which a task multiplies the rows named by its columns."""
    if run.op in PRODUCTS:
        return [run.inputs[1]]
    if run.op is not InstructionKind.FUSED:
        return []
    return [run.inputs[number] for number in _matrices(params["recipe"])]


@lru_cache(maxsize=1 << 12)
def _matrices(recipe: Recipe) -> tuple[int, ...]:
    """The inputs that are matrices of products."""
    codes = {step.out: step.args[0] for step in recipe.steps if step.op is InstructionKind.DEQUANT}
    matrices = [step.args[1] for step in recipe.steps if step.op in PRODUCTS]
    places = [codes.get(arg, arg) if isinstance(arg, Scratch) else arg for arg in matrices]
    return tuple([arg.number for arg in places if isinstance(arg, Input)])
