"""Happens-before between tasks, decided on counters.

A task signals one counter, and a wait is a full join, so task `a` happens before task `b` exactly when `b` waits, directly
or through other producers, on `a`'s counter. The oracle therefore walks counters and *wait classes* (tasks with the same
set of awaited counters), of which a program has hundreds where it has tens of thousands of tasks. An SM's queue order is
deliberately not part of the relation.

Reachability: levels bound the walk, chains (each counter continues the chain of one predecessor) answer most positive
queries at once, and a depth-first walk decides the rest, so the answer is exact at any size.
"""

from __future__ import annotations

from collections.abc import Sequence

from flywheel.ir.records import Task


class HappensBefore:
    """The relation over `tasks`; `order` lists all their positions topologically. Waits must be full joins."""

    __slots__ = ("_answers", "_chain", "_class_counters", "_counter_classes", "_level", "_rank", "wait_class")

    def __init__(self, tasks: Sequence[Task], order: Sequence[int]) -> None:
        self.wait_class: list[int] = [0] * len(tasks)
        self._class_counters: list[tuple[int, ...]] = []
        self._counter_classes: dict[int, set[int]] = {}
        self._level: dict[int, int] = {}
        self._chain: dict[int, int] = {}
        self._rank: dict[int, int] = {}
        self._answers: dict[tuple[int, int], bool] = {}
        by_identity: dict[int, int] = {}
        by_counters: dict[tuple[int, ...], int] = {}
        class_level: list[int] = []
        taken: set[int] = set()
        levels, classes = self._level, self._counter_classes
        for index in order:
            task = tasks[index]
            waits = task.waits
            group = by_identity.get(id(waits))
            if group is None:
                counters = tuple(sorted({wait.counter for wait in waits}))
                group = by_counters.setdefault(counters, len(self._class_counters))
                if group == len(self._class_counters):
                    self._class_counters.append(counters)
                    class_level.append(1 + max((levels.get(counter, 0) for counter in counters), default=0))
                by_identity[id(waits)] = group
            self.wait_class[index] = group
            counter = task.out_counter
            groups = classes.get(counter)
            if groups is None:
                classes[counter] = {group}
                levels[counter] = class_level[group]
                self._extend_chain(counter, group, taken)
            elif group not in groups:
                groups.add(group)
                levels[counter] = max(levels[counter], class_level[group])

    def _extend_chain(self, counter: int, group: int, taken: set[int]) -> None:
        for before in self._class_counters[group]:
            if before not in taken and before in self._chain:
                taken.add(before)
                self._chain[counter], self._rank[counter] = self._chain[before], self._rank[before] + 1
                return
        self._chain[counter], self._rank[counter] = counter, 0

    def counter_before(self, counter: int, group: int) -> bool:
        """Whether every producer of `counter` happens before every task of wait class `group`."""
        key = (counter, group)
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = self._walk(counter, group)
        return answer

    @property
    def depth(self) -> int:
        """Number of levels: the longest chain of counters."""
        return max(self._level.values(), default=0)

    def depth_of(self, counter: int) -> int:
        """Level of a counter: 1 + the deepest counter that its producers await."""
        return self._level.get(counter, 0)

    def before(self, tasks: Sequence[Task], first: int, second: int) -> bool:
        """Whether the task at position `first` happens before the one at `second`."""
        return self.counter_before(tasks[first].out_counter, self.wait_class[second])

    def _walk(self, counter: int, group: int) -> bool:
        if counter in self._class_counters[group]:
            return True
        chain, rank, level = self._chain.get(counter), self._rank.get(counter, 0), self._level.get(counter, 0)
        stack, seen, done = list(self._class_counters[group]), set(self._class_counters[group]), {group}
        while stack:
            current = stack.pop()
            if current == counter or (self._chain.get(current) == chain and self._rank[current] >= rank):
                return True
            if self._level.get(current, 0) <= level:
                continue
            for before in self._counter_classes.get(current, ()):
                if before not in done:
                    done.add(before)
                    for awaited in self._class_counters[before]:
                        if awaited not in seen:
                            seen.add(awaited)
                            stack.append(awaited)
        return False
