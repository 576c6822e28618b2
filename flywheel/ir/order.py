"""Happens-before between tasks, decided on counters.

A task signals one counter, and a wait is a full join. So task `a` happens before task `b` exactly if `b` waits on `a`'s
counter, directly or through other producers. The oracle therefore walks over counters and *wait classes*, which are
tasks with the same set of awaited counters. A program has hundreds of these and tens of thousands of tasks. The
relation deliberately leaves out the order of an SM's queue.

An *opaque* counter tells that its signals were given, and nothing about work before them: a GPU that pushes to another
one hands over only the pushed data.

A question is a `Goal`, a set of counters, asked of one wait class after another. Chains (each counter continues the
chain of one predecessor) and earlier answers cut the walk short, and levels bound it. Otherwise the walk is exhaustive,
so the answer is exact at any size.

A racy program asks many questions that walk to the end. So after MAX_WALKS walks, all answers are computed at once: for
each wait class, the counters that are complete before it, as bits. Programs with too many counters for that are walked.

`QueueOrder` is the relation with serial queues: a step also comes after all steps before it in its queue. It is exact
for waits that are full joins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Final

from flywheel.ir.firing import ProofTask
from flywheel.ir.records import Wait

MAX_WALKS: Final = 128
"""Walks after which all answers are computed at once."""
MAX_BITS: Final = 1 << 30
"""Most wait classes times counters of which all answers are computed at once; on average, half of the bits are kept."""


class Goal:
    """Counters that must all be complete before a task starts."""

    __slots__ = ("floor", "known", "needs")

    def __init__(self, needs: dict[int, int], floor: int) -> None:
        self.needs = needs  # chain -> rank of the last counter wanted on it
        self.floor = floor  # lowest level of a wanted counter
        self.known: dict[int, bool] = {}  # wait class -> answer


class HappensBefore:
    """The relation over `tasks`. `order` lists all their positions topologically. Waits must be full joins. `opaque`
    are the opaque counters."""

    __slots__ = (
        "_bits", "_chain", "_class_counters", "_complete", "_counter_classes", "_goals", "_level", "_masks", "_rank",
        "_walks", "wait_class",
    )  # fmt: skip

    def __init__(self, tasks: Sequence[ProofTask], order: Sequence[int], opaque: Set[int] = frozenset()) -> None:
        self._class_counters: list[tuple[int, ...]] = []
        self._counter_classes: dict[int, list[int]] = {}
        self._level: dict[int, int] = {}
        self._chain: dict[int, int] = {}
        self._rank: dict[int, int] = {}
        self._goals: dict[tuple[int, ...], Goal] = {}
        self._walks = 0
        self._bits: dict[int, int] = {}  # counter -> its bit
        self._complete: list[int] = []  # wait class -> bits of the counters that are complete before it
        self._masks: dict[tuple[int, ...], int] = {}  # counters -> their bits
        identities = [id(task.waits) for task in tasks]
        signals = dict.fromkeys(zip(identities, [task.out_counter for task in tasks], strict=True))
        if not isinstance(order, range):
            signals = dict.fromkeys((identities[index], tasks[index].out_counter) for index in order)
        by_identity = self._classes(tasks, identities)
        self.wait_class: list[int] = list(map(by_identity.__getitem__, identities))
        taken: set[int] = set()
        for identity, counter in signals:
            if counter in opaque:
                self._counter_classes[counter], self._level[counter] = [], 1
                self._chain[counter], self._rank[counter] = counter, 0
            else:
                self._produce(counter, by_identity[identity], taken)

    def _classes(self, tasks: Sequence[ProofTask], identities: list[int]) -> dict[int, int]:
        """Number the distinct sets of awaited counters. The result maps the identity of waits to a wait class."""
        shared: dict[int, Sequence[Wait]] = dict(zip(identities, [task.waits for task in tasks], strict=True))
        by_counters: dict[tuple[int, ...], int] = {}
        by_identity = {}
        for identity, waits in shared.items():
            counters = (waits[0].counter,) if len(waits) == 1 else tuple(sorted({wait.counter for wait in waits}))
            group = by_identity[identity] = by_counters.setdefault(counters, len(by_counters))
            if group == len(self._class_counters):
                self._class_counters.append(counters)
        return by_identity

    def _produce(self, counter: int, group: int, taken: set[int]) -> None:
        """Note that tasks of wait class `group` signal `counter`."""
        awaited = self._class_counters[group]
        levels = self._level
        level = 1 + max([levels.get(before, 0) for before in awaited], default=0)
        groups = self._counter_classes.get(counter)
        if groups is not None:
            if group not in groups:
                groups.append(group)
                levels[counter] = max(levels[counter], level)
            return
        self._counter_classes[counter] = [group]
        levels[counter] = level
        self._chain[counter], self._rank[counter] = counter, 0
        for before in awaited:
            if before not in taken and before in self._chain:
                taken.add(before)
                self._chain[counter], self._rank[counter] = self._chain[before], self._rank[before] + 1
                return

    @property
    def depth(self) -> int:
        """The number of levels, which is the length of the longest chain of counters."""
        return max(self._level.values(), default=0)

    def reached(self, signals: tuple[int, ...], group: int) -> bool:
        """Whether every producer of the counters `signals` happens before every task of wait class `group`."""
        awaited = self._class_counters[group]
        for counter in signals:
            if counter not in awaited:
                break
        else:
            return True
        if self._complete:
            mask = self._masks.get(signals)
            if mask is None:
                mask = self._masks[signals] = sum([self._bits[counter] for counter in set(signals)])
            return self._complete[group] & mask == mask
        goal = self._goals.get(signals)
        if goal is None:
            goal = self._goals[signals] = self._goal(signals)
        answer = goal.known.get(group)
        if answer is None:
            answer = goal.known[group] = self._walk(goal, group)
            self._walks += 1
            if self._walks == MAX_WALKS and len(self._level) * len(self._class_counters) <= MAX_BITS:
                self._close()
        return answer

    def _close(self) -> None:
        """Compute the answers to all questions. A counter's level is above the levels of all counters before it."""
        ranked = sorted(self._level, key=self._level.__getitem__)
        self._bits = {counter: 1 << place for place, counter in enumerate(ranked)}
        complete: dict[int, int] = {}  # wait class -> bits
        through: dict[int, int] = {}  # counter -> its bit, and the bits before all of its producers

        def before(group: int) -> int:
            found = complete.get(group)
            if found is None:
                found = 0
                for counter in self._class_counters[group]:
                    found |= through.get(counter, 0)
                complete[group] = found
            return found

        for counter in ranked:
            found = self._bits[counter]
            for group in self._counter_classes[counter]:
                found |= before(group)
            through[counter] = found
        self._complete = [before(group) for group in range(len(self._class_counters))]

    def before(self, tasks: Sequence[ProofTask], first: int, second: int) -> bool:
        """Whether the task at position `first` happens before the one at `second`."""
        return self.reached((tasks[first].out_counter,), self.wait_class[second])

    def _goal(self, signals: tuple[int, ...]) -> Goal:
        needs: dict[int, int] = {}
        for counter in signals:
            chain, rank = self._chain[counter], self._rank[counter]
            if needs.get(chain, -1) < rank:
                needs[chain] = rank
        return Goal(needs, min([self._level[counter] for counter in signals]))

    def _walk(self, goal: Goal, group: int) -> bool:
        missing, floor, known = dict(goal.needs), goal.floor, goal.known
        single = len(missing) == 1
        stack, done = list(self._class_counters[group]), {group}
        seen = set(stack)
        while stack:
            current = stack.pop()
            rank = missing.get(self._chain[current])
            if rank is not None and self._rank[current] >= rank:
                del missing[self._chain[current]]
                if not missing:
                    return True
            if self._level[current] <= floor:
                continue
            for before in self._counter_classes[current]:
                if before in done:
                    continue
                done.add(before)
                answer = known.get(before)
                if answer:
                    return True
                if answer is None or not single:
                    fresh = [counter for counter in self._class_counters[before] if counter not in seen]
                    seen.update(fresh)
                    stack.extend(fresh)
        return False


class QueueOrder:
    """The relation over `steps`, asked in the order of the later step.

    `order` lists all positions, topologically by waits and queues, as `firing.fire(serial=True)` returns them. For each
    queue, and each counter that a step yet to come awaits, it holds the steps that are done, as bits.
    """

    __slots__ = ("_ahead", "_awaited", "_complete", "_heads", "_next", "_order", "_steps")

    def __init__(self, steps: Sequence[ProofTask], order: Sequence[int]) -> None:
        self._steps, self._order, self._next = steps, order, 0
        self._awaited = Counter([wait.counter for step in steps for wait in step.waits])
        self._heads: dict[tuple[int, int], int] = {}
        self._complete: dict[int, int] = {}
        self._ahead = 0

    def before(self, second: int) -> int:
        """The positions of the steps that are done before the one at `second` starts, as bits. `second` does not come
        before that of the last call in the order."""
        while not self._next or self._order[self._next - 1] != second:
            self._advance(self._order[self._next])
            self._next += 1
        return self._ahead

    def _advance(self, index: int) -> None:
        step, awaited = self._steps[index], self._awaited
        queue = None if step.sm is None else (step.rank, step.sm)
        ahead = 0 if queue is None else self._heads.get(queue, 0)
        for wait in step.waits:
            ahead |= self._complete.get(wait.counter, 0)
            awaited[wait.counter] -= 1
            if not awaited[wait.counter]:
                self._complete.pop(wait.counter, None)
        done = ahead | 1 << index
        if queue is not None:
            self._heads[queue] = done
        if awaited[step.out_counter]:
            self._complete[step.out_counter] = self._complete.get(step.out_counter, 0) | done
        self._ahead = ahead
