"""Which activations are handed over by the data, which waits that leaves, and that results stay the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_pages import PAGES, in_pages

from flywheel.ir import (
    TARGETS,
    BufferKind,
    DType,
    InstructionKind,
    MegakernelProgram,
    MemSpace,
    Page,
    PageAllocation,
    ScheduleConfig,
    Wait,
    validate,
)
from flywheel.ir.recipe import recipe_from_dict
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan.handoff import HandOffs, by_counters, by_data
from flywheel.plan.nodes import group_tasks
from flywheel.plan.step import ABSENT
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.abi import Layout
from flywheel.vm.pack import PackedProgram, pack

Chain = Callable[..., MegakernelProgram]
IN, WEIGHT, ACT, OUT, KV = (
    BufferKind.IO_INPUT, BufferKind.WEIGHT, BufferKind.ACTIVATION, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE,
)  # fmt: skip
F32, I32 = DType.F32, DType.I32
ROW = (1, 32)
VECTORS = {"x": (IN, F32, ROW), "a": (ACT, F32, ROW), "b": (ACT, F32, ROW), "y": (OUT, F32, ROW)}
CHAIN = [("GELU", ["x"], ["a"], {}), ("GELU", ["a"], ["b"], {}), ("GELU", ["b"], ["y"], {})]


def waiting(program: MegakernelProgram, waits: Mapping[int, Sequence[tuple[int, int]]]) -> MegakernelProgram:
    """The program with these (counter, threshold) for some of its tasks."""
    tasks = [
        replace(task, waits=tuple(Wait(*each) for each in waits[task.id])) if task.id in waits else task
        for task in program.tasks
    ]
    return replace(program, tasks=tuple(tasks))


def found(program: MegakernelProgram) -> HandOffs:
    result = validate(program, strict=True)
    assert result.ok, result.report()
    return by_data(program, group_tasks(program))


def awaited(program: MegakernelProgram) -> set[str]:
    return {program.buffers[row].name for row in found(program).awaited}


def kept(program: MegakernelProgram) -> dict[int, set[tuple[int, int]]]:
    """(counter, threshold) of the waits that are left, by task that has any."""
    waits = enumerate(found(program).waits)
    return {task: {(wait.counter, wait.threshold) for wait in each} for task, each in waits if each}


def is_by_counters(program: MegakernelProgram) -> bool:
    return found(program) == by_counters(program, group_tasks(program))


def test_a_chain_of_activations_needs_no_counter(chain: Chain) -> None:
    program = chain(VECTORS, CHAIN)
    assert awaited(program) == {"a", "b"}
    assert found(program).counters == frozenset() and kept(program) == {}


def test_buffers_that_share_memory_are_handed_over_by_counters(chain: Chain) -> None:
    program = chain(VECTORS, CHAIN)
    own = PageAllocation({1: 0, 2: 1}, (Page(0, MemSpace.HBM, 128), Page(1, MemSpace.HBM, 128)))
    assert awaited(replace(program, pages=own)) == {"a", "b"}
    # c takes a's page: whoever reads a must come before c is written.
    buffers = VECTORS | {"c": (ACT, F32, ROW)}
    tasks = [*CHAIN[:2], ("GELU", ["b"], ["c"], {}), ("GELU", ["c"], ["y"], {})]
    pages = PageAllocation({1: 0, 2: 1, 4: 0}, own.pages)
    assert is_by_counters(replace(chain(buffers, tasks), pages=pages))


COPY_STEP = {
    "op": "COPY", "args": [{"in": 0}], "out": {"out": 1}, "params": {}, "out_shape": [1, 32], "out_dtype": "F32",
}  # fmt: skip
GELU_STEP = {**COPY_STEP, "op": "GELU", "out": "final"}


def test_raw_copies_are_not_awaited(chain: Chain) -> None:
    copied = chain(VECTORS, [("COPY", ["x"], ["a"], {}), *CHAIN[1:]])
    assert awaited(copied) == {"b"}
    assert kept(copied) == {1: {(0, 1)}}


def test_outputs_of_a_recipe_are_looked_at_apart(chain: Chain) -> None:
    steps = {"steps": [COPY_STEP, GELU_STEP]}
    tasks = [("FUSED", ["x"], ["a", "b"], {"recipe": steps}), ("ADD", ["a", "b"], ["y"], {})]
    program = chain(VECTORS, tasks)
    assert awaited(program) == {"a"}  # which the GELU writes; b is the copy
    assert kept(program) == {1: {(0, 1)}}


def test_what_is_written_twice_is_not_awaited(chain: Chain) -> None:
    tasks = [("GELU", ["x"], ["a"], {}), ("GELU", ["x"], ["a"], {}), ("GELU", ["a"], ["b"], {}), CHAIN[2]]
    told = waiting(chain(VECTORS, tasks), {2: [(0, 1), (1, 1)]})
    assert awaited(told) == {"b"}
    assert kept(told) == {1: {(0, 1)}, 2: {(0, 1), (1, 1)}}
    # Who writes it first and who reads it are in order by the other writer alone.
    assert is_by_counters(chain(VECTORS, tasks))


def test_what_its_writer_reads_is_not_awaited(chain: Chain) -> None:
    tasks = [("GELU", ["x"], ["a"], {}), ("ADD", ["a", "x"], ["a"], {}), ("GELU", ["a"], ["y"], {})]
    program = waiting(chain(VECTORS, tasks), {2: [(0, 1), (1, 1)]})
    assert awaited(program) == set()
    assert is_by_counters(program)


def tiles(chain: Chain, ends: Sequence[int], rows: int = 1) -> MegakernelProgram:
    """Tiles of `a` [rows, 64] that end there and meet, on a counter of their own, and who reads them."""
    buffers = {
        "x": (IN, F32, (rows, 16)), "w": (WEIGHT, F32, (64, 16)), "a": (ACT, F32, (rows, 64)),
        "y": (OUT, F32, (rows, 64)),
    }  # fmt: skip
    op, more = ("GEMM_TILE", {"M_tile": rows}) if rows > 1 else ("GEMV_TILE", {})
    tasks: list[Any] = [
        (op, ["x", "w"], ["a"], {"K": 16, "n_off": start, "N_tile": end - start} | more)
        for start, end in zip((0, *ends), ends, strict=False)
    ]
    program = chain(buffers, [*tasks, ("GELU", ["a"], ["y"], {})])
    made = [replace(task, out_counter=0, waits=()) for task in program.tasks[:-1]]
    last = replace(program.tasks[-1], waits=(Wait(0, len(made)),))
    return replace(program, tasks=(*made, last))


@pytest.mark.parametrize("rows", [1, 3])
def test_tiles_that_fill_a_buffer_are_awaited(chain: Chain, rows: int) -> None:
    assert awaited(tiles(chain, (16, 48, 64), rows)) == {"a"}
    assert found(tiles(chain, (16, 48, 64), rows)).counters == frozenset()


def test_what_is_not_wholly_written_is_not_awaited(chain: Chain) -> None:
    program = tiles(chain, (16, 48))
    buffers = [replace(buffer, shape=(1, 48)) if buffer.name == "y" else buffer for buffer in program.buffers]
    reader = replace(program.tasks[-1], op=InstructionKind.COPY, params={"n_off": 0, "N_tile": 48})
    partial = replace(program, buffers=tuple(buffers), tasks=(*program.tasks[:-1], reader))
    assert awaited(partial) == set()
    assert kept(partial) == {2: {(0, 2)}}


def test_integers_and_outputs_are_not_awaited(chain: Chain) -> None:
    buffers = {"x": (IN, F32, ROW), "a": (ACT, F32, ROW), "i": (ACT, I32, (1,)), "table": (WEIGHT, F32, (32, 32)),
               "e": (ACT, F32, ROW), "y": (OUT, F32, ROW), "z": (OUT, F32, ROW)}  # fmt: skip
    tasks = [("GELU", ["x"], ["a"], {}), ("SAMPLE_ARGMAX", ["a"], ["i"], {}),
             ("EMBED", ["i", "table"], ["e"], {"hidden": 32}), ("GELU", ["e"], ["y"], {}),
             ("GELU", ["y"], ["z"], {})]  # fmt: skip
    program = chain(buffers, tasks)
    assert awaited(program) == {"a", "e"}
    assert kept(program) == {2: {(1, 1)}, 4: {(3, 1)}}
    assert found(program).counters == {1, 3}


def attending(chain: Chain, **params: int) -> MegakernelProgram:
    """A row is appended to both caches, and attention reads some of their rows."""
    buffers = {
        "x": (IN, F32, ROW), "q": (ACT, F32, ROW), "k": (ACT, F32, ROW), "v": (ACT, F32, ROW),
        "keys": (KV, F32, (8, 32)), "values": (KV, F32, (8, 32)), "y": (OUT, F32, (1, 34)),
    }  # fmt: skip
    heads = {"head_dim": 32, "n_heads": 1, "n_kv_heads": 1, "scale": 1.0, "kv_start": 0, "kv_len": 5}
    tasks = [
        ("GELU", ["x"], ["q"], {}), ("GELU", ["x"], ["k"], {}), ("GELU", ["x"], ["v"], {}),
        ("KV_APPEND", ["k", "keys"], ["keys"], {"pos": 5}), ("KV_APPEND", ["v", "values"], ["values"], {"pos": 5}),
        ("ATTENTION_TILE", ["q", "keys", "values"], ["y"], heads | params),
    ]  # fmt: skip
    waits = {1: [], 2: [], 3: [(1, 1)], 4: [(2, 1)], 5: [(0, 1), (3, 1), (4, 1)]}
    return waiting(chain(buffers, tasks), waits)


def test_who_reads_the_row_that_another_task_appends_waits_for_it(chain: Chain) -> None:
    program = attending(chain, kv_len=6)
    assert awaited(program) == {"q", "k", "v"}
    assert kept(program) == {5: {(3, 1), (4, 1)}}


def test_who_reads_rows_before_the_appended_one_does_not(chain: Chain) -> None:
    program = attending(chain, kv_rows=1, pos=5)
    assert awaited(program) == {"q", "k", "v"}
    assert kept(program) == {}


@pytest.mark.parametrize(("end", "left"), [(5, {}), (6, {5: {(3, 1), (4, 1)}})])
def test_every_window_of_a_node_counts_for_what_its_tasks_wait_for(
    chain: Chain, end: int, left: dict[int, set[tuple[int, int]]]
) -> None:
    """Two tasks that share operands and waits attend to one window each; a row is appended at 5."""
    whole = attending(chain, kv_rows=1, pos=5)
    attention, output = whole.tasks[5], whole.buffers[-1]
    steps = [{"op": "ATTENTION_TILE", "args": [{"in": 0}, {"in": 1}, {"in": 2}], "out": "final",
              "params": {"head_dim": 32, "n_heads": 1, "n_kv_heads": 1, "scale": 1.0}, "out_shape": [1, 34],
              "out_dtype": "F32"}]  # fmt: skip
    shared = {"recipe": recipe_from_dict({"steps": steps}), "N_tile": 34, "pos": end, "kv_rows": 1}
    tiles = [
        replace(attention, op=InstructionKind.FUSED, params={**shared, "n_off": 0, "kv_start": 0, "kv_len": 3}),
        replace(attention, op=InstructionKind.FUSED, params={**shared, "n_off": 34, "kv_start": 3, "kv_len": end - 3}),
    ]
    tiles[1] = replace(tiles[1], id=6)
    program = replace(
        whole, tasks=(*whole.tasks[:5], *tiles), buffers=(*whole.buffers[:-1], replace(output, shape=(1, 68)))
    )
    assert len(group_tasks(program).firsts) == 6
    assert kept(program) == left


def test_order_that_only_other_tasks_hold_leaves_all_to_counters(chain: Chain) -> None:
    buffers = VECTORS | {"z": (OUT, F32, ROW)}
    tasks = [("GELU", ["x"], ["y"], {}), ("GELU", ["y"], ["a"], {}), ("ADD", ["a", "y"], ["z"], {})]
    program = chain(buffers, tasks)
    assert is_by_counters(program)  # nothing says that y comes before z but the wait for a
    told = waiting(program, {2: [(0, 1), (1, 1)]})
    assert awaited(told) == {"a"}
    assert kept(told) == {1: {(0, 1)}, 2: {(0, 1)}}


def test_a_wait_for_some_of_the_signals_vouches_for_none_of_those_who_give_them(chain: Chain) -> None:
    buffers = VECTORS | {"z": (OUT, F32, ROW), "u": (OUT, F32, ROW)}
    tasks = [("GELU", *each, {}) for each in ((["x"], ["y"]), (["x"], ["a"]), (["y"], ["z"]), (["a"], ["u"]))]
    program = waiting(chain(buffers, tasks), {1: [(0, 1)], 2: [(0, 1)], 3: [(1, 1)]})
    assert awaited(program) == {"a"} and kept(program) == {2: {(0, 1)}}
    # The task that writes a signals that counter too, behind the one that writes y: its first signal means y.
    shared = [replace(task, out_counter=0) if task.id == 1 else task for task in program.tasks]
    both = waiting(replace(program, tasks=tuple(shared)), {3: [(0, 2)]})
    assert not validate(both, strict=True).ok
    assert by_data(both, group_tasks(both)) == by_counters(both, group_tasks(both))


def test_a_task_is_told_of_counters_that_somebody_asks_alone(chain: Chain) -> None:
    program = replace(attending(chain, kv_len=6), config=ScheduleConfig(tiling={"hand_off": {"data": 1}}))
    packed = pack(program)
    assert packed.instructions["out_counter"].tolist() == [ABSENT, ABSENT, ABSENT, 3, 4, ABSENT]
    assert packed.instructions["n_waits"].tolist() == [0, 0, 0, 0, 0, 2]
    layouts = {buffer.name: layout for buffer, layout in zip(program.buffers, packed.buffers["layout"], strict=True)}
    assert [name for name, layout in layouts.items() if layout == Layout.AWAITED] == ["q", "k", "v"]
    # They come first, so that one range holds a set of them.
    assert packed.arena.awaited_bytes == 3 * 256
    assert sorted(packed.arena.offsets.values())[:3] == [packed.arena.offsets[row] for row in (1, 2, 3)]


FEW = replace(TARGETS["h100"], name="few", num_sms=3, note="")
SPECS = {
    "llama": DecoderSpec("llama", "llama", 72, 104, 2, 4, 2, 16, 50, 1e4, 1e-5, 64),
    "qwen": DecoderSpec("qwen", "qwen3", 64, 96, 1, 4, 2, 16, 80, 1e4, 1e-6, 64, qkv_bias=True, qk_norm=True),
}
BESIDE = ("k_norm", "k_rope", "k_append", "v_append", "q_norm", "q_rope", "attention")
NORMED = (("attn_norm", "q_proj", "k_proj", "v_proj"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"))
JOINED = (("attn_combine", "o_proj", "attn_add"), ("down_proj", "mlp_add"), ("final_norm", "lm_head"))
GROUPINGS = {
    "plain": (),
    "apart": (*NORMED, ("k_norm", "k_rope", "k_append", "v_append"), ("q_norm", "q_rope", "attention"), *JOINED),
    "beside": (BESIDE, ("o_proj", "attn_add")),
    "everything": (*NORMED, BESIDE, *JOINED),
}


def decoder(model: str, groups: str, kv_block: int, batch: int, pages: str, by: int, dtype: DType) -> MegakernelProgram:
    graph = decode_step(SPECS[model], 48, dtype, batch)
    names = {op.name for op in (*graph.kinds[0].ops, *graph.epilogue.ops)} | {"attn_combine"}
    grouping = [tuple(name for name in group if name in names) for group in GROUPINGS[groups]]
    tiling = {"gemv": {"N_tile": 32}, "attention": {"kv_block": kv_block}, "hand_off": {"data": by}}
    return in_pages(lower(graph, ScheduleConfig(tiling, tuple(grouping)), FEW), pages)


def all_awaited_are_written(table_vm: ModuleType, vm: Any, packed: PackedProgram) -> bool:
    rows = [row for row, layout in enumerate(packed.buffers["layout"]) if layout == Layout.AWAITED]
    kinds = [TORCH_DTYPES[packed.program.buffers[row].dtype] for row in rows]
    return all(
        table_vm.is_written(torch.from_numpy(vm.memory[row]).view(kind)) for row, kind in zip(rows, kinds, strict=True)
    )


@pytest.mark.parametrize("groups", GROUPINGS)
@settings(max_examples=examples(50, 8))
@given(
    model=st.sampled_from(sorted(SPECS)), kv_block=st.sampled_from((16, 48)), batch=st.sampled_from((1, 2)),
    pages=st.sampled_from(PAGES), pos=st.sampled_from((None, 0, 17, 47)),
    dtype=st.sampled_from((DType.F32, DType.BF16)),
)  # fmt: skip
def test_a_decoder_by_data_makes_the_bytes_that_it_makes_by_counters(
    table_vm: ModuleType, values: Callable[..., Any], groups: str, model: str, kv_block: int, batch: int, pages: str,
    pos: int | None, dtype: DType,
) -> None:  # fmt: skip
    results = []
    for by in (0, 1):
        program = decoder(model, groups, kv_block, batch, pages, by, dtype)
        packed = pack(program)
        vm = table_vm.TableVM(packed, program, values(program, 0 if pos is None else pos))
        results.append(vm.run(-1 if pos is None else pos))
        assert all_awaited_are_written(table_vm, vm, packed)
        assert bool(packed.arena.awaited_bytes) == (by == 1 and pages != "shared")
    counted, looked = ({name: table_vm.bits_of(each).tobytes() for name, each in made.items()} for made in results)
    assert counted == looked


@pytest.mark.parametrize(("groups", "counters"), [("everything", 1), ("beside", 1), ("apart", 5), ("plain", 9)])
def test_only_caches_and_the_token_keep_a_counter(groups: str, counters: int) -> None:
    program = decoder("llama", groups, 16, 1, "none", 1, DType.BF16)
    hand_offs = by_data(program, group_tasks(program))
    kinds = {program.buffers[row].kind for row in hand_offs.awaited}
    assert kinds == {ACT}
    assert {row for row, buffer in enumerate(program.buffers) if buffer.kind is ACT} == set(hand_offs.awaited)
    senders = {task.op for task in program.tasks if task.out_counter in hand_offs.counters}
    assert senders <= {InstructionKind.KV_APPEND, InstructionKind.FUSED, InstructionKind.GEMV_TILE}
    assert len(hand_offs.counters) == counters
