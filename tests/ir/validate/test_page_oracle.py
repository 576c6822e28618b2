"""Page reuse against brute force over every pair of residents."""

from __future__ import annotations

import random
from itertools import combinations

from flywheel.ir import (
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    Page,
    PageAllocation,
    Task,
    Wait,
    dependency_edges,
    validate,
)


def draw(seed: int) -> MegakernelProgram:
    """A random chain of joins over activations that share three pages."""
    dice = random.Random(seed)
    buffers = [Buffer(0, "in", BufferKind.IO_INPUT, DType.F32, (4,))]
    tasks: list[Task] = []
    for index in range(dice.randint(2, 9)):
        source = dice.randint(max(0, index - 3), index)
        buffers.append(Buffer(index + 1, f"t{index + 1}", BufferKind.ACTIVATION, DType.F32, (4,)))
        awaited = {source - 1} if source else set()
        awaited |= {other for other in range(index) if dice.random() < 0.3}
        waits = tuple(Wait(counter, 1) for counter in sorted(awaited)[:8])
        if source and Wait(source - 1, 1) not in waits:
            waits = (Wait(source - 1, 1),)
        tasks.append(Task(index, InstructionKind.GELU, (source,), (index + 1,), index, waits))
    counters = [Counter(task.id) for task in tasks]
    if dice.random() < 0.5:
        dice.shuffle(tasks)
    homes = {buffer.id: dice.randrange(3) for buffer in buffers[1:] if dice.random() < 0.8}
    pages = PageAllocation(homes, [Page(number, MemSpace.GLOBAL_SCRATCH, 16) for number in range(3)])
    return MegakernelProgram(buffers=buffers, counters=counters, tasks=tasks, pages=pages)


def aliased_pages(program: MegakernelProgram) -> set[int]:
    """Pages with two residents of which neither is finished with before the other is first written."""
    edges = dependency_edges(program)
    after: dict[int, set[int]] = {task.id: set() for task in program.tasks}
    for _ in program.tasks:
        for first, second in edges:
            after[first] |= {second} | after[second]
    users = {b.id: {t.id for t in program.tasks if b.id in (*t.inputs, *t.outputs)} for b in program.buffers}
    writers = {b.id: {t.id for t in program.tasks if b.id in t.outputs} for b in program.buffers}

    def over(first: int, second: int) -> bool:
        return all(writer in after[user] for user in users[first] for writer in writers[second])

    assert program.pages is not None
    homes = program.pages.buffer_to_page
    return {
        homes[first]
        for first, second in combinations(homes, 2)
        if homes[first] == homes[second] and not over(first, second) and not over(second, first)
    }


def test_a_page_is_reported_exactly_when_two_of_its_residents_overlap_in_time() -> None:
    verdicts = {True: 0, False: 0}
    for seed in range(2000):
        program = draw(seed)
        aliased = aliased_pages(program)
        result = validate(program)
        assert result.ok, result.report()
        reported = {int(f.message.split(":")[0].removeprefix("page ")) for f in result.warnings}
        assert reported == aliased, (seed, result.report())
        assert validate(program, strict=True).ok == (not aliased)
        verdicts[bool(aliased)] += 1
    assert min(verdicts.values()) >= 100, verdicts
