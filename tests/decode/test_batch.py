"""Several sequences in one launch: each must get what it would get alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
import torch

from flywheel.decode.caches import KvCaches
from flywheel.decode.interface import read_interface
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import ConfigError, TensorError
from flywheel.ir import (
    TARGETS,
    DType,
    InstructionKind,
    MegakernelProgram,
    ScheduleConfig,
    simulate_adversarial,
    validate,
)
from flywheel.ir.access import multi_row_buffers
from flywheel.judge.verdicts import Judge, make_judge
from flywheel.lowering.fusion import COMBINE
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.rope import LinearRope, ProportionalRope, Rope, RopeScaling, YarnRope
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES

CONTEXT: Final = 40
POSITIONS: Final = (0, 1, 16, 39)
SPECS: Final = {
    "llama": DecoderSpec(
        "small", "llama", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)
    ),
    "mistral": DecoderSpec("small", "mistral", 48, 80, 1, 2, 1, 16, 70, 1e4, 1e-5, 64),
    "windows": DecoderSpec(
        "small", "mistral", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, window=21, windowed=(True, False)
    ),
    "qwen2": DecoderSpec("small", "qwen2", 48, 80, 2, 4, 4, 16, 70, 1e4, 1e-6, 64, tied_head=True, qkv_bias=True),
    "qwen3": DecoderSpec("small", "qwen3", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-6, 64, qk_norm=True),
    "cohere2": DecoderSpec(
        "small", "cohere2", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, norm="layer", norms="shared", logits_scale=0.25,
        window=64, windowed=(True, False), nope_full=True,
    ),
    "starcoder2": DecoderSpec(
        "small", "starcoder2", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, qkv_bias=True, o_bias=True, mlp_bias=True,
        norm="layer", norm_bias=True, gated=False, activation="gelu_tanh",
    ),
    "smollm3": DecoderSpec(
        "small", "smollm3", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-6, 64, turned=(True, False), qkv_bias=True, o_bias=True,
        mlp_bias=True,
    ),
    "phi3": DecoderSpec(
        "small", "phi3", 48, 80, 1, 4, 2, 16, 70, 1e4, 1e-5, 64, rope_scaling=YarnRope(4.0, 16, 1.25), rotary_dim=12
    ),
    "glm4": DecoderSpec(
        "small", "glm4", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, rotary_dim=8, norms="around", qkv_bias=True
    ),
    "granite": DecoderSpec(
        "small", "granite", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, embed_scale=6.0, residual_scale=0.22,
        attention_scale=0.1, logits_scale=0.125,
    ),
    "olmo2": DecoderSpec(
        "small", "olmo2", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, norms="behind", qk_norm=True, wide_qk_norm=True
    ),
    "olmo3": DecoderSpec(
        "small", "olmo3", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, norms="behind", qk_norm=True, wide_qk_norm=True,
        window=21, windowed=(True, False), local_rope=Rope(3e2), rope_scaling=YarnRope(4.0, 16, 1.25),
    ),
    "gemma2": DecoderSpec(
        "small", "gemma2", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-6, 64, tied_head=True, norms="around", norm_offset=1.0,
        activation="gelu_tanh", embed_scale=48**0.5, embed_scale_rounds=True, attention_scale=0.2, attention_cap=2.0,
        logits_cap=2.0, window=21, windowed=(True, False),
    ),
    "gemma3": DecoderSpec(
        "small", "gemma3_text", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-6, 64, tied_head=True, norms="around",
        norm_offset=1.0, activation="gelu_tanh", embed_scale=48**0.5, embed_scale_rounds=True, attention_scale=0.2,
        qk_norm=True, window=21, windowed=(True, False), local_rope=Rope(1e2), rope_scaling=LinearRope(8.0),
    ),
    "gemma4": DecoderSpec(
        "small", "gemma4_text", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-6, 64, tied_head=True, norms="around",
        activation="gelu_tanh", embed_scale=48**0.5, embed_scale_rounds=True, attention_scale=0.5, qk_norm=True,
        v_norm=True, layer_scalar=True, window=21, windowed=(True, False), local_rope=Rope(1e2),
        rope_scaling=ProportionalRope(0.25), full_head_dim=32, full_kv_heads=1, full_k_is_v=True,
    ),
}
FUSED: Final = [
    ["attn_norm", "q_proj", "k_proj", "v_proj"],
    ["q_rope", "k_rope", "k_append", "v_append", "attention"],
    ["mlp_norm", "gate_proj", "up_proj", "silu_mul", "gelu_mul"],
    ["down_proj", "mlp_add"],
    ["final_norm", "lm_head"],
]
CONFIGS: Final = {
    "unfused": ScheduleConfig(),
    "unfused, split KV": ScheduleConfig(tiling={"attention": {"kv_block": 16}}),
    "fused": ScheduleConfig(fusion_grouping=[*FUSED, ["o_proj", "attn_add"]]),
    "fused, split KV": ScheduleConfig(
        tiling={"attention": {"kv_block": 16}}, fusion_grouping=[*FUSED, ["attn_combine", "o_proj", "attn_add"]]
    ),
}
TARGET: Final = replace(TARGETS["h100"], name="few", num_sms=6)


def lowered(
    family: str = "qwen3", config: str = "fused", batch: int = 4, dtype: DType = DType.F32
) -> MegakernelProgram:
    graph, own = decode_step(SPECS[family], CONTEXT, dtype, batch), CONFIGS[config]
    there = {op.name for block in graph.blocks for op in block.ops} | {COMBINE}
    there -= {"attn_add", "mlp_add"} if SPECS[family].norms in ("behind", "around") else set()  # a norm is between
    fused = [[name for name in names if name in there] for names in own.fusion_grouping]
    return lower(graph, replace(own, fusion_grouping=fused), TARGET)


def session_of(
    program: MegakernelProgram, family: str, dtype: DType, seed: int = 0, **order: Any
) -> tuple[ReferenceSession, Judge]:
    weights = random_weights(SPECS[family], 1, TORCH_DTYPES[dtype])
    session = ReferenceSession(program, SPECS[family], weights, **order)
    return session, make_judge(session, weights, POSITIONS, seed)


KINDS: Final = [(2, DType.F32), (3, DType.BF16), (4, DType.F32), (8, DType.BF16)]
CASES: Final = [
    (family, config, *KINDS[(one + other) % 4])
    for one, family in enumerate(SPECS)
    for other, config in enumerate(CONFIGS)
]


@pytest.mark.parametrize(("family", "config", "batch", "dtype"), CASES)
def test_every_row_gets_what_its_sequence_gets_alone(family: str, config: str, batch: int, dtype: DType) -> None:
    program = lowered(family, config, batch, dtype)
    assert validate(program, strict=True).ok
    assert simulate_adversarial(program, 4) == []
    session, judge = session_of(program, family, dtype, seed=3, order="adversarial")
    verdict = judge.examine(session).verdict
    assert verdict.passed, verdict.reason
    assert 3 * verdict.error <= verdict.bound


@pytest.mark.parametrize("row", [0, 2])
def test_one_wrong_row_is_no_pass_and_is_named(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    session, judge = session_of(lowered(batch=3), "qwen3", DType.F32)
    assert judge.examine(session).verdict.passed
    write = KvCaches.write_past

    def write_another(caches: KvCaches, past: torch.Tensor, lengths: list[int], gains: list[float]) -> None:
        others = past.clone()
        others[1, 0, row] = past[1, 0, (row + 1) % 3]
        write(caches, others, lengths, gains)

    monkeypatch.setattr(KvCaches, "write_past", write_another)
    monkeypatch.setattr(KvCaches, "changed", lambda caches, past, *_: torch.zeros(past.shape[:4], dtype=torch.bool))
    examined = judge.examine(session)
    assert not examined.verdict.passed
    assert f"row {row}, L1.attn head" in examined.verdict.where
    scores = examined.scores.by_name()["L1.attn"].reshape(len(POSITIONS), 3, -1).max((0, 2)).tolist()
    assert [each for each, score in enumerate(scores) if score > examined.verdict.bound] == [row]


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_at_positions_of_their_own_get_what_each_gets_in_lock_step(config: str) -> None:
    session, judge = session_of(lowered(config=config), "qwen3", DType.F32)
    places, positions = [2, 0, 3, 1], [16, 0, 39, 1]
    wanted = []
    for row, position in enumerate(positions):
        tokens = judge.prepare(session, position)
        wanted.append(session.step_rows(tokens, position)[row])
    tokens = judge._prepare(session, places)
    for step, alone in zip(session.step_rows(tokens, positions), wanted, strict=True):
        assert torch.equal(step.logits, alone.logits)
        assert step.token == alone.token


@pytest.mark.parametrize("config", CONFIGS)
def test_a_program_that_keeps_its_rows_in_lock_step_is_no_pass(config: str) -> None:
    program = lowered(config=config)
    rows = [{name: each for name, each in task.params.items() if name != "sequence"} for task in program.tasks]
    tasks = [replace(task, params=params) for task, params in zip(program.tasks, rows, strict=True)]
    session, judge = session_of(replace(program, tasks=tuple(tasks)), "qwen3", DType.F32)
    verdict = judge.examine(session).verdict
    assert not verdict.passed
    assert "row 0" not in verdict.where


def test_a_task_with_a_cache_of_another_sequence_is_refused() -> None:
    program = lowered(config="unfused, split KV")
    for number, task in enumerate(program.tasks):
        if task.params.get("sequence") == 2:
            wrong = replace(task, params={**task.params, "sequence": 1})
            tasks = (*program.tasks[:number], wrong, *program.tasks[number + 1 :])
            codes = {finding.code for finding in validate(replace(program, tasks=tasks), strict=True).errors}
            assert codes == {"kv-sequence"}
            return
    raise AssertionError("no task of sequence 2")


@pytest.mark.parametrize("config", CONFIGS)
def test_a_batch_streams_what_one_sequence_streams(config: str) -> None:
    def weight_tiles(program: MegakernelProgram) -> list[tuple[int | None, int]]:
        return [(task.params["n_off"], task.est_bytes) for task in program.tasks if "_proj" in task.label]

    assert weight_tiles(lowered(config=config)) == weight_tiles(lowered(config=config, batch=1))


def test_projections_write_columns_of_each_row() -> None:
    program = lowered("qwen2", batch=4)
    buffers = {buffer.id: buffer for buffer in program.buffers}
    several = multi_row_buffers(program.tasks, buffers)
    names = {buffers[number].name.rpartition(".")[2]: rows for number, rows in several.items()}
    assert names == dict.fromkeys(["q", "k", "v", "x_mid", "act", "x_out", "logits"], 4)
    for batch, op in ((1, "GEMV_TILE"), (4, "GEMM_TILE")):
        tasks = lowered(config="unfused", batch=batch).tasks
        assert {task.op.name for task in tasks if "_proj" in task.label} == {op}


def test_one_sequence_is_the_program_that_it_was() -> None:
    assert decode_step(SPECS["llama"], CONTEXT) == decode_step(SPECS["llama"], CONTEXT, DType.BF16, 1)
    for config in CONFIGS:
        program = lowered("llama", config, 1, DType.BF16)
        assert not any("M_tile" in task.params or task.op is InstructionKind.GEMM_TILE for task in program.tasks)


@pytest.mark.parametrize("batch", [0, -1, 9])
def test_a_batch_out_of_bounds_is_refused(batch: int) -> None:
    with pytest.raises(ConfigError, match=rf"batch {batch} is not in 1\.\.8"):
        decode_step(SPECS["llama"], CONTEXT, DType.BF16, batch)


def test_the_interface_tells_the_batch_and_the_caches_of_each_row() -> None:
    program = lowered("llama", batch=2)
    interface = read_interface(program, SPECS["llama"])
    assert interface.batch == 2
    assert interface.caches[1][0] == ("L1.k_cache.r0.h0", "L1.k_cache.r0.h1", "L1.k_cache.r1.h0", "L1.k_cache.r1.h1")
    short = [replace(each, shape=(1,)) if each.name == "next_token" else each for each in program.buffers]
    with pytest.raises(TensorError, match="next_token"):
        read_interface(replace(program, buffers=tuple(short)), SPECS["llama"])
