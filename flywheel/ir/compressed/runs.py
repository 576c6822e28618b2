"""Tasks as runs. A run stores once what the tiles of one operation share, so they are checked once.

A step of llama3-8b has 17,000 tasks in 450 runs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Final, NamedTuple, overload

from flywheel.ir.compressed.layers import NO_LAYERS, Layers, Shift, spell
from flywheel.ir.compressed.tiles import Stretch, Tile, Tiles
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.recipe import Recipe
from flywheel.ir.records import Task, Wait, make_task, make_wait, maker

NO_SM: Final = -(1 << 63)
"""In a column of SMs, that of a task without one."""


@dataclass(frozen=True, slots=True)
class Run:
    """Adjacent tasks of a program's list. Equal layers share `tiles`, the same object."""

    op: InstructionKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    out_counter: int
    waits: tuple[Wait, ...]
    label: str
    tiles: Tiles
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
    """The tasks of a program that was built run by run. Ids are places in the list, unless `ids` has others.

    `first[k]` is the place of the first task of `runs[k]`, and `first[-1]` the number of tasks. `sms` has each task's
    SM; with `ids`, NO_SM stands for none. With `layers`, `spelled` are the runs with the template once. As a sequence
    it has the tasks. Tasks, and the runs of all layers, are built on demand.
    """

    __slots__ = ("_brief", "_first", "_ids", "_runs", "_tasks", "_used_sms", "layers", "local", "sms", "spelled")

    def __init__(
        self,
        runs: Sequence[Run],
        sms: Sequence[int],
        layers: Layers = NO_LAYERS,
        ids: Sequence[int] | None = None,
    ) -> None:
        """Raises ValueError for anything but Runs of Tiles, and unless each tile has an SM, and an id where there are
        ids."""
        for run in runs:
            if type(run) is not Run or type(run.tiles) is not Tiles or not run.tiles:
                raise ValueError(f"{run!r:.80} is no run of tiles")
        if type(layers) is not Layers or layers.runs.stop > len(runs):
            raise ValueError(f"{layers!r:.80} are no layers of {len(runs)} runs")
        if layers is not NO_LAYERS and not all(map(_can_move, runs)):
            raise ValueError("a run of layers has operands, counters or a label of another type")
        self.spelled = tuple(runs)
        self.layers = layers
        self.sms: array[int] = _column(sms)
        self._runs: tuple[Run, ...] | None = None if layers is not NO_LAYERS else self.spelled
        self._brief: tuple[int, tuple[Run, ...]] | None = None  # the last answer of `repeated`
        self._first: tuple[int, ...] | None = None
        self.local: tuple[object, bool] | None = None  # (buffers of the last check for local layers, its result)
        self._tasks: tuple[Task, ...] | None = None
        self._used_sms: frozenset[int] | None = None
        sizes = [len(run.tiles) for run in self.spelled]
        tasks = sum(sizes) + (layers.times - 1) * sum(sizes[layers.runs.start : layers.runs.stop])
        if len(self.sms) != tasks:
            raise ValueError(f"{len(self.sms)} SMs for {tasks} tasks")
        self._ids = None if ids is None else _column(ids)
        if self._ids is not None and len(self._ids) != tasks:
            raise ValueError(f"{len(self._ids)} ids for {tasks} tasks")

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of all layers."""
        if self._runs is None:
            self._runs = self.repeated(self.layers.times)
        return self._runs

    @property
    def first(self) -> tuple[int, ...]:
        """The place of the first task of each run, and the number of all tasks."""
        if self._first is None:
            self._first = tuple(accumulate((len(run.tiles) for run in self.runs), initial=0))
        return self._first

    @property
    def placed(self) -> Iterator[tuple[Run, int]]:
        """The runs of all layers, each with the place of its first task."""
        return zip(self.runs, self.first, strict=False)

    @property
    def ids(self) -> Sequence[int]:
        """The id of each task."""
        return range(len(self.sms)) if self._ids is None else self._ids

    @property
    def used_sms(self) -> frozenset[int]:
        """The SMs that have tasks."""
        if self._used_sms is None:
            self._used_sms = frozenset(self.sms)
        return self._used_sms

    def repeated(self, times: int) -> tuple[Run, ...]:
        """The runs of the program in which the template comes `times` times."""
        if self.layers is NO_LAYERS:
            return self.spelled
        if self._brief is None or self._brief[0] != times:
            self._brief = times, self._repeated(times)
        return self._brief[1]

    def _repeated(self, times: int) -> tuple[Run, ...]:
        layers = self.layers
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
        if isinstance(other, Runs) and (self.runs, self.sms, self._ids) == (other.runs, other.sms, other._ids):
            return True
        return isinstance(other, Runs | tuple) and self._all() == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # params are dicts

    def __reduce__(self) -> tuple[Callable[..., Runs], tuple[Any, ...]]:
        return _runs, (self.spelled, self.sms, None if self.layers is NO_LAYERS else self.layers, self._ids)

    def _all(self) -> tuple[Task, ...]:
        if self._tasks is None:
            tasks: list[Task] = []
            ids = self.ids
            absent = None if self._ids is None else NO_SM
            for run, first in self.placed:
                op, inputs, outputs, counter, waits, label, rank = (
                    run.op, run.inputs, run.outputs, run.out_counter, run.waits, run.label, run.rank,
                )  # fmt: skip
                end = first + len(run.tiles)
                for (params, nbytes, flops), number, sm in zip(
                    run.tiles, ids[first:end], self.sms[first:end], strict=True
                ):
                    where = None if sm == absent else sm
                    tasks.append(
                        make_task(
                            number, op, inputs, outputs, counter, waits, params, where, nbytes, flops, label, rank
                        )
                    )
            self._tasks = tuple(tasks)
        return self._tasks


def _can_move(run: Run) -> bool:
    numbers = (*run.inputs, *run.outputs, run.out_counter, *[wait.counter for wait in run.waits])
    return set(map(type, numbers)) == {int} and type(run.label) is str


def _column(numbers: Sequence[int]) -> array[int]:
    if type(numbers) is array and numbers.typecode == "q":
        return numbers
    if not set(map(type, numbers)) <= {int}:
        raise ValueError("an SM or an id is no int")
    try:
        return array("q", numbers)
    except OverflowError:
        raise ValueError("an SM or an id is no int of 64 bits") from None


def _runs(runs: Sequence[Run], sms: Sequence[int], layers: Layers | None, ids: Sequence[int] | None) -> Runs:
    """Runs from what pickle keeps of them. NO_LAYERS is told by its identity, which pickle does not keep."""
    return Runs(runs, sms, layers or NO_LAYERS, ids)


def grouped(tasks: Iterable[Task]) -> list[Run]:
    """The runs of listed tasks: adjacent ones that differ only in params, costs, id and SM are in one run."""
    runs = []
    for (op, inputs, outputs, counter, waits, label, rank), alike in groupby(tasks, _shared):
        tiles = Tiles([Stretch(task.params, task.est_bytes, task.est_flops, 1) for task in alike])
        runs.append(make_run(op, inputs, outputs, counter, waits, label, tiles, rank))
    return runs


def _shared(task: Task) -> tuple[Any, ...]:
    """What the tasks of a run have in common."""
    inputs, outputs, waits = tuple(task.inputs), tuple(task.outputs), tuple(task.waits)
    return task.op, inputs, outputs, task.out_counter, waits, task.label, task.rank


def sms_of(tasks: Sequence[Task]) -> Sequence[int | None]:
    """The SM of each task; None for a task without one."""
    if isinstance(tasks, Runs) and tasks.ids == range(len(tasks)):
        return tasks.sms
    return [task.sm for task in tasks]


def ids_of(tasks: Sequence[Task]) -> Sequence[int]:
    """The id of each task."""
    return tasks.ids if isinstance(tasks, Runs) else [task.id for task in tasks]


def distinct_tasks(tasks: object) -> object:
    """The tasks that have all distinct fields. Of runs whose ids are places, they are the first task of each and, for
    shared tiles, the ends of stretches; of anything else, all."""
    if type(tasks) is not Runs or not hasattr(tasks, "sms"):  # an object made by `__new__` alone lacks it
        return tasks
    if tasks.ids != range(len(tasks)):
        return tuple(tasks)
    seen: set[int] = set()
    found: list[Task] = []
    for run, first in tasks.placed:
        tiles = [(0, run.tiles.stretches[0])] if id(run.tiles) in seen else ends_of(run)
        seen.add(id(run.tiles))
        found += [task_of(run, tile, first + place, tasks.sms[first + place]) for place, tile in tiles]
    return found


def task_of(run: Run, tile: Tile | Stretch, number: int, sm: int | None) -> Task:
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
    for stretch in run.tiles.stretches:
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
        for stretch in run.tiles.stretches:
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
            for stretch in run.tiles.stretches:
                recipe = stretch.params.get("recipe")
                if recipe not in known:
                    known.add(recipe)
                    yield task_of(run, stretch, place, 0)
                place += stretch.n_tiles
        first += len(run.tiles)
