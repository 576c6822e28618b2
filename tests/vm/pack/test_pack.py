from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shared_pages import PAGES, in_pages

from flywheel.errors import ConfigError, FlywheelError, InvalidProgramError
from flywheel.ir import (
    TARGETS,
    BufferKind,
    DType,
    MegakernelProgram,
    ScheduleConfig,
    at_position,
    program_from_json,
    program_to_json,
)
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan.program import refusal_of
from flywheel.vm.abi import InstructionFlag
from flywheel.vm.pack import PackedProgram, pack
from flywheel.vm.reference.memory import Arena

FEW = replace(TARGETS["h100"], name="few", num_sms=3, note="")
SPEC = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 50, 1e4, 1e-5, 64)
ATTEND = ("k_rope", "k_append", "v_append", "q_rope", "attention")
CONFIGS = {
    "plain": ScheduleConfig(tiling={"attention": {"kv_block": 16}}, page_allocation="none"),
    "fused": ScheduleConfig(
        tiling={"gemv": {"N_tile": 32}, "attention": {"kv_block": 48}},
        fusion_grouping=(("attn_norm", "q_proj", "k_proj", "v_proj"), ATTEND, ("o_proj", "attn_add")),
    ),
    "beside": ScheduleConfig(
        tiling={"attention": {"kv_block": 16}}, fusion_grouping=(ATTEND, ("attn_combine", "o_proj"))
    ),
}
CONFIGS |= {f"{name}, window": config for name, config in CONFIGS.items()}
IN, WEIGHT, ACT, OUT, KV = (
    BufferKind.IO_INPUT, BufferKind.WEIGHT, BufferKind.ACTIVATION, BufferKind.IO_OUTPUT, BufferKind.KV_CACHE,
)  # fmt: skip
F32, F16, BF16, I32, I4 = DType.F32, DType.F16, DType.BF16, DType.I32, DType.I4
Chain = Callable[..., MegakernelProgram]


def decoder(name: str, dtype: DType = BF16) -> MegakernelProgram:
    spec = replace(SPEC, window=21, windowed=(True, False)) if name.endswith("window") else SPEC
    return lower(decode_step(spec, 48, dtype), CONFIGS[name], FEW)


def octets(packed: PackedProgram) -> dict[str, Any]:
    """Every table, arrays as bytes."""
    values = {field.name: getattr(packed, field.name) for field in fields(packed) if field.name != "program"}
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in values.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_program_gives_the_same_bytes(name: str) -> None:
    program = decoder(name)
    assert octets(pack(program)) == octets(pack(decoder(name)))
    assert octets(pack(program)) == octets(pack(program_from_json(program_to_json(program))))


@pytest.mark.parametrize("name", CONFIGS)
@given(pos=st.integers(0, 47))
def test_moved_params_are_those_of_the_moved_program(name: str, pos: int) -> None:
    program = decoder(name)
    packed, moved = pack(program), pack(at_position(program, pos))
    packed.check_position(pos)
    params, flags = packed.instructions["params"].copy(), packed.instructions["flags"]
    moves = flags & int(InstructionFlag.MOVES_POS) != 0
    cut = flags & int(InstructionFlag.MOVES_WINDOW) != 0
    params["pos"][moves] = pos
    params["kv_start"][flags & int(InstructionFlag.WINDOW_NEW) != 0] = pos
    seen = np.where(params["group"] > 0, np.minimum(params["group"], pos + 1), pos + 1)
    end = seen - (flags & int(InstructionFlag.WINDOW_PAST) != 0)
    end[flags & int(InstructionFlag.WINDOW_NEW) != 0] = pos + 1
    params["kv_len"][cut] = np.minimum(params["kv_len"], np.maximum(0, end - params["kv_start"]))[cut]
    assert np.array_equal(params, moved.instructions["params"])
    assert moves.any() and cut.any()
    assert np.array_equal(packed.steps, moved.steps)
    assert np.array_equal(packed.segments, moved.segments)


def test_positions_are_refused_as_at_position_refuses_them(chain: Chain) -> None:
    packed = pack(decoder("plain"))
    for pos in (-1, 48):
        with pytest.raises(ConfigError) as caught:
            packed.check_position(pos)
        with pytest.raises(ConfigError, match=re.escape(str(caught.value))):
            at_position(decoder("plain"), pos)
    still = chain({"x": (IN, F32, (1, 4)), "y": (OUT, F32, (1, 4))}, [("GELU", ["x"], ["y"], {})])
    with pytest.raises(ConfigError, match="no position"):
        pack(still).check_position(0)
    append = {"op": "KV_APPEND", "args": [{"in": 0}, {"in": 1}], "out": "final", "params": {"pos": 3},
              "out_shape": [8, 4], "out_dtype": "F32"}  # fmt: skip
    buffers = {"x": (IN, F32, (1, 4)), "k": (KV, F32, (8, 4))}
    fixed = chain(buffers, [("FUSED", ["x", "k"], ["k"], {"pos": 5, "recipe": {"steps": [append]}})])
    with pytest.raises(ConfigError, match=r"task 0 \(t0\): its recipe fixes"):
        pack(fixed).check_position(2)


@pytest.mark.parametrize("name", CONFIGS)
def test_queues_hold_the_tasks_of_each_sm_in_list_order(name: str) -> None:
    program = decoder(name)
    packed = pack(program)
    assert len(packed.queues) == FEW.num_sms + 1 and packed.queues[-1] == len(program.tasks)
    for sm in range(FEW.num_sms):
        mine = packed.instructions[packed.queues[sm] : packed.queues[sm + 1]]
        assert mine["task"].tolist() == [place for place, task in enumerate(program.tasks) if task.sm == sm]
        for record in mine:
            task = program.tasks[record["task"]]
            assert record["inputs"][: record["n_inputs"]].tolist() == list(task.inputs)
            assert record["outputs"][: record["n_outputs"]].tolist() == list(task.outputs)
            waits = zip(record["wait_counter"], record["wait_threshold"], strict=True)
            assert list(waits)[: record["n_waits"]] == [(wait.counter, wait.threshold) for wait in task.waits]
            assert (record["op"], record["sm"], record["out_counter"]) == (task.op, sm, task.out_counter)
            assert packed.label(record["task"]) == f"task {task.id} ({task.label})"


def test_ids_are_mapped_to_rows() -> None:
    program = decoder("plain")
    renamed = replace(
        program,
        buffers=tuple(replace(buffer, id=1000 - buffer.id) for buffer in program.buffers),
        counters=tuple(replace(counter, id=7 * counter.id + 3) for counter in program.counters),
        tasks=tuple(
            replace(
                task,
                inputs=tuple(1000 - number for number in task.inputs),
                outputs=tuple(1000 - number for number in task.outputs),
                out_counter=7 * task.out_counter + 3,
                waits=tuple(replace(wait, counter=7 * wait.counter + 3) for wait in task.waits),
            )
            for task in program.tasks
        ),
    )
    assert octets(pack(renamed)) == octets(pack(program))


def test_equal_steps_are_stored_once() -> None:
    packed = pack(decoder("fused"))
    runs = {(int(each["first_step"]), int(each["n_steps"])) for each in packed.instructions}
    assert sum(length for _, length in runs) == len(packed.steps)
    assert len({packed.steps[first : first + length].tobytes() for first, length in runs}) == len(runs)


@pytest.mark.parametrize("pages", PAGES)
def test_buffers_lie_where_the_reference_vm_has_them(pages: str) -> None:
    program = in_pages(lower(decode_step(SPEC, 48, BF16), CONFIGS["plain"], FEW), pages)
    packed = pack(program)
    tensors = Arena(program, "cpu").tensors()  # type: ignore[arg-type]
    start = min(tensor.data_ptr() for tensor in tensors.values())
    wanted = {row: tensors[buffer.id].data_ptr() - start for row, buffer in enumerate(program.buffers)
              if buffer.id in tensors}  # fmt: skip
    assert packed.arena.offsets == wanted
    assert packed.arena.nbytes >= max(wanted[row] + program.buffers[row].nbytes for row in wanted)


def test_the_buffer_table_describes_row_major_tensors() -> None:
    program = decoder("plain")
    for row, buffer in zip(pack(program).buffers, program.buffers, strict=True):
        assert (row["ptr"], row["numel"], row["rank"]) == (0, buffer.numel, len(buffer.shape))
        assert (row["dtype"], row["space"]) == (buffer.dtype, buffer.space)
        assert tuple(row["shape"][: row["rank"]]) == tuple(buffer.shape)
        assert tuple(row["stride"][: row["rank"]]) == buffer.contiguous_strides()


def fused(*steps: Mapping[str, Any]) -> dict[str, Any]:
    return {"recipe": {"steps": list(steps)}}


def gelu(arg: dict[str, int], out: Any, width: int = 16, dtype: str = "F32") -> dict[str, Any]:
    return {"op": "GELU", "args": [arg], "out": out, "params": {}, "out_shape": [1, width], "out_dtype": dtype}


def made_first(depth: int, rows: int) -> dict[str, Any]:
    """A product of what another step makes."""
    made = {"op": "GELU", "args": [{"in": 0}], "out": 0, "params": {}, "out_shape": [rows, depth], "out_dtype": "F32"}
    product = {"op": "GEMM_TILE", "args": [{"s": 0}, {"in": 1}], "out": "final", "params": {**MATRIX, "K": depth},
               "out_shape": [rows, 8], "out_dtype": "F32"}  # fmt: skip
    return fused(made, product)


MATRIX = {"K": 16, "n_off": 0, "N_tile": 8}
X, Y = {"x": (IN, F32, (1, 16))}, {"y": (OUT, F32, (1, 16))}
PRODUCT = {"op": "GEMV_TILE", "args": [{"in": 0}, {"s": 0}], "out": "final", "params": MATRIX, "out_shape": [1, 8],
           "out_dtype": "F32"}  # fmt: skip
WIDE = {"op": "GEMV_TILE", "args": [{"in": 0}, {"in": 1}], "out": 0, "params": MATRIX, "out_shape": [1, 9],
        "out_dtype": "F32"}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "shards": ({**X, **Y}, [("ALLREDUCE_SHARD", ["x"], ["y"], {})], r"task 0 \(t0\): ALLREDUCE_SHARD .*no kernel"),
    "steps": (
        {**X, **Y},
        [("FUSED", ["x"], ["y"], fused(gelu({"in": 0}, 0), *(gelu({"s": i}, i + 1) for i in range(15)),
                                       gelu({"s": 15}, "final")))],
        r"task 0 \(t0\): FUSED has 17 steps",
    ),
    "halves": (
        {"x": (IN, F16, (1, 16)), "y": (OUT, BF16, (1, 16))}, [("GELU", ["x"], ["y"], {})],
        r"buffer 1 \(y\): BF16 beside the F16",
    ),
    "half scratch": (
        {"x": (IN, F16, (1, 16)), "y": (OUT, F16, (1, 16))},
        [("FUSED", ["x"], ["y"], fused(gelu({"in": 0}, 0, dtype="BF16"), gelu({"s": 0}, "final", dtype="F16")))],
        r"task 0 \(t0\): FUSED step 0: GELU result is BF16, not F32 or F16",
    ),
    "activation as matrix": (
        {**X, "a": (ACT, F32, (8, 16)), "w": (IN, F32, (8, 16)), "y": (OUT, F32, (1, 8))},
        [("COPY", ["w"], ["a"], {}), ("GEMV_TILE", ["x", "a"], ["y"], MATRIX)],
        r"task 1 \(t1\): GEMV_TILE the matrix is not a WEIGHT",
    ),
    "scratch as matrix": (
        {**X, "y": (OUT, F32, (1, 8))},
        [("FUSED", ["x"], ["y"], fused({**gelu({"in": 0}, 0), "out_shape": [1, 16]}, {**PRODUCT, "params": {
            **MATRIX, "N_tile": 1}, "out_shape": [1, 8]}))],
        r"task 0 \(t0\): FUSED step 1: the matrix is not a WEIGHT",
    ),
    "cube": (
        {**X, "w": (WEIGHT, F32, (2, 4, 16)), "y": (OUT, F32, (1, 8))},
        [("GEMV_TILE", ["x", "w"], ["y"], MATRIX)], r"the matrix has shape \[2, 4, 16\]",
    ),
    "vector in another type": (
        {**X, "w": (WEIGHT, BF16, (8, 16)), "y": (OUT, F32, (1, 8))},
        [("GEMV_TILE", ["x", "w"], ["y"], MATRIX)], r"task 0 \(t0\): GEMV_TILE the vector is F32, not BF16",
    ),
    "matrix in another type": (
        {"x": (IN, BF16, (1, 16)), "w": (WEIGHT, F32, (8, 16)), "y": (OUT, F32, (1, 8))},
        [("GEMV_TILE", ["x", "w"], ["y"], MATRIX)], r"the matrix is F32, not BF16",
    ),
    "nine rows": (
        {"x": (IN, F32, (9, 16)), "w": (WEIGHT, F32, (8, 16)), "y": (OUT, F32, (9, 8))},
        [("GEMM_TILE", ["x", "w"], ["y"], {**MATRIX, "M_tile": 9})], r"9 rows of x, more than 8",
    ),
    "long vector": (
        {"x": (IN, F32, (1, 20000)), "w": (WEIGHT, F32, (8, 20000)), "y": (OUT, F32, (1, 8))},
        [("FUSED", ["x", "w"], ["y"], made_first(20000, 1))],
        r"task 0 \(t0\): FUSED stages an operand of 80000 bytes in an area of 65536, whole since the task makes it",
    ),
    "long rows": (
        {"x": (IN, F32, (4, 9000)), "w": (WEIGHT, F32, (8, 9000)), "y": (OUT, F32, (4, 8))},
        [("FUSED", ["x", "w"], ["y"], made_first(9000, 4))],
        r"task 0 \(t0\): FUSED stages an operand of 144384 bytes in an area of 135168, whole since the task makes it",
    ),
    "too many elements": (
        {"x": (IN, F32, (2**16, 2**15)), "y": (OUT, F32, (2**16, 2**15))}, [("GELU", ["x"], ["y"], {})],
        r"task 0 \(t0\): GELU an operand of 2147483648 elements",
    ),
    "eight-bit floats": (
        {"x": (IN, DType.F8E4M3, (1, 16)), **Y}, [("GELU", ["x"], ["y"], {})], r"GELU operand 0 is F8E4M3",
    ),
    "half a byte": (
        {"q": (WEIGHT, I4, (2, 5)), "s": (WEIGHT, F32, (2, 1)), "y": (OUT, F32, (2, 5))},
        [("DEQUANT", ["q", "s"], ["y"], {"qdtype": int(I4), "group": 5})],
        r"buffer 0 \(q\): I4 rows of an odd length, 5",
    ),
    "matrix as a vector": (
        {**X, "w": (WEIGHT, F32, (1, 16)), "a": (ACT, F32, (1, 1)), **Y},
        [("GEMV_TILE", ["x", "w"], ["a"], {**MATRIX, "N_tile": 1}), ("ADD", ["x", "w"], ["y"], {})],
        r"task 1 \(t1\): ADD reads buffer 1 \(w\), a matrix elsewhere",
    ),
    "wide heads": (
        {"q": (IN, F32, (1, 600)), "k": (KV, F32, (4, 1, 600)), "v": (KV, F32, (4, 1, 600)), "y": (OUT, F32, (1, 600))},
        [("ATTENTION_TILE", ["q", "k", "v"], ["y"], {"head_dim": 600, "n_heads": 1, "n_kv_heads": 1, "kv_start": 0,
                                                     "kv_len": 2, "scale": 1.0})],
        r"task 0 \(t0\): ATTENTION_TILE head_dim=600 is above 512",
    ),
    "a cache off 16 bytes": (
        {"q": (IN, F32, (1, 6)), "k": (KV, F32, (3, 1, 6)), "v": (KV, F32, (3, 1, 6)), "y": (OUT, F32, (1, 6))},
        [("ATTENTION_TILE", ["q", "k", "v"], ["y"], {"head_dim": 6, "n_heads": 1, "n_kv_heads": 1, "kv_start": 0,
                                                     "kv_len": 2, "scale": 1.0})],
        r"buffer 1 \(k\): a KV cache of 72 bytes, no multiple of 16",
    ),
    "half a scaling": (
        {"x": (IN, F32, (1, 8)), "p": (IN, I32, (1,)), "y": (OUT, F32, (1, 8))},
        [("FUSED", ["x", "p"], ["y"], fused({"op": "ROPE", "args": [{"in": 0}, {"in": 1}], "out": "final", "params": {
            "head_dim": 8, "theta": 1e4, "rope_factor": 8.0}, "out_shape": [1, 8], "out_dtype": "F32"}))],
        r"task 0 \(t0\): FUSED .*RoPE scaling needs all",
    ),
    "a sum of several rows": (
        {**X, "w": (IN, F32, (1, 16)), "y": (OUT, F32, (2, 8))},
        [("FUSED", ["x", "w"], ["y"], fused({"op": "ADD", "args": [{"in": 0}, {"in": 1}], "out": "final", "params": {},
          "out_shape": [2, 8], "out_dtype": "F32"}) | {"n_off": 0, "N_tile": 8, "M_tile": 2})],
        r"task 0 \(t0\): FUSED step 0: ADD makes a tile of 2 rows without a product of its columns",
    ),
    "a product of other columns of several rows": (
        {"x": (IN, F32, (2, 16)), "w": (WEIGHT, F32, (9, 16)), "y": (OUT, F32, (2, 8))},
        [("FUSED", ["x", "w"], ["y"], fused({**PRODUCT, "args": [{"in": 0}, {"in": 1}], "out": "final",
          "params": {**MATRIX, "n_off": 1}, "out_shape": [2, 8]}) | {"n_off": 0, "N_tile": 8, "M_tile": 2})],
        r"step 0: GEMV_TILE makes a tile of 2 rows without a product of its columns",
    ),
    "a product of fewer rows than its tile": (
        {"x": (IN, F32, (2, 16)), "w": (WEIGHT, F32, (8, 16)), "y": (OUT, F32, (4, 8))},
        [("FUSED", ["x", "w"], ["y"], fused({**PRODUCT, "args": [{"in": 0}, {"in": 1}], "out": "final",
          "params": {"K": 16}, "out_shape": [4, 8]}) | {"n_off": 0, "N_tile": 8, "M_tile": 4})],
        r"step 0: 2 rows of x make a tile of M_tile=4 rows",
    ),
    "columns of several rows": (
        {"x": (IN, F32, (2, 8)), "y": (OUT, F32, (2, 3))},
        [("COPY", ["x"], ["y"], {"n_off": 2, "N_tile": 3, "M_tile": 2})],
        r"task 0 \(t0\): COPY a COPY of columns of 2 rows that no product adds has no kernel",
    ),
    "a tile of another width": (
        {**X, "w": (WEIGHT, F32, (8, 16)), "y": (OUT, F32, (1, 9))},
        [("FUSED", ["x", "w"], ["y"], fused(WIDE, gelu({"s": 0}, "final", 9)))],
        r"task 0 \(t0\): FUSED makes 9 elements of a matrix tile of 8 columns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_is_refused_in_one_line(chain: Chain, name: str) -> None:
    buffers, tasks, text = REFUSED[name]
    program = chain(buffers, tasks)
    with pytest.raises(InvalidProgramError, match=text) as caught:
        pack(program)
    assert len(str(caught.value).splitlines()) == 1
    assert refusal_of(program) == str(caught.value)  # what predicts says the same


def test_a_task_without_an_sm_is_refused() -> None:
    program = decoder("plain")
    tasks = list(program.tasks)
    tasks[5] = replace(tasks[5], sm=None)
    with pytest.raises(InvalidProgramError, match=r"task 5 \(.*\): sm=None is not in 0\.\.") as caught:
        pack(replace(program, tasks=tuple(tasks)))
    assert refusal_of(replace(program, tasks=tuple(tasks))) == str(caught.value)


def test_rows_that_overfill_the_partials_are_refused(chain: Chain) -> None:
    buffers = {"x": (IN, F32, (8, 16)), "w": (WEIGHT, F32, (8, 16)), "y": (OUT, F32, (8, 8))}
    tasks = [("GEMM_TILE", ["x", "w"], ["y"], {**MATRIX, "M_tile": 8})]
    assert pack(chain(buffers, tasks, ScheduleConfig(threads_per_block=576))).pass_blocks == 1
    program = chain(buffers, tasks, ScheduleConfig(threads_per_block=640))
    with pytest.raises(InvalidProgramError, match="partial sums of 8 rows by 9 matrix warps") as caught:
        pack(program)
    assert refusal_of(program) == str(caught.value)


@pytest.mark.parametrize(("head_dim", "taken"), [(128, "15080 bytes of 8192"), (256, "30624 bytes of 16384")])
def test_heads_that_overfill_the_work_area_are_refused(chain: Chain, head_dim: int, taken: str) -> None:
    buffers, tasks, _ = REFUSED["wide heads"]
    wide = {name: (kind, dtype, (*shape[:-1], head_dim)) for name, (kind, dtype, shape) in buffers.items()}
    op, inputs, outputs, params = tasks[0]

    def on_warps(matrix: int) -> MegakernelProgram:
        config = ScheduleConfig(tiling={"warps": {"matrix": matrix}}, threads_per_block=1024)
        return chain(wide, [(op, inputs, outputs, {**params, "head_dim": head_dim})], config)

    assert refusal_of(on_warps(15)) is None
    with pytest.raises(InvalidProgramError, match=f"head_dim={head_dim} on 29 vector warps takes {taken}") as caught:
        pack(on_warps(1))
    assert refusal_of(on_warps(1)) == str(caught.value)


def test_a_program_without_a_target_is_refused(chain: Chain) -> None:
    with pytest.raises(FlywheelError, match="no target"):
        pack(replace(chain({**X, **Y}, [("GELU", ["x"], ["y"], {})]), target=None))
