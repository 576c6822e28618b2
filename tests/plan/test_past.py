"""Which attentions have their past streamed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flywheel.cost_model import predict
from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, DType, InstructionKind, KvRows, MegakernelProgram, ScheduleConfig, Task, validate
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan.features import PAST
from flywheel.plan.program import make_plan
from flywheel.plan.variant import variant_of
from flywheel.vm.abi import InstructionFlag, SegmentFlag
from flywheel.vm.pack import PackedProgram, pack

SPEC = DecoderSpec("small", "llama", 128, 96, 2, 4, 2, 64, 200, 1e4, 1e-6, 256)
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip


def program(
    spec: DecoderSpec = SPEC, batch: int = 1, lanes: int = 1, dtype: DType = DType.BF16, **stream: int
) -> MegakernelProgram:
    tiling = {"attention": {"kv_block": 64}, "stream": {"chunk_bytes": 8192, "past": 1, **stream}}
    return lower(decode_step(spec, 200, dtype, batch, lanes=lanes), ScheduleConfig(tiling, FUSED), TARGETS["h200"])


def streams(packed: PackedProgram) -> list[Task]:
    """The tasks whose past is streamed."""
    flagged = packed.instructions[packed.instructions["flags"] & InstructionFlag.STREAMS != 0]
    return [packed.program.tasks[place] for place in flagged["task"].tolist()]


@pytest.mark.parametrize("batch", [1, 3])
def test_attentions_to_past_rows_are_streamed_and_no_other_task(batch: int) -> None:
    packed = pack(program(batch=batch))
    past = [task for task in packed.program.tasks if task.params.get("kv_rows") == KvRows.PAST]
    assert len(past) == SPEC.n_layers * SPEC.n_kv_heads * batch * 4  # blocks of rows 0, 64, 128 and 192
    assert sorted(task.id for task in streams(packed)) == sorted(task.id for task in past)


def test_a_task_s_segments_name_its_rows_and_the_chunks_of_weights_before_them() -> None:
    packed = pack(program(replace(SPEC, windowed=(True, False), window=150), batch=2))
    names = [buffer.name for buffer in packed.program.buffers]
    for sm, (start, end) in enumerate(zip(packed.streams, [*packed.streams[1:], len(packed.segments)], strict=True)):
        weights, place = 0, int(start)
        while place < end:
            segment = packed.segments[place]
            if not segment["flags"] & SegmentFlag.PAST:
                weights, place = weights + int(segment["row_blocks"] * segment["row_chunks"]), place + 1
                continue
            instruction = packed.instructions[packed.queues[sm] + segment["queue_index"]]
            task = packed.program.tasks[instruction["task"]]
            assert instruction["flags"] & InstructionFlag.STREAMS and instruction["params"]["K"] == weights
            found = [int(segment[name]) for name in ("row_blocks", "rows", "row_chunks", "kblocks", "slice_chunks")]
            assert found == [task.params.get(name, 0) for name in ("sequence", "pos", "kv_start", "kv_len", "window")]
            assert segment["row_stride"] == 128 and segment["chunk_kblocks"] == 32 and segment["src"] == 0
            keys, values = (names[row] for row in packed.segment_buffers[place : place + 2])
            assert keys.replace("k_", "v_") == values
            assert packed.segments[place + 1]["flags"] == SegmentFlag.PAST and not packed.segments[place + 1]["kblocks"]
            place += 2


@pytest.mark.parametrize(
    "work",
    [
        {"dtype": DType.F32}, {"batch": 2, "lanes": 2}, {"spec": replace(SPEC, head_dim=96)}, {"past": 0},
        {"spec": replace(SPEC, n_heads=18, hidden=96)}, {"chunk_bytes": 3072},
    ],
)  # fmt: skip
def test_what_the_kernel_cannot_stream_is_loaded(work: dict[str, Any]) -> None:
    assert streams(pack(program(**work))) == []


def test_a_kernel_of_f32_has_no_code_for_streamed_rows() -> None:
    """It would not compile."""
    made = program(dtype=DType.F32)
    assert variant_of(made) == variant_of(program(dtype=DType.F32, past=0))
    assert PAST in variant_of(program()).features


def test_caches_that_another_task_writes_before_the_position_are_loaded() -> None:
    """An append of an earlier row, which the attention waits for."""
    made = program()
    row = next(task for task in made.tasks if task.params.get("kv_rows") == KvRows.NEW)
    earlier = {"pos": row.params["pos"] - 60}
    tasks = [
        replace(task, params={**task.params, **earlier, "kv_start": earlier["pos"]}) if task is row else task
        for task in made.tasks
    ]
    plan = make_plan(replace(made, tasks=tuple(tasks)))
    left = np.count_nonzero(make_plan(made).streamed) - np.count_nonzero(plan.streamed)
    assert left == 4  # the blocks of that head in that layer


def test_a_program_that_streams_is_proved_and_predicted_to_be_no_slower() -> None:
    """At 8,704 positions of eight KV heads."""
    spec = replace(SPEC, n_heads=16, n_kv_heads=8, head_dim=128, hidden=1024, intermediate=2048, max_position=8704)
    times = []
    for past in (0, 1):
        tiling = {"attention": {"kv_block": 544}, "stream": {"chunk_bytes": 16384, "past": past}}
        made = lower(decode_step(spec, 8704, DType.BF16), ScheduleConfig(tiling, FUSED), TARGETS["h200"])
        assert validate(made, strict=True).ok
        times.append(predict(made).latency_us)
    assert times[1] < times[0]


def test_another_value_of_the_knob_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^tiling\.stream\.past=2 is not 0 or 1$"):
        pack(program(past=2))


def test_the_attention_is_the_last_step_of_a_streamed_task() -> None:
    for task in streams(pack(program())):
        assert task.params["recipe"].steps[-1].op is InstructionKind.ATTENTION_TILE


def test_queries_that_begin_between_16_bytes_are_loaded_with_their_rows() -> None:
    """The kernel loads 16 bytes of queries at once."""
    made = program(replace(SPEC, family="smollm3", turned=(True, False)))
    moved = [task for task in made.tasks if task.params.get("kv_rows") == KvRows.PAST][-1]  # of the layer without RoPE
    recipe = moved.params["recipe"]
    steps = [
        replace(step, params={**step.params, "n_off": 4}) if step.op is InstructionKind.COPY else step
        for step in recipe.steps
    ]
    other = {**moved.params, "recipe": replace(recipe, steps=tuple(steps))}
    tasks = [replace(task, params=other) if task is moved else task for task in made.tasks]
    before, after = make_plan(made).streamed, make_plan(replace(made, tasks=tuple(tasks))).streamed
    assert np.flatnonzero(before != after).tolist() == [made.tasks.index(moved)]
