"""Liveness against an exhaustive search of the states of serial SM queues."""

from __future__ import annotations

import random

import pytest

from flywheel.ir import Counter, InstructionKind, MegakernelProgram, Task, Wait, validate


def draw(seed: int) -> MegakernelProgram:
    """Tasks without operands on one to three SMs, in any list order, with full joins."""
    dice = random.Random(seed)
    count, sms = dice.randint(2, 7), dice.randint(1, 3)
    counters = [dice.randrange(count) for _ in range(count)]
    density = dice.choice((0.1, 0.2, 0.4))
    backwards = dice.choice((0.0, 0.0, 0.1))
    tasks = []
    for index in range(count):
        awaited = {
            counters[other]
            for other in range(count)
            if dice.random() < (density if max(_users(counters, counters[other])) < index else backwards)
        }
        waits = tuple(Wait(counter, counters.count(counter)) for counter in sorted(awaited))
        sm = None if dice.random() < 0.1 else dice.randrange(sms)
        tasks.append(Task(index, InstructionKind.NOP, (), (), counters[index], waits, {}, sm))
    if dice.random() < 0.8:
        dice.shuffle(tasks)
    return MegakernelProgram(counters=[Counter(c) for c in range(count)], tasks=tasks)


def _users(counters: list[int], counter: int) -> list[int]:
    return [index for index, number in enumerate(counters) if number == counter]


def some_state_is_stuck(program: MegakernelProgram) -> bool:
    """Search every reachable combination of queue heads for one that is not the end and allows no step."""
    queues: list[list[Task]] = [[task] for task in program.tasks if task.sm is None]
    for sm in sorted({task.sm for task in program.tasks if task.sm is not None}):
        queues.append([task for task in program.tasks if task.sm == sm])
    start = tuple(0 for _ in queues)
    todo, seen = [start], {start}
    while todo:
        heads = todo.pop()
        counts: dict[int, int] = {}
        for queue, head in zip(queues, heads, strict=True):
            for task in queue[:head]:
                counts[task.out_counter] = counts.get(task.out_counter, 0) + 1
        moved = False
        for lane, (queue, head) in enumerate(zip(queues, heads, strict=True)):
            if head < len(queue) and all(counts.get(w.counter, 0) >= w.threshold for w in queue[head].waits):
                moved = True
                state = (*heads[:lane], head + 1, *heads[lane + 1 :])
                if state not in seen:
                    seen.add(state)
                    todo.append(state)
        if not moved and any(head < len(queue) for queue, head in zip(queues, heads, strict=True)):
            return True
    return False


@pytest.mark.parametrize("block", range(6))
def test_a_program_is_accepted_exactly_when_no_state_of_its_queues_is_stuck(block: int) -> None:
    verdicts = {"ok": 0, "cycle": 0, "queue-deadlock": 0}
    for seed in range(400 * block, 400 * (block + 1)):
        program = draw(seed)
        result = validate(program)
        assert result.ok != some_state_is_stuck(program), (seed, result.report())
        verdicts[result.errors[0].code if result.errors else "ok"] += 1
    assert min(verdicts.values()) >= 20, verdicts
