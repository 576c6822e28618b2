"""What may happen in any interleaving of the tasks of a small program of several ranks, found by trying all of them.

A task runs at once: it reads, writes and signals. A push reads when it runs, and its columns land, and its signal with
them, at any time later. What a task knows is what the counters that it awaits tell: a task of its GPU passes on all
that it knew; what lands tells of itself alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flywheel.ir import MegakernelProgram, Task
from flywheel.ir.exchange import is_push

Cell = tuple[int, int]
"""A buffer and a column."""


_State = tuple[frozenset[int], frozenset[int], tuple[tuple[Cell, int], ...]]
"""Tasks that ran, pushes that landed, and whose write each cell holds."""


@dataclass
class Findings:
    """What went wrong in some interleaving."""

    hangs: bool = False
    late: set[int] = field(default_factory=set)
    """Pushes that land when all tasks of their GPU have run."""
    stale: set[int] = field(default_factory=set)
    """Readers of what nothing wrote, or of a write that they do not know of."""
    seen: dict[tuple[int, Cell], set[int]] = field(default_factory=dict)
    """By reader and cell, whose writes it saw."""

    @property
    def safe(self) -> bool:
        return not (self.hangs or self.late or self.stale or any(len(each) > 1 for each in self.seen.values()))


def explore(program: MegakernelProgram) -> Findings:
    """All interleavings of a program whose waits are full joins."""
    return _Explorer(program).run()


class _Explorer:
    def __init__(self, program: MegakernelProgram) -> None:
        self.tasks = program.tasks
        self.buffers = {buffer.id: buffer for buffer in program.buffers}
        self.pushes = {
            place for place, task in enumerate(self.tasks)
            if task.outputs and self.buffers[task.outputs[0]].rank != task.rank
        }  # fmt: skip
        signals: dict[int, list[int]] = {}
        for place, task in enumerate(self.tasks):
            signals.setdefault(task.out_counter, []).append(place)
        self.needs = [[p for wait in task.waits for p in signals.get(wait.counter, [])] for task in self.tasks]
        self.known = [self._known(place, set()) for place in range(len(self.tasks))]
        self.queue: dict[int, int] = {}
        last: dict[tuple[int, int], int] = {}
        for place, task in enumerate(self.tasks):
            if task.sm is not None:
                if (task.rank, task.sm) in last:
                    self.queue[place] = last[task.rank, task.sm]
                last[task.rank, task.sm] = place
        self.inputs = {b.id for b in program.buffers if b.kind.name in ("WEIGHT", "CONST", "IO_INPUT")}
        self.found = Findings()

    def _known(self, place: int, path: set[int]) -> set[int]:
        """The writers that a task knows of."""
        known: set[int] = set()
        for each in self.needs[place]:
            if each not in known and each not in path:
                known.add(each)
                if each not in self.pushes:
                    known |= self._known(each, path | {place})
        return known

    def run(self) -> Findings:
        seen: set[_State] = set()
        stack: list[_State] = [(frozenset(), frozenset(), ())]
        everything = len(self.tasks)
        while stack:
            state = stack.pop()
            if state in seen:
                continue
            seen.add(state)
            ran, landed, memory = state
            moved = False
            for place in range(everything):
                if place in ran and place in self.pushes and place not in landed:
                    self._check_late(place, ran)
                    stack.append((ran, landed | {place}, self._written(memory, place)))
                    moved = True
                elif place not in ran and self._may(place, ran, landed):
                    self._read(place, dict(memory))
                    after = memory if place in self.pushes else self._written(memory, place)
                    stack.append((ran | {place}, landed, after))
                    moved = True
            if not moved and len(ran) < everything:
                self.found.hangs = True
        return self.found

    def _may(self, place: int, ran: frozenset[int], landed: frozenset[int]) -> bool:
        done = all(each in (landed if each in self.pushes else ran) for each in self.needs[place])
        return done and self.queue.get(place, place) in (ran | {place})

    def _check_late(self, place: int, ran: frozenset[int]) -> None:
        home = self.buffers[self.tasks[place].outputs[0]].rank
        if all(other in ran for other, task in enumerate(self.tasks) if task.rank == home):
            self.found.late.add(self.tasks[place].id)

    def _read(self, place: int, memory: dict[Cell, int]) -> None:
        task = self.tasks[place]
        for number in task.inputs:
            if number in self.inputs:
                continue
            for column in _columns(task, self.buffers[number].numel):
                writer = memory.get((number, column), -1)
                self.found.seen.setdefault((task.id, (number, column)), set()).add(writer)
                if writer not in self.known[place]:
                    self.found.stale.add(task.id)

    def _written(self, memory: tuple[tuple[Cell, int], ...], place: int) -> tuple[tuple[Cell, int], ...]:
        task, held = self.tasks[place], dict(memory)
        for number in task.outputs:
            for column in _columns(task, self.buffers[number].numel):
                held[number, column] = place
        return tuple(sorted(held.items()))


def _columns(task: Task, width: int) -> Sequence[int]:
    if is_push(task):
        start: int = task.params["n_off"]
        return range(start, start + task.params["N_tile"])
    return range(width)
