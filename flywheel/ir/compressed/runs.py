"""Tasks as runs. A run stores once what the tiles of one operation share, so they are checked once.

A step of llama3-8b has 17,000 tasks in 450 runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple, overload

from flywheel.ir.compressed.layers import Layers, Shift, spell
from flywheel.ir.compressed.tiles import Stretch, Tile, Tiles, stretches_of
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.recipe import Recipe
from flywheel.ir.records import Task, Wait, make_task, make_wait, maker


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent tasks of a program's list. Equal layers share `tiles`, the same object."""

    op: InstructionKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    out_counter: int
    waits: tuple[Wait, ...]
    label: str
    tiles: Tiles | tuple[Tile, ...]
    rank: int = 0

    def moved(self, shift: Shift) -> Run:
        """The same run, some periods later."""
        least, further, least_counter, later, layer = shift
        counter = self.out_counter
        return make_run(
            self.op,
            tuple([number + further if number >= least else number for number in self.inputs]),
            tuple([number + further if number >= least else number for number in self.outputs]),
            counter + later if counter >= least_counter else counter,
            tuple([
                make_wait(wait.counter + later, wait.threshold) if wait.counter >= least_counter else wait
                for wait in self.waits
            ]) if later else self.waits,
            spell(self.label, layer),
            self.tiles,
            self.rank,
        )  # fmt: skip


make_run: Final = maker(Run)


class Runs(Sequence[Task]):
    """The tasks of a program that was built run by run. Ids are places in the list.

    `first[k]` is the id of the first task of `runs[k]`, and `first[-1]` the number of tasks. `sms` has each task's SM.
    With `layers`, `spelled` are the runs with the template once. As a sequence it has the tasks. Tasks, and the runs of
    all layers, are built on demand.
    """

    __slots__ = ("_brief", "_first", "_runs", "_tasks", "_used_sms", "layers", "local", "sms", "spelled")

    def __init__(self, runs: Sequence[Run], sms: Sequence[int], layers: Layers | None = None) -> None:
        """Raises ValueError for anything but Runs of Tiles, and unless each tile has an SM."""
        for run in runs:
            if type(run) is not Run or type(run.tiles) not in (Tiles, tuple) or not run.tiles:
                raise ValueError(f"{run!r:.80} is no run of tiles")
        for tiles in {id(run.tiles): run.tiles for run in runs}.values():
            if type(tiles) is tuple and set(map(type, tiles)) != {Tile}:
                raise ValueError(f"{tiles!r:.80} are no tiles")
        if layers is not None and (type(layers) is not Layers or layers.runs.stop > len(runs)):
            raise ValueError(f"{layers!r:.80} are no layers of {len(runs)} runs")
        if layers is not None and not all(map(_can_move, runs)):
            raise ValueError("a run of layers has operands, counters or a label of another type")
        self.spelled = tuple(runs)
        self.layers = layers
        self.sms: array[int] = _column(sms)
        self._runs: tuple[Run, ...] | None = None if layers is not None else self.spelled
        self._brief: tuple[int, tuple[Run, ...]] | None = None  # the last answer of `repeated`
        self._first: tuple[int, ...] | None = None
        self.local: tuple[object, bool] | None = None  # (buffers of the last check for local layers, its result)
        self._tasks: tuple[Task, ...] | None = None
        self._used_sms: frozenset[int] | None = None
        sizes = [len(run.tiles) for run in self.spelled]
        tasks = sum(sizes)
        if layers is not None:
            tasks += (layers.times - 1) * sum(sizes[layers.runs.start : layers.runs.stop])
        if len(self.sms) != tasks:
            raise ValueError(f"{len(self.sms)} SMs for {tasks} tasks")

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of all layers."""
        if self._runs is None:
            assert self.layers is not None
            self._runs = self.repeated(self.layers.times)
        return self._runs

    @property
    def first(self) -> tuple[int, ...]:
        """The id of the first task of each run, and the number of all tasks."""
        if self._first is None:
            self._first = tuple(accumulate((len(run.tiles) for run in self.runs), initial=0))
        return self._first

    @property
    def ids(self) -> Sequence[int]:
        """The id of each task."""
        return range(len(self.sms))

    @property
    def used_sms(self) -> frozenset[int]:
        """The SMs that have tasks."""
        if self._used_sms is None:
            self._used_sms = frozenset(self.sms)
        return self._used_sms

    def repeated(self, times: int) -> tuple[Run, ...]:
        """The runs of the program in which the template comes `times` times."""
        if self.layers is None:
            return self.spelled
        if self._brief is None or self._brief[0] != times:
            self._brief = times, self._repeated(times, self.layers)
        return self._brief[1]

    def _repeated(self, times: int, layers: Layers) -> tuple[Run, ...]:
        span, last = layers.runs, layers.shift(times - 1)
        template, behind = self.spelled[span.start : span.stop], self.spelled[span.stop :]
        return (
            *self.spelled[: span.start],
            *[run.moved(shift) for shift in map(layers.shift, range(times)) for run in template],
            *[run.moved(last) for run in behind],
        )

    def __len__(self) -> int:
        return len(self.sms)

    @overload
    def __getitem__(self, place: int) -> Task: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[Task, ...]: ...

    def __getitem__(self, place: int | slice) -> Task | tuple[Task, ...]:
        return self._all()[place]

    def __iter__(self) -> Iterator[Task]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        """Whether the other sequence has equal tasks."""
        if isinstance(other, Runs) and (self.runs, self.sms) == (other.runs, other.sms):
            return True
        return isinstance(other, Runs | tuple) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # params are dicts

    def __reduce__(self) -> tuple[type[Runs], tuple[Any, ...]]:
        return Runs, (self.spelled, self.sms, self.layers)

    def _all(self) -> tuple[Task, ...]:
        if self._tasks is None:
            tasks: list[Task] = []
            for run, first in zip(self.runs, self.first, strict=False):
                op, inputs, outputs, counter, waits, label, rank = (
                    run.op, run.inputs, run.outputs, run.out_counter, run.waits, run.label, run.rank,
                )  # fmt: skip
                sms = self.sms[first : first + len(run.tiles)]
                for number, ((params, nbytes, flops), sm) in enumerate(zip(run.tiles, sms, strict=True), first):
                    tasks.append(
                        make_task(number, op, inputs, outputs, counter, waits, params, sm, nbytes, flops, label, rank)
                    )
            self._tasks = tuple(tasks)
        return self._tasks


def _can_move(run: Run) -> bool:
    numbers = (*run.inputs, *run.outputs, run.out_counter, *[wait.counter for wait in run.waits])
    return set(map(type, numbers)) == {int} and type(run.label) is str


def _column(sms: Sequence[int]) -> array[int]:
    if type(sms) is array and sms.typecode == "q":
        return sms
    if not set(map(type, sms)) <= {int}:
        raise ValueError("an SM is no int")
    try:
        return array("q", sms)
    except OverflowError:
        raise ValueError("an SM is no int of 64 bits") from None


def task_of(run: Run, tile: Tile | Stretch, number: int, sm: int) -> Task:
    """The task of one tile of a run, or of the first tile of a stretch."""
    params, nbytes, flops = tile[:3]
    return make_task(
        number, run.op, run.inputs, run.outputs, run.out_counter, run.waits, params, sm, nbytes, flops, run.label,
        run.rank,
    )  # fmt: skip


def ends_of(run: Run) -> list[tuple[int, Tile | Stretch]]:
    """The first and the last tile of each stretch of a run, with their places. The stretch stands for its first
    tile."""
    found: list[tuple[int, Tile | Stretch]] = []
    start = 0
    for stretch in stretches_of(run.tiles):
        found.append((start, stretch))
        if stretch.n_tiles > 1:
            found.append((start + stretch.n_tiles - 1, stretch.tile(stretch.n_tiles - 1)))
        start += stretch.n_tiles
    return found


class Use(NamedTuple):
    """An operation, its inputs, and the params of one of its tasks."""

    op: InstructionKind
    inputs: Sequence[int]
    params: Mapping[str, Any]


def uses_by_recipe(runs: Iterable[Run]) -> Iterator[Use]:
    """The use of each run; once for adjacent uses with the same recipe."""
    for run in runs:
        before = None
        for stretch in stretches_of(run.tiles):
            recipe = stretch.params.get("recipe")
            if recipe is None or recipe is not before:
                yield Use(run.op, run.inputs, stretch.params)
            before = recipe


def tasks_by_recipe(runs: Iterable[Run], reading: Set[int]) -> Iterator[Task]:
    """One task for each recipe of a run, for the runs that read any buffer of `reading`."""
    first = 0
    for run in runs:
        if not reading.isdisjoint(run.inputs):
            known: set[Recipe | None] = set()
            place = first
            for stretch in stretches_of(run.tiles):
                recipe = stretch.params.get("recipe")
                if recipe not in known:
                    known.add(recipe)
                    yield task_of(run, stretch, place, 0)
                place += stretch.n_tiles
        first += len(run.tiles)
