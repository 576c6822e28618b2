"""Several sequences in one launch: each must get what it would get alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import pytest

from flywheel.decode.interface import read_interface
from flywheel.decode.session import ReferenceSession
from flywheel.decode.verify import compare_rows, expect_rows, make_oracle, verify
from flywheel.errors import ConfigError, TensorError, UsageError
from flywheel.ir import (
    TARGETS,
    DType,
    InstructionKind,
    MegakernelProgram,
    ScheduleConfig,
    program_to_json,
    simulate_adversarial,
    validate,
)
from flywheel.ir.access import multi_row_buffers
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec, RopeScaling
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES

CONTEXT: Final = 40
POSITIONS: Final = (0, 1, 16, 39)
SPECS: Final = {
    "llama": DecoderSpec(
        "small", "llama", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)
    ),
    "mistral": DecoderSpec("small", "mistral", 48, 80, 1, 2, 1, 16, 70, 1e4, 1e-5, 64),
    "qwen2": DecoderSpec("small", "qwen2", 48, 80, 2, 4, 4, 16, 70, 1e4, 1e-6, 64, tied_head=True, qkv_bias=True),
    "qwen3": DecoderSpec("small", "qwen3", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-6, 64, qk_norm=True),
}
FUSED: Final = [
    ["attn_norm", "q_proj", "k_proj", "v_proj"],
    ["q_rope", "k_rope", "k_append", "v_append", "attention"],
    ["mlp_norm", "gate_proj", "up_proj", "silu_mul"],
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
    return lower(decode_step(SPECS[family], CONTEXT, dtype, batch), CONFIGS[config], TARGET)


def session_of(program: MegakernelProgram, family: str, dtype: DType, **order: Any) -> tuple[ReferenceSession, Any]:
    weights = random_weights(SPECS[family], 1, TORCH_DTYPES[dtype])
    session = ReferenceSession(program, SPECS[family], weights, **order)
    return session, make_oracle(session, weights)


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
    session, oracle = session_of(program, family, dtype, order="adversarial")
    verdict = verify(session, oracle, POSITIONS, seed=3)
    assert verdict.passed, verdict.reason
    assert verdict.top1_agreement == 1.0
    if dtype is DType.F32:
        assert verdict.max_rel_error < 1e-5


@pytest.mark.parametrize("row", [0, 2])
def test_one_wrong_row_is_no_pass(row: int) -> None:
    session, oracle = session_of(lowered(batch=3), "qwen3", DType.F32)
    expected: Sequence[Any] = expect_rows(oracle, POSITIONS, 3)
    tokens = tuple((token + 1) % 70 for token in expected[row].tokens)
    wrong = [replace(each, tokens=tokens) if place == row else each for place, each in enumerate(expected)]
    assert compare_rows(session, expected).passed
    assert not compare_rows(session, wrong).passed


def test_rows_may_trade_places() -> None:
    session, oracle = session_of(lowered(batch=3), "qwen3", DType.F32)
    expected = expect_rows(oracle, POSITIONS, 3)
    assert compare_rows(session, expected[::-1]).passed


def test_a_cache_is_one_rows_alone() -> None:
    session, oracle = session_of(lowered(batch=2), "qwen3", DType.F32)
    one, other = expect_rows(oracle, (16,), 2)
    session.write_cache(one.cache_before(16), 0)
    session.write_cache(one.cache_before(16), 1)
    first, second = session.step_rows([one.tokens[16]] * 2, 16)
    assert first.logits.equal(second.logits)
    session.write_cache(other.cache_before(16), 1)
    again, changed = session.step_rows([one.tokens[16]] * 2, 16)
    assert again.logits.equal(first.logits)
    assert not changed.logits.equal(first.logits)


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
    graph = decode_step(SPECS["llama"], CONTEXT)
    again = decode_step(SPECS["llama"], CONTEXT, DType.BF16, 1)
    for config in CONFIGS.values():
        program = lower(graph, config, TARGET)
        assert program_to_json(program) == program_to_json(lower(again, config, TARGET))
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


def test_a_token_for_every_row_and_no_more() -> None:
    session, _ = session_of(lowered(batch=2), "qwen3", DType.F32)
    with pytest.raises(UsageError, match="1 tokens for a program of batch 2"):
        session.step(3, 0)
    with pytest.raises(UsageError, match=r"token 70 is not in 0\.\.69"):
        session.step_rows([3, 70], 0)
