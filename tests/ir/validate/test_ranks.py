"""The proof over the joint graph of several GPUs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from interleavings import explore
from mutations import mutate_by_type
from two_ranks import FAULTS, changed, two_ranks, with_task

from flywheel.errors import IrFormatError
from flywheel.ir import (
    Buffer,
    BufferKind,
    DType,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    Page,
    PageAllocation,
    Task,
    Wait,
    program_from_dict,
    program_to_dict,
    validate,
)
from flywheel.ir.validate.findings import CODES


def test_two_ranks_that_push_and_add_are_accepted_and_safe() -> None:
    program = two_ranks()
    result = validate(program, strict=True)
    assert result.ok, result.report()
    assert result.warnings == ()
    assert result.stats["sms"] == 2
    assert explore(program).safe


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_under_its_code(name: str) -> None:
    code, plant = FAULTS[name]
    result = validate(plant(two_ranks()), strict=True)
    assert code in {finding.code for finding in result.errors}, result.report()


def test_what_only_a_peer_passed_on_is_not_visible() -> None:
    """Rank 0 makes something, then pushes; rank 1 answers. That answer says nothing of what rank 0 made."""
    made = Task(7, InstructionKind.GELU, (0,), (7,), 7, (), {}, 1)
    read = Task(8, InstructionKind.GELU, (7,), (8,), 8, (Wait(4, 1),), {}, 1)
    buffers = [Buffer(number, f"b{number}@0", BufferKind.ACTIVATION, DType.F32, (8,)) for number in (7, 8)]
    program = two_ranks()
    program = replace(program, buffers=(*program.buffers, *buffers))
    for number in (1, 2):
        program = changed(program, number, waits=(Wait(0, 1), Wait(7, 1)))
    program = with_task(with_task(program, made), read)
    assert {finding.code for finding in validate(program, strict=True).errors} == {"race-read"}
    assert explore(program).stale == {8}
    told = changed(program, 8, waits=(Wait(4, 1), Wait(7, 1)))
    assert validate(told, strict=True).ok
    assert explore(told).safe


def test_ranks_that_wait_for_each_other_are_a_cycle() -> None:
    program = changed(changed(two_ranks(), 0, waits=(Wait(4, 1),)), 10, waits=(Wait(14, 1),))
    codes = {finding.code for finding in validate(program, strict=True).errors}
    assert codes == {"cycle"}
    assert explore(program).hangs


def test_queues_of_two_ranks_that_block_each_other_are_found() -> None:
    program = two_ranks()
    order = [3, 0, 1, 2, 4, 5, 6, 13, 10, 11, 12, 14, 15, 16]
    tasks = {task.id: task for task in program.tasks}
    stuck = replace(program, tasks=tuple(tasks[number] for number in order))
    assert {finding.code for finding in validate(stuck, strict=True).errors} == {"queue-deadlock"}
    assert explore(stuck).hangs
    apart = replace(stuck, tasks=tuple(replace(t, sm=1) if t.id in (3, 13) else t for t in stuck.tasks))
    assert validate(apart, strict=True).ok
    assert explore(apart).safe


def test_a_page_that_a_peer_writes_again_is_free_when_the_peer_knows_it() -> None:
    program, page = two_ranks(3), Page(0, MemSpace.GLOBAL_SCRATCH, 32)

    def codes(*numbers: int) -> set[str]:
        paged = replace(program, pages=PageAllocation(dict.fromkeys(numbers, 0), (page,)))
        return {finding.code for finding in validate(paged, strict=True).errors}

    assert codes(1, 11) == {"bad-page"}
    assert codes(1, 2) == {"page-alias"}
    # The peer pushes its second shard when it has its own first sum: this rank may still be adding the first one.
    assert codes(2, 5) == {"page-alias"}
    # It pushes its third one when this rank's second one is there, which was made of the first sum.
    assert codes(2, 8) == set()


def mutant(program: MegakernelProgram, random: Random) -> MegakernelProgram:
    """One to three waits, counters, operands, columns or ranks changed."""
    for _ in range(random.randint(1, 3)):
        task, other = random.sample(list(program.tasks), 2)
        kind = random.randrange(6)
        if kind == 0 and task.waits:
            program = changed(program, task.id, waits=tuple(random.sample(list(task.waits), len(task.waits) - 1)))
        elif kind == 1:
            program = changed(program, task.id, waits=(*task.waits, *other.waits))
        elif kind == 2:
            program = changed(program, task.id, waits=other.waits)
        elif kind == 3:
            program = changed(program, task.id, outputs=other.outputs)
        elif kind == 4:
            program = changed(program, task.id, inputs=other.inputs)
        else:
            program = changed(program, task.id, sm=random.randrange(2))
        if random.random() < 0.3:
            tasks = list(program.tasks)
            random.shuffle(tasks)
            program = replace(program, tasks=tuple(tasks))
    counts: dict[int, int] = {}
    for task in program.tasks:
        counts[task.out_counter] = counts.get(task.out_counter, 0) + 1
    joins = [
        replace(t, waits=tuple({w.counter: Wait(w.counter, counts[w.counter]) for w in t.waits}.values()))
        for t in program.tasks
    ]
    return replace(program, tasks=tuple(joins))


def test_no_accepted_mutant_has_a_bad_interleaving() -> None:
    random, accepted, unsafe = Random(1), 0, 0
    for _ in range(400):
        program = mutant(two_ranks(), random)
        result = validate(program, strict=True)
        if result.ok:
            accepted += 1
            assert explore(program).safe, result.report()
        elif unsafe < 40 and {f.code for f in result.errors} & {"race-read", "cycle", "queue-deadlock", "push-unread"}:
            unsafe += not explore(program).safe
    assert accepted >= 30
    assert unsafe >= 20


def test_a_damaged_file_is_refused_in_one_line_and_never_raises() -> None:
    document, random, read = program_to_dict(two_ranks()), Random(2), 0
    for _ in range(400):
        try:
            program = program_from_dict(mutate_by_type(document, random, random.randint(1, 4)))
        except IrFormatError as error:
            assert "\n" not in str(error)
            continue
        read += 1
        result = validate(program, strict=True)
        assert all(finding.code in CODES and "\n" not in finding.message for finding in result.errors)
    assert read > 100
