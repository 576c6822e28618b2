"""Prompt lookup on the CUDA VM's own sources: guessed tokens as lanes give the tokens of the reference VM."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session

from flywheel.decode.generate import generate
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import make_request
from flywheel.tensors import TORCH_DTYPES

SPEC = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 12, 1e4, 1e-6, 64)
WIDE = DecoderSpec("wide", "qwen3", 128, 96, 2, 2, 1, 64, 12, 1e4, 1e-6, 64, qk_norm=True)
CONTEXT, PROMPT = 32, (3, 7, 0, 3, 7)
ATTENTION = ["q_norm", "k_norm", "q_rope", "k_rope", "k_append", "v_append", "attention"]
CONFIGS = {
    "counters": ScheduleConfig(threads_per_block=192),
    "data": ScheduleConfig(
        {"hand_off": {"data": 1}, "attention": {"kv_block": 16}}, page_allocation="none", threads_per_block=192,
        fusion_grouping=[ATTENTION],
    ),
}  # fmt: skip


def program_of(
    config: str, batch: int, lanes: int, spec: DecoderSpec = SPEC, dtype: DType = DType.F32
) -> MegakernelProgram:
    gpu, own = EmulatedGpu(), CONFIGS[config]
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    grouping = [[name for name in names if spec.qk_norm or "norm" not in name] for names in own.fusion_grouping]
    graph = decode_step(spec, CONTEXT, dtype, batch * lanes, lanes=lanes)
    return lower(graph, replace(own, fusion_grouping=grouping), target)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_stream_is_what_token_by_token_says(config: str) -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    request = make_request(PROMPT, 28, frozenset(), SPEC, CONTEXT)
    expected = generate(ReferenceSession(program_of(config, 1, 1), SPEC, weights), request)
    gpu = EmulatedGpu()
    with emulated_session(gpu, program_of(config, 1, 4), SPEC, weights) as session:
        held = set(gpu._held)
        found = generate(session, request)
        assert set(gpu._held) == held
    assert found.token_ids == expected.token_ids


@pytest.mark.parametrize(("config", "window"), [("counters", None), ("data", None), ("counters", 3), ("data", 6)])
def test_each_lane_shows_what_the_reference_vm_shows(config: str, window: int | None) -> None:
    spec = replace(WIDE, window=window)
    program = program_of(config, 2, 4, spec, DType.BF16)
    weights = random_weights(spec, 1, TORCH_DTYPES[DType.BF16])
    reference = ReferenceSession(program, spec, weights)
    tokens = [5, 1, 7, 9, 2, 2, 11, 3]
    with emulated_session(EmulatedGpu(), program, spec, weights) as session:
        for each in (reference, session):
            each.prefill(tokens[:6], 0)
            each.prefill(tokens[:1], 1)
        for positions in ([6, 1], [7, 5]):
            expected, found = (each.step_rows(tokens, positions) for each in (reference, session))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one.logits, other.logits, rtol=2e-2, atol=2e-2)


def test_a_launch_without_a_position_for_each_lane_is_refused() -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    with (
        emulated_session(EmulatedGpu(), program_of("data", 1, 4), SPEC, weights) as session,
        pytest.raises(ConfigError, match="of 4 lanes; a launch takes the position of each row"),
    ):
        session.loaded.launch(3)
