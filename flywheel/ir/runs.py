"""Tasks as runs: what the tiles of one operation share is kept once, so that whoever looks at it looks once.

A step of llama3-8b has 17,000 tasks and 450 runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, overload

from flywheel.ir.draft import TaskDraft
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.records import Task, Wait


class Tile(NamedTuple):
    """What one task of a run has of its own, but for its SM: its params, and what it streams and computes."""

    params: Mapping[str, Any]
    est_bytes: int
    est_flops: int


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a program's list of tasks. Equal layers share `tiles`, the same object."""

    op: InstructionKind
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    out_counter: int
    waits: tuple[Wait, ...]
    label: str
    tiles: tuple[Tile, ...]


class Runs(Sequence[Task]):
    """The tasks of a program that was built run by run; ids are places in the list.

    `first[k]` is the id of the first task of `runs[k]`, and `first[-1]` their number. `sms` has the SM of each task.
    As a sequence it is its tasks, which are built when somebody asks for one.
    """

    __slots__ = ("_tasks", "first", "runs", "sms")

    def __init__(self, runs: Sequence[Run], sms: Sequence[int]) -> None:
        """Raises ValueError for what is no Run of Tiles, and unless there is an SM for each tile."""
        for run in runs:
            if type(run) is not Run or type(run.tiles) is not tuple or not run.tiles:
                raise ValueError(f"{run!r:.80} is no run of tiles")
        for tiles in {id(run.tiles): run.tiles for run in runs}.values():
            if set(map(type, tiles)) != {Tile}:
                raise ValueError(f"{tiles!r:.80} are no tiles")
        if not set(map(type, sms)) <= {int}:
            raise ValueError("an SM is no int")
        self.runs = tuple(runs)
        self.first = tuple(accumulate((len(run.tiles) for run in self.runs), initial=0))
        self.sms = tuple(sms)
        self._tasks: tuple[Task, ...] | None = None
        if len(self.sms) != self.first[-1]:
            raise ValueError(f"{len(self.sms)} SMs for {self.first[-1]} tasks")

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

    def __reduce__(self) -> tuple[type[Runs], tuple[tuple[Run, ...], tuple[int, ...]]]:
        return Runs, (self.runs, self.sms)

    def _all(self) -> tuple[Task, ...]:
        if self._tasks is None:
            tasks: list[Task] = []
            for run, first in zip(self.runs, self.first, strict=False):
                op, inputs, outputs, counter, waits, label = (
                    run.op, run.inputs, run.outputs, run.out_counter, run.waits, run.label,
                )  # fmt: skip
                sms = self.sms[first : first + len(run.tiles)]
                for number, ((params, nbytes, flops), sm) in enumerate(zip(run.tiles, sms, strict=True), first):
                    draft = TaskDraft(number, op, inputs, outputs, counter, waits, params, sm, nbytes, flops, label)
                    tasks.append(draft.freeze())
            self._tasks = tuple(tasks)
        return self._tasks


def task_of(run: Run, place: int, number: int, sm: int) -> Task:
    """The task of one tile of a run, by its place in `tiles`."""
    params, nbytes, flops = run.tiles[place]
    return TaskDraft(
        number, run.op, run.inputs, run.outputs, run.out_counter, run.waits, params, sm, nbytes, flops, run.label
    ).freeze()


def tasks_by_recipe(tasks: Sequence[Task]) -> Iterable[Task]:
    """One task for all of a run that have its recipe: what shows every operation and every operand that there is.

    All tasks, where they are no runs.
    """
    return _by_recipe(tasks) if isinstance(tasks, Runs) else tasks


def _by_recipe(tasks: Runs) -> Iterator[Task]:
    known: dict[int, list[int]] = {}
    for run, first in zip(tasks.runs, tasks.first, strict=False):
        if id(run.tiles) not in known:
            recipes = {id(tile.params.get("recipe")): place for place, tile in reversed(list(enumerate(run.tiles)))}
            known[id(run.tiles)] = sorted(recipes.values())
        for place in known[id(run.tiles)]:
            yield task_of(run, place, first + place, tasks.sms[first + place])
