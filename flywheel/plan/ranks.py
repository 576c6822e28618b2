"""A program of several GPUs, split into one program for each: its own tasks, the data that arrives, and its pushes.

Source: docs/vm.md, "Ranks".
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from flywheel.errors import InvalidProgramError
from flywheel.ir import COMPUTE_DTYPES, Buffer, BufferKind, MegakernelProgram, Run, Runs, Wait
from flywheel.ir.compressed import Tiles, as_runs, make_run, task_of, tiles_of
from flywheel.ir.exchange import pushed_counters
from flywheel.ir.records import make_buffer
from flywheel.plan.handoff import copies
from flywheel.plan.sending import Ints, TileReader, made_by, numbered, places_of

_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class RankPart:
    """What one GPU of several runs, as a program of its own. Its tasks have the ids that they have in the program of
    all.

    `images` says where its results go: the id of a buffer here -> rank -> the id of the buffer there. `peers` are, by
    place in the list of tasks, the ranks that a task's result goes to, a bit each. A task that multiplies sends what it
    stores; any other one with peers is one of `pushes`, whose output is a stand-in, one of `away`, for all that it
    pushes into. `arrived` are ids of buffers here that others push into. No task waits for a push: who reads what
    arrived looks at it until it is there. That says nothing of other columns, so an order that frees a page may be
    gone: no two buffers share memory.
    """

    program: MegakernelProgram
    rank: int
    ranks: int
    images: Mapping[int, Mapping[int, int]]
    peers: npt.NDArray[np.uint32]
    pushes: _Bools
    away: frozenset[int]
    arrived: frozenset[int]


def parts_of(program: MegakernelProgram) -> tuple[RankPart, ...]:
    """The parts of a program of several ranks that `validate(strict=True)` accepts, by rank.

    Raises InvalidProgramError for three kinds of programs. One exchanges integers. One copies into a buffer that other
    ranks push into: copied bits may look like an element that is not there yet. One has a counter that both a push and
    a task of the counter's own GPU signal.
    """
    buffers = {buffer.id: buffer for buffer in program.buffers}
    tasks = as_runs(program)
    remote = pushed_counters(tasks.runs, buffers)
    pushed = {number for run in tasks.runs for number in run.outputs if buffers[number].rank != run.rank}
    by_rank: list[list[tuple[Run, int]]] = [[] for _ in range(program.ranks)]
    for run, first in tasks.placed:
        for number in run.outputs:
            if number in pushed:
                _check(run, tasks.ids[first : first + len(run.tiles)], buffers[number])
        if run.out_counter in remote:
            _check_signal(run, tasks.ids[first], buffers)
        own = tuple([wait for wait in run.waits if wait.counter not in remote])
        by_rank[run.rank].append((_alone(run, own), first))
    sms = np.array(tasks.sms, np.int64)
    ids = np.array(tasks.ids, np.int64) if tasks.ids != range(len(tasks)) else np.arange(len(tasks))
    placed = [(each, places_of(each)) for each in by_rank]
    lists = [_numbered([run for run, _ in each], sms[places], ids[places]) for each, places in placed]
    read = TileReader()
    return tuple(_part(program, rank, each, buffers, pushed, read) for rank, each in enumerate(lists))


def _alone(run: Run, waits: tuple[Wait, ...]) -> Run:
    """The run in the program of its own GPU, with these waits."""
    return make_run(run.op, run.inputs, run.outputs, run.out_counter, waits, run.label, run.tiles)


def _numbered(runs: Sequence[Run], sms: Ints, ids: Ints) -> Runs:
    return Runs(runs, array("q", sms.tobytes()), ids=array("q", ids.tobytes()))


def _check(run: Run, ids: Sequence[int], buffer: Buffer) -> None:
    what = f"({run.label}): buffer {buffer.id} ({buffer.name})"
    if buffer.dtype not in COMPUTE_DTYPES:
        raise InvalidProgramError(
            f"task {ids[0]} {what} is {buffer.dtype.name}, and the kernel exchanges floats only"
        )
    place = 0
    for stretch in run.tiles.stretches if buffer.rank == run.rank else ():
        if copies(task_of(run, stretch, ids[place], 0), buffer.id):
            raise InvalidProgramError(
                f"task {ids[place]} {what} takes pushes and a COPY; a copied element may have all bits set"
            )
        place += stretch.n_tiles


def _check_signal(run: Run, first: int, buffers: Mapping[int, Buffer]) -> None:
    """Raise InvalidProgramError for a run, with the id of its first task, that signals a counter which pushes signal,
    too.

    Nobody waits for such a counter. So it may order only the pushed data, and the proof reads it so: the counter says
    nothing about work before a push.
    """
    if all(buffers[number].rank == run.rank for number in run.outputs):
        raise InvalidProgramError(
            f"task {first} ({run.label}): signals counter {run.out_counter}, as pushes do; the kernel waits for no "
            f"such counter"
        )


def _part(
    program: MegakernelProgram, rank: int, tasks: Runs, buffers: Mapping[int, Buffer], pushed: Set[int],
    read: TileReader,
) -> RankPart:  # fmt: skip
    images: dict[int, dict[int, int]] = {}
    for run in tasks.runs:
        for number in run.outputs:
            if buffers[number].rank != rank:
                images.setdefault(run.inputs[0], {})[buffers[number].rank] = number
    keeps, peers, pushes = _with_peers(tasks, buffers, rank, images.keys(), read)
    kept = _kept(tasks, keeps)
    away = frozenset(number for run in kept.runs for number in run.outputs if buffers[number].rank != rank)
    awaited = {wait.counter for run in kept.runs for wait in run.waits}
    own = [
        _moved(buffer, BufferKind.ACTIVATION if buffer.id in away else buffer.kind)
        for buffer in program.buffers
        if buffer.rank == rank or buffer.id in away
    ]
    part = replace(
        program,
        buffers=tuple(own),
        counters=tuple([counter for counter in program.counters if counter.id in awaited]),
        tasks=kept,
        pages=None,
        ranks=1,
    )
    arrived = frozenset(number for number in pushed if buffers[number].rank == rank)
    return RankPart(part, rank, program.ranks, images, peers[keeps], pushes[keeps], away, arrived)


def _moved(buffer: Buffer, kind: BufferKind) -> Buffer:
    """The buffer on rank 0."""
    return make_buffer(
        buffer.id, buffer.name, kind, buffer.dtype, buffer.shape, buffer.space, buffer.source, 0, buffer.part
    )


class _Pushes(NamedTuple):
    """A GPU's pushes: their places in its list, their tiles, the ranks that they go to, a bit each, and the numbers of
    their waits."""

    places: Ints
    tiles: Ints
    ranks: npt.NDArray[np.uint32]
    waits: Ints


def _pushes_of(tasks: Runs, buffers: Mapping[int, Buffer], rank: int, read: TileReader) -> _Pushes:
    pushing = [
        (run, first)
        for run, first in zip(tasks.runs, tasks.first, strict=False)
        if run.outputs and buffers[run.outputs[0]].rank != rank
    ]
    runs = [run for run, _ in pushing]
    sizes = np.array([len(run.tiles) for run in runs], np.int64)
    numbers: dict[tuple[Wait, ...], int] = {}
    return _Pushes(
        places_of(pushing),
        read(runs, [run.inputs[0] for run in runs]),
        np.repeat(np.array([1 << buffers[run.outputs[0]].rank for run in runs], np.uint32), sizes),
        np.repeat(np.array([numbers.setdefault(run.waits, len(numbers)) for run in runs], np.int64), sizes),
    )


def _with_peers(
    tasks: Runs, buffers: Mapping[int, Buffer], rank: int, sources: Set[int], read: TileReader
) -> tuple[_Bools, npt.NDArray[np.uint32], _Bools]:
    """By place in the list of a GPU's tasks: (whether the task stays, the ranks that its result goes to, whether it is
    a push).

    A push of what one product stores is left out: the product sends it. It could begin no later, and what it pushes is
    written once and has readers on the other GPU alone, which wait for it. Pushes of the same columns to several GPUs,
    on one SM and behind the same waits, are one.
    """
    found = _pushes_of(tasks, buffers, rank, read)
    stored, makers = made_by(tasks, buffers, sources, read)
    tiles = numbered(np.hstack([stored, found.tiles]))
    makers_of = np.full(len(tiles), -1, np.int64)  # by the number of a tile
    makers_of[tiles[: len(makers)]] = makers
    pushed = tiles[len(makers) :]
    senders = makers_of[pushed]
    left = senders < 0
    sms = np.array(tasks.sms, np.int64)[found.places]
    alike = numbered(np.stack([pushed, sms, found.waits])[:, left])
    first = found.places[left][np.unique(alike, return_index=True)[1]]
    senders[left] = first[alike]

    peers = np.zeros(len(tasks), np.uint32)
    np.bitwise_or.at(peers, senders, found.ranks)
    pushes = np.zeros(len(tasks), np.bool_)
    pushes[found.places] = True
    stays = ~pushes
    stays[first] = True
    return stays, peers, pushes


def _kept(tasks: Runs, stays: _Bools) -> Runs:
    """The tasks that stay."""
    counts = np.concatenate([[0], np.cumsum(stays)])[list(tasks.first)]
    known: dict[tuple[int, bytes], Tiles] = {}
    kept = []
    for run, (first, end), left in zip(tasks.runs, pairwise(tasks.first), np.diff(counts).tolist(), strict=True):
        if left == end - first:
            kept.append(run)
        elif left:
            here = stays[first:end]
            key = id(run.tiles), here.tobytes()
            if key not in known:
                known[key] = tiles_of(compress(run.tiles, here.tolist()))
            kept.append(replace(run, tiles=known[key]))
    return _numbered(kept, np.array(tasks.sms, np.int64)[stays], np.array(tasks.ids, np.int64)[stays])
