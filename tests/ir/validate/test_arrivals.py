"""What is pushed is read, by tasks that read it wherever the program stands, and added in one way on all GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from two_ranks import changed, copy_recipe, two_ranks
from work import lines_run

from flywheel.ir import (
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    Task,
    Wait,
    validate,
)
from flywheel.ir.recipe import recipe_from_dict

_K, _B = InstructionKind, BufferKind
HALF = 4


def shared(ranks: int, op: InstructionKind, size: int, **params: Any) -> MegakernelProgram:
    """Each rank makes four columns of what all have, pushes them to the others, and runs `op` when all are there."""
    buffers, tasks, counters = list[Buffer](), list[Task](), list[Counter]()
    for rank in range(ranks):
        own = 10 * rank
        shapes = {0: (ranks, HALF), 1: (ranks, HALF), 2: (size,), 3: (1, HALF)}
        kinds = {0: _B.IO_INPUT, 1: _B.ACTIVATION, 2: _B.ACTIVATION, 3: _B.IO_INPUT}
        buffers += [Buffer(own + k, f"b{k}@{rank}", kinds[k], DType.F32, shapes[k], rank=rank) for k in shapes]
        counters += [Counter(own + k) for k in range(3)]
        columns = {"n_off": rank * HALF, "N_tile": HALF, "recipe": copy_recipe(N_tile=HALF)}
        tasks.append(Task(own, _K.FUSED, (own,), (own + 1,), own, (), columns, 0, rank=rank))
        for place, other in enumerate(each for each in range(ranks) if each != rank):
            image, arrived = 10 * other + 1, 10 * other + 1
            made = (Wait(own, 1),)
            tasks.append(Task(own + 1 + place, _K.FUSED, (own + 1,), (image,), arrived, made, columns, 0, rank=rank))
    for rank in range(ranks):
        own = 10 * rank
        waits = (Wait(own, 1), Wait(own + 1, ranks - 1))
        inputs = (own + 3, own + 1) if op is _K.GEMV_TILE else (own + 1,)
        tasks.append(Task(own + 9, op, inputs, (own + 2,), own + 2, waits, params, 0, rank=rank))
    return MegakernelProgram(buffers=tuple(buffers), counters=tuple(counters), tasks=tuple(tasks), ranks=ranks)


def codes(program: MegakernelProgram) -> set[str]:
    return {finding.code for finding in validate(program, strict=True).errors}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_share_that_all_read_whole_is_accepted(ranks: int) -> None:
    assert codes(shared(ranks, _K.GELU, ranks * HALF)) == set()
    assert codes(shared(ranks, _K.COPY, ranks * HALF, n_off=0, N_tile=ranks * HALF)) == set()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_copy_of_some_columns_does_not_read_what_is_pushed_to_others(ranks: int) -> None:
    assert codes(shared(ranks, _K.COPY, HALF, n_off=0, N_tile=HALF)) == {"push-unread"}
    rows = shared(ranks, _K.COPY, 2 * ranks, n_off=0, N_tile=2, M_tile=ranks)
    assert codes(rows) == {"push-unread"}
    assert codes(shared(ranks, _K.COPY, ranks * HALF, n_off=0, N_tile=HALF, M_tile=ranks)) == set()


def test_a_matrix_tile_reads_its_rows_of_a_pushed_matrix_alone() -> None:
    program = shared(2, _K.GEMV_TILE, 2, K=HALF, N_tile=1, n_off=0)
    assert codes(program) == {"push-unread"}


def _sum(columns: int, dtype: str) -> dict[str, Any]:
    """A recipe that adds two shards, of the second one the columns from `columns` on, after rounding to `dtype`."""
    steps: list[dict[str, Any]] = [
        {
            "op": "COPY", "args": [{"in": k}], "out": k, "params": {"n_off": k * columns} if k * columns else {},
            "out_shape": [HALF], "out_dtype": dtype,
        }
        for k in range(2)
    ]  # fmt: skip
    args = [{"s": 0}, {"s": 1}]
    add = {"op": "ALLREDUCE_SHARD", "args": args, "out": "final", "params": {}, "out_shape": [HALF]}
    return recipe_from_dict({"steps": [*steps, {**add, "out_dtype": "F32"}]})


def summed(*recipes: dict[str, Any]) -> MegakernelProgram:
    """The first sum of either rank in two tiles, by a recipe of its own."""
    program = two_ranks()
    for number, recipe in zip((3, 13), recipes, strict=True):
        first, second = ({"n_off": start, "N_tile": HALF, "recipe": recipe} for start in (0, HALF))
        program = changed(program, number, op=_K.FUSED, params=first)
        program = changed(program, number + 1, waits=(Wait(number - 1, 2),))
        task = next(task for task in program.tasks if task.id == number)
        place = program.tasks.index(task) + 1
        tile = replace(task, id=number + 40, params=second)
        program = replace(program, tasks=(*program.tasks[:place], tile, *program.tasks[place:]))
    return program


def test_sums_that_all_ranks_round_alike_are_accepted() -> None:
    assert codes(summed(_sum(0, "F32"), _sum(0, "F32"))) == set()


def test_sums_that_one_rank_rounds_otherwise_are_refused() -> None:
    assert codes(summed(_sum(0, "F32"), _sum(0, "BF16"))) == {"collective"}


def test_a_sum_of_other_columns_of_a_shard_is_refused() -> None:
    assert codes(summed(_sum(HALF, "F32"), _sum(HALF, "F32"))) & {"collective", "push-unread"}


def test_the_proof_of_many_exchanges_does_work_that_grows_with_them() -> None:
    def work(times: int) -> int:
        program = side_by_side(two_ranks(3), times)
        return lines_run(lambda: validate(program, strict=True))

    assert codes(side_by_side(two_ranks(3), 400)) == set()
    assert work(400) < 4.5 * work(100)


def side_by_side(program: MegakernelProgram, times: int) -> MegakernelProgram:
    """So many of the program in one, with ids of their own."""
    far = 100
    buffers = [replace(b, id=b.id + far * k) for k in range(times) for b in program.buffers]
    counters = [Counter(c.id + far * k) for k in range(times) for c in program.counters]
    tasks = [
        replace(
            t, id=t.id + far * k, inputs=tuple(n + far * k for n in t.inputs), out_counter=t.out_counter + far * k,
            outputs=tuple(n + far * k for n in t.outputs),
            waits=tuple(Wait(w.counter + far * k, w.threshold) for w in t.waits),
        )
        for k in range(times) for t in program.tasks
    ]  # fmt: skip
    return MegakernelProgram(buffers=tuple(buffers), counters=tuple(counters), tasks=tuple(tasks), ranks=2)
