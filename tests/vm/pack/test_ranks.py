"""Programs of several GPUs as the tables of each."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from two_ranks import changed, two_ranks, with_buffer

from flywheel.errors import InvalidProgramError
from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    DType,
    InstructionKind,
    MegakernelProgram,
    ScheduleConfig,
    Task,
    Wait,
    program_from_json,
    program_to_json,
    validate,
)
from flywheel.ir.compressed import as_runs
from flywheel.ir.operations import PRODUCTS
from flywheel.ir.recipe import recipe_from_dict
from flywheel.lowering.lower import lower
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan.best import KeptBest, find_best
from flywheel.plan.sending import TileReader, made_by
from flywheel.vm.abi import COUNTER_STRIDE, PEERS_SHIFT, InstructionFlag, Layout
from flywheel.vm.pack import PackedProgram, RankMemory, images_table, pack, pack_ranks, ranks_table

PROGRAM = replace(
    two_ranks(), target=replace(TARGETS["h200"], num_sms=2), config=ScheduleConfig(threads_per_block=128)
)
MEMORIES = (RankMemory(1 << 20, 1 << 10), RankMemory(2 << 20, 2 << 10))


def layouts(packed: Any) -> dict[int, Layout]:
    rows = zip(packed.program.buffers, packed.buffers["layout"], strict=True)
    return {buffer.id: Layout(int(layout)) for buffer, layout in rows if layout != Layout.ROWS}


def test_each_rank_has_its_tasks_and_stand_ins_for_what_it_pushes_into() -> None:
    first, second = pack_ranks(PROGRAM)
    assert [len(each.instructions) for each in (first, second)] == [7, 7]
    assert layouts(first) == {2: Layout.AWAITED, 5: Layout.AWAITED, 11: Layout.PEER, 14: Layout.PEER}
    assert layouts(second) == {11: Layout.AWAITED, 14: Layout.AWAITED, 2: Layout.PEER, 5: Layout.PEER}
    assert int((first.instructions["flags"] & InstructionFlag.PUSHES != 0).sum()) == 3


def test_no_rank_waits_for_a_counter_that_another_one_signals() -> None:
    for packed in pack_ranks(PROGRAM):
        own = {task.out_counter for task in packed.program.tasks if not task.label.startswith("push")}
        assert {wait.counter for task in packed.program.tasks for wait in task.waits} <= own


def test_second_sets_lie_as_far_behind_the_first_on_every_rank() -> None:
    first, second = pack_ranks(PROGRAM)
    assert first.arena.nbytes == second.arena.nbytes


def test_a_push_goes_to_where_the_peer_has_the_buffer() -> None:
    packed = pack_ranks(PROGRAM)
    found = images_table(packed, 0, MEMORIES)
    rows = {buffer.id: row for row, buffer in enumerate(packed[0].program.buffers)}
    there = {buffer.id: row for row, buffer in enumerate(packed[1].program.buffers)}
    wanted = {rows[own]: (2 << 20) + packed[1].arena.offsets[there[image]] for own, image in ((1, 11), (4, 14))}
    assert {row: int(found[row, 1]) for row in np.flatnonzero(found[:, 1])} == wanted
    assert not np.delete(found, 1, axis=1).any()


def peers(packed: PackedProgram, flag: InstructionFlag) -> dict[str, set[int]]:
    """The label of each task with a flag, and the ranks that the results of its kind go to, a bit each."""
    found: dict[str, set[int]] = {}
    for row in packed.instructions:
        if row["flags"] & flag:
            label = packed.program.tasks[row["task"]].label
            found.setdefault(re.sub(r"^L\d+\.", "", label), set()).add(int(row["flags"]) >> PEERS_SHIFT)
    return found


def test_a_rank_knows_the_words_of_all() -> None:
    table = ranks_table(pack_ranks(PROGRAM)[1], MEMORIES, 4 << 10)
    assert (int(table["rank"][0]), int(table["ranks"][0])) == (1, 2)
    assert table["words"][0].tolist() == [1 << 10, 2 << 10, 0, 0, 0, 0, 0, 0]
    assert (int(table["images"][0]), int(table["arrivals"][0]), int(table["choice"][0])) == (4 << 10, -1, -1)
    assert COUNTER_STRIDE % 4 == 0


def test_one_gpu_has_no_kernel_for_a_sum() -> None:
    with pytest.raises(InvalidProgramError, match="2 ranks"):
        pack(PROGRAM)


def test_an_exchange_of_what_is_no_float_is_refused() -> None:
    program = PROGRAM
    for number in (1, 11):
        program = with_buffer(program, number, dtype=DType.I32)
    with pytest.raises(InvalidProgramError, match=r"is I32, and the kernel exchanges floats"):
        pack_ranks(program)


def test_another_reader_of_what_arrived_is_refused() -> None:
    program = changed(PROGRAM, 3, op=InstructionKind.ADD)
    with pytest.raises(InvalidProgramError, match=r"task 3 .*ADD has no kernel that reads what others push"):
        pack_ranks(program)


def ordered_by_arrivals() -> MegakernelProgram:
    """On rank 0, task 8 reads what task 9 writes, and waits for it by the counter that pushes from rank 1 signal."""
    added = [Buffer(number, f"b{number}@0", BufferKind.ACTIVATION, DType.F32, (8,)) for number in (7, 8)]
    waits = (Wait(1, 3),)
    program = changed(PROGRAM, 3, waits=(Wait(0, 1), *waits))
    maker = Task(9, InstructionKind.GELU, (0,), (7,), 1, (), {}, 1, label="maker")
    reader = Task(8, InstructionKind.GELU, (7,), (8,), 2, waits, {}, 1, label="reader")
    program = changed(program, 4, waits=(Wait(2, 2),))
    return replace(program, buffers=(*program.buffers, *added), tasks=(*program.tasks, maker, reader))


@pytest.mark.parametrize("by_data", [False, True])
def test_an_order_that_only_a_counter_of_pushes_holds_is_refused(by_data: bool) -> None:
    config = ScheduleConfig({"hand_off": {"data": int(by_data)}}, threads_per_block=128)
    program = replace(ordered_by_arrivals(), config=config)
    assert validate(program, strict=True).ok
    with pytest.raises(InvalidProgramError) as raised:
        pack_ranks(program)
    assert str(raised.value) == (
        "task 9 (maker): signals counter 1, as pushes do; the kernel waits for no such counter"
    )


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("by_data", [0, 1])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_programs_that_lowering_makes_are_packed(family: str, by_data: int, ranks: int) -> None:
    more = {"tied_head": family == "llama", "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}
    spec = DecoderSpec("tiny", family, 64, 128, 2, 8, 4, 16, 200, 1e4, 1e-5, 64, **more)
    config = ScheduleConfig({"hand_off": {"data": by_data}}, page_allocation="none", threads_per_block=128)
    program = lower(shared_step(spec, 16, DType.BF16, 1, ranks=ranks), config, PROGRAM.target)
    assert [each.part.rank for each in pack_ranks(program) if each.part is not None] == list(range(ranks))


FUSED = (("attn_combine", "o_proj", "attn_add"), ("down_proj", "mlp_add"), ("final_norm", "lm_head"))


def shared(ranks: int, batch: int = 1, **how: Any) -> tuple[PackedProgram, ...]:
    return pack_ranks(lowered(ranks, batch, **how))


def lowered(
    ranks: int, batch: int = 1, grouping: Any = FUSED, by_data: int = 1, columns: int = 16, hidden: int = 64,
    intermediate: int = 128,
) -> MegakernelProgram:  # fmt: skip
    spec = DecoderSpec("tiny", "mistral", hidden, intermediate, 2, 8, 4, 16, 200, 1e4, 1e-5, 64)
    tiling = {"hand_off": {"data": by_data}, "gemv": {"N_tile": columns}}
    config = ScheduleConfig(tiling, grouping, page_allocation="none", threads_per_block=128)
    return lower(shared_step(spec, 16, DType.BF16, batch, ranks=ranks), config, PROGRAM.target)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_products_send_what_they_store_to_all_ranks_and_no_push_is_left(ranks: int, batch: int) -> None:
    for packed in shared(ranks, batch):
        assert packed.part is not None
        others = {(1 << ranks) - 1 - (1 << packed.part.rank)}
        sent = peers(packed, InstructionFlag.SENDS)
        assert peers(packed, InstructionFlag.PUSHES) == {}
        assert sent == dict.fromkeys(("o_proj", "down_proj", "lm_head"), others)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_what_no_product_stores_is_pushed_to_all_ranks_at_once(ranks: int) -> None:
    """Where the residual is no part of its product, on the GPU that adds it."""
    first, second, *_ = shared(ranks, grouping=())
    others = {(1 << ranks) - 2}
    assert peers(first, InstructionFlag.PUSHES) == {"attn_sum.push": others, "mlp_sum.push": others}
    assert peers(first, InstructionFlag.SENDS) == {"lm_head": others}
    assert peers(second, InstructionFlag.PUSHES) == {}


def adding(packed: PackedProgram) -> list[tuple[str, str]]:
    """The labels of each product that adds shards, and of the sum that it does so in place of."""
    places = np.flatnonzero(packed.instructions["flags"] & InstructionFlag.ADDS).tolist()
    tasks, numbers = packed.program.tasks, packed.instructions["task"].tolist()
    assert list(packed.sums) == places
    assert sorted([*numbers, *packed.sums.values()]) == list(range(len(tasks)))
    assert packed.queues[-1] == len(numbers) and (np.diff(packed.instructions["sm"]) >= 0).all()
    assert (packed.instructions["sm"][packed.queues[1:-1]] != packed.instructions["sm"][packed.queues[1:-1] - 1]).all()
    return [(tasks[numbers[place]].label, tasks[packed.sums[place]].label) for place in places]


@pytest.mark.parametrize(("ranks", "batch"), [(2, 1), (2, 3), (4, 1)])
def test_a_product_right_before_its_sum_adds_the_shards_of_all_ranks(ranks: int, batch: int) -> None:
    for packed in shared(ranks, batch, columns=32):
        pairs = adding(packed)
        assert set(pairs) == {
            (f"L{layer}.{one}", f"L{layer}.{other}")
            for layer in (0, 1)
            for one, other in (("o_proj", "attn_sum"), ("down_proj", "mlp_sum"))
        }
        assert len(pairs) == 8
        names = [buffer.name for buffer in packed.program.buffers]
        assert packed.part is not None
        for row in packed.instructions[(packed.instructions["flags"] & InstructionFlag.ADDS) != 0]:
            *shards, total = [names[each] for each in row["inputs"][: row["n_inputs"]]][-ranks - 1 :]
            assert [re.sub(r".*\.p(\d)@.*", r"\1", each) for each in shards] == [str(each) for each in range(ranks)]
            assert shards[packed.part.rank] == names[row["outputs"][0]]
            assert re.fullmatch(rf"L\d\.x_(mid|out)@{packed.part.rank}", total)


@pytest.mark.parametrize(
    ("ranks", "how"),
    [
        (8, {"columns": 32}),  # a product with nine operands more than it has
        (2, {"columns": 16}),  # two tiles on an SM: both are sent before the first sum
        (2, {"columns": 32, "by_data": 0}),  # sums that wait for counters
        (2, {"columns": 2048, "hidden": 4096}),  # more than one pass
        (2, {"columns": 32, "grouping": ()}),  # where the residual is no part of its product
    ],
)
def test_other_sums_keep_their_steps(ranks: int, how: dict[str, Any]) -> None:
    assert adding(shared(ranks, **how)[0]) == []


def test_a_product_whose_operand_comes_in_slices_adds_too() -> None:
    packed = shared(2, 4, columns=32, intermediate=10240)[0]
    steps = packed.steps[np.isin(packed.steps["op"], list(PRODUCTS))]
    sliced = steps["as"]["product"]["kblocks"] * 16 < steps["params"]["K"]
    assert sliced.any()
    assert len(adding(packed)) == 8


def remade(program: MegakernelProgram, change: Any) -> MegakernelProgram:
    """The program with other tasks, which the proof still accepts."""
    found = replace(program, tasks=tuple(change(list(program.tasks))))
    assert validate(found, strict=True).ok, validate(found, strict=True).errors[0]
    return found


def place_of(tasks: list[Task], label: str, rank: int, n_off: int) -> int:
    (place,) = [
        place
        for place, task in enumerate(tasks)
        if (task.label, task.rank, task.params.get("n_off")) == (label, rank, n_off)
    ]
    return place


def test_a_product_with_columns_of_its_own_leaves_its_sum_alone() -> None:
    def change(tasks: list[Task]) -> list[Task]:
        place = place_of(tasks, "L0.o_proj", 1, 32)
        task = tasks[place]
        step = {
            "op": "GEMV_TILE", "args": [{"in": 0}, {"in": 1}], "out": "final", "out_shape": [1, 32],
            "params": {"K": task.params["K"], "n_off": 0, "N_tile": 32}, "out_dtype": "F32",
        }  # fmt: skip
        params = {"n_off": 32, "N_tile": 32, "recipe": recipe_from_dict({"steps": [step]})}
        tasks[place] = replace(task, op=InstructionKind.FUSED, params=params)
        return tasks

    first, second = pack_ranks(remade(lowered(2, columns=32), change))
    assert (len(adding(first)), len(adding(second))) == (8, 7)


def test_a_sum_on_another_sm_than_its_product_is_a_task() -> None:
    """Behind a NOP, which has no steps, at the end of the SM before."""

    def change(tasks: list[Task]) -> list[Task]:
        moved = [replace(task, sm=int(task.label.endswith("_sum"))) for task in tasks]
        last = max(task.id for task in tasks) + 1
        return [*moved, Task(last, InstructionKind.NOP, (), (), tasks[-1].out_counter + 1, (), {}, 0, label="end")]

    program = lowered(2, columns=32)
    counters = (*program.counters, replace(program.counters[-1], id=program.tasks[-1].out_counter + 1))
    for packed in pack_ranks(remade(replace(program, counters=counters), change)):
        assert adding(packed) == []


def test_a_product_that_somebody_waits_for_signals_before_the_sum() -> None:
    """A task on the other SM, which writes the residual anew, and may not before the product has read it."""
    program = lowered(2, columns=32)
    tasks = list(program.tasks)
    operand, _, residual = tasks[place_of(tasks, "L0.o_proj", 0, 0)].inputs
    (made,) = [Wait(task.out_counter, 1) for task in tasks if residual in task.outputs]
    signals = Counter(task.out_counter for task in tasks)
    before = [task for task in tasks if residual in task.inputs or operand in task.outputs]
    read = {Wait(task.out_counter, signals[task.out_counter]): None for task in before}
    last, counter = max(task.id for task in tasks) + 1, max(each.id for each in program.counters) + 1
    later = Task(last, InstructionKind.GELU, (operand,), (residual,), counter, (made, *read), {}, 1, label="later")

    def change(tasks: list[Task]) -> list[Task]:
        readers = [residual in task.inputs and made not in task.waits for task in tasks]
        return [
            *[replace(task, waits=(*task.waits, made)) if reads else task
              for task, reads in zip(tasks, readers, strict=True)],
            later,
        ]  # fmt: skip

    counters = (*program.counters, replace(program.counters[-1], id=counter))
    first, second = pack_ranks(remade(replace(program, counters=counters), change))
    assert (len(adding(first)), len(adding(second))) == (6, 8)


def test_columns_that_tasks_write_twice_are_pushed_not_sent() -> None:
    """A product's tile that another one overwrites before it is pushed."""
    buffers = {
        0: Buffer(0, "x", BufferKind.IO_INPUT, DType.BF16, (32,)),
        1: Buffer(1, "w", BufferKind.WEIGHT, DType.BF16, (32, 32)),
        2: Buffer(2, "made", BufferKind.ACTIVATION, DType.BF16, (32,)),
    }
    tiles = [
        Task(k, InstructionKind.GEMV_TILE, (0, 1), (2,), k, (), {"K": 32, "N_tile": 16, "n_off": n_off}, 0)
        for k, n_off in enumerate((0, 16, 16))
    ]


    def made(tasks: list[Task], sources: set[int]) -> list[tuple[list[int], int]]:
        found, places = made_by(as_runs(MegakernelProgram(tasks=tasks)), buffers, sources, TileReader())
        return list(zip(found.T.tolist(), places.tolist(), strict=True))

    assert made(tiles[:2], {2}) == [([2, 0, 16, 1], 0), ([2, 16, 32, 1], 1)]
    assert made(tiles, {2}) == []
    assert made(tiles[:2], set()) == []


def test_only_the_tiles_that_no_product_stores_are_pushed() -> None:
    """One tile is no bare product, so its pushes are all that stays of their runs."""

    def change(tasks: list[Task]) -> list[Task]:
        place = place_of(tasks, "L0.o_proj", 1, 32)
        task = tasks[place]
        product = {
            "op": "GEMV_TILE", "args": [{"in": 0}, {"in": 1}], "out": 0, "out_shape": [1, 32],
            "params": {"K": task.params["K"]}, "out_dtype": "F32",
        }  # fmt: skip
        last = {"op": "GELU", "args": [{"s": 0}], "out": "final", "out_shape": [1, 32], "out_dtype": "F32"}
        params = {"n_off": 32, "N_tile": 32, "recipe": recipe_from_dict({"steps": [product, last]})}
        tasks[place] = replace(task, op=InstructionKind.FUSED, params=params)
        return tasks

    for rank, packed in enumerate(pack_ranks(remade(lowered(4, columns=32), change))):
        rows = packed.instructions[(packed.instructions["flags"] & InstructionFlag.PUSHES) != 0]
        assert peers(packed, InstructionFlag.PUSHES) == ({"attn_sum.push": {0b1101}} if rank == 1 else {})
        assert rows["params"]["n_off"].tolist() == [32] * (rank == 1)
        sending = packed.instructions[(packed.instructions["flags"] & InstructionFlag.SENDS) != 0]
        sent = {(packed.program.tasks[row["task"]].label, int(row["params"]["n_off"])) for row in sending}
        assert (("L0.o_proj", 0) in sent, ("L0.o_proj", 32) in sent) == (True, rank != 1)


def tables(packed: PackedProgram) -> tuple[Any, ...]:
    """All that the kernels read, and what names the tasks in messages."""
    part = packed.part
    assert part is not None
    arrays = (
        packed.buffers, packed.instructions, packed.queues, packed.steps, packed.segments, packed.segment_buffers,
        packed.streams, packed.floats, part.peers, part.pushes,
    )  # fmt: skip
    return (
        *[array.tobytes() for array in arrays], packed.arena, packed.sums, packed.arrivals, part.images, part.away,
        part.arrived, packed.program.buffers, packed.program.counters, tuple(packed.program.tasks),
    )  # fmt: skip


@pytest.mark.parametrize("grouping", [(), FUSED])
@pytest.mark.parametrize(("ranks", "columns", "by_data"), [(2, 32, 1), (2, 48, 0), (4, 16, 1), (8, 32, 1)])
def test_plain_tasks_give_the_same_tables_as_runs(ranks: int, columns: int, by_data: int, grouping: Any) -> None:
    program = lowered(ranks, 2, grouping, by_data, columns)
    wanted = list(map(tables, pack_ranks(program)))
    plain = replace(program, tasks=tuple(program.tasks))
    assert list(map(tables, pack_ranks(plain))) == wanted
    assert list(map(tables, pack_ranks(program_from_json(program_to_json(program))))) == wanted


def test_tasks_of_a_rank_keep_the_ids_of_the_program() -> None:
    program = lowered(2)
    for rank, packed in enumerate(pack_ranks(program)):
        for task in packed.program.tasks:
            whole = program.tasks[task.id]
            assert (whole.label, whole.rank, whole.params, whole.sm) == (task.label, rank, task.params, task.sm)


@pytest.mark.parametrize("number", [3, 12])
def test_a_task_without_an_sm_is_named(number: int) -> None:
    with pytest.raises(InvalidProgramError, match=rf"^task {number} \(.*\): sm=None is not in 0..1$"):
        pack_ranks(changed(PROGRAM, number, sm=None))


def flagged(packed: PackedProgram, flag: InstructionFlag) -> set[str]:
    """Labels of the tasks with a flag."""
    places = packed.instructions["task"][(packed.instructions["flags"] & flag) != 0]
    return {packed.program.tasks[place].label for place in places}


@pytest.mark.parametrize("by_data", [0, 1])
@pytest.mark.parametrize(("ranks", "batch"), [(2, 1), (4, 3)])
def test_each_rank_takes_the_best_of_all_and_waits_for_its_own_products(ranks: int, batch: int, by_data: int) -> None:
    for packed in shared(ranks, batch, by_data=by_data):
        assert packed.part is not None
        others = (1 << ranks) - 1 - (1 << packed.part.rank)
        taking = packed.instructions[(packed.instructions["flags"] & InstructionFlag.TAKES_BEST) != 0]
        assert flagged(packed, InstructionFlag.KEEPS_BEST) == {"lm_head"}
        assert (len(taking), set(taking["flags"] >> PEERS_SHIFT)) == (batch, {others})
        assert packed.program.buffers[packed.arrivals].name == f"logits@{packed.part.rank}"
        assert packed.choice in taking["task"]
        assert (taking["n_waits"] == 1).all()
        awaited = int((packed.buffers["layout"] == Layout.AWAITED).sum())
        assert (awaited > len(packed.part.arrived)) == bool(by_data)


def test_where_one_rank_cannot_tell_its_best_all_read_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def but_of_rank_1(buffers: Sequence[Buffer], *rest: Any) -> KeptBest | None:
        return None if buffers[0].name.endswith("@1") else find_best(buffers, *rest)

    monkeypatch.setattr("flywheel.plan.routines.find_best", but_of_rank_1)
    for packed in shared(2):
        assert flagged(packed, InstructionFlag.KEEPS_BEST | InstructionFlag.TAKES_BEST) == set()
        assert (packed.arrivals, packed.choice) == (-1, -1)
