"""A prompt at once leaves what its tokens leave one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flywheel.decode.prompts import CHUNK, Prefill
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import UsageError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.rope import LinearRope, LongRope, ProportionalRope, Rope, RopeScaling, YarnRope
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES

CONTEXT, PROMPT = 48, tuple((7 * place + 3) % 80 for place in range(23))
SMALL = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 128)
GEMMA: dict[str, Any] = {
    "tied_head": True, "norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh", "embed_scale": 8.0,
    "embed_scale_rounds": True, "attention_scale": 0.2, "window": 9, "windowed": (True, False),
}  # fmt: skip
GEMMA4: dict[str, Any] = {
    "family": "gemma4_text", "norm_offset": 0.0, "qk_norm": True, "v_norm": True, "layer_scalar": True,
    "attention_scale": 0.5, "logits_cap": 2.0, "local_rope": Rope(1e2), "rope_scaling": ProportionalRope(0.25),
    "full_head_dim": 32,
}  # fmt: skip
FAMILIES = {
    "llama": replace(SMALL, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
    "tied": replace(SMALL, tied_head=True),
    "phi3": replace(SMALL, rope_scaling=LongRope((1.0,) * 6, (1.5,) * 6, 20, 1.25), rotary_dim=12),
    "qwen2": replace(SMALL, qkv_bias=True),
    "qwen3": replace(SMALL, qk_norm=True),
    "cohere2": replace(SMALL, family="cohere2", norm="layer", norms="shared", window=128, windowed=(True, False),
                       nope_full=True),
    "starcoder2": replace(SMALL, family="starcoder2", norm="layer", norm_bias=True, gated=False, activation="gelu_tanh",
                          o_bias=True, mlp_bias=True),
    "window": replace(SMALL, family="mistral", window=9),
    "windows": replace(SMALL, family="ministral", window=1, windowed=(False, True)),
    "smollm3": replace(SMALL, family="smollm3", turned=(True, False), qkv_bias=True, o_bias=True, mlp_bias=True),
    "no rope": replace(SMALL, family="granitemoehybrid", turned=(False,), residual_scale=0.5),
    "a query head a KV head": replace(SMALL, n_kv_heads=4),
    "glm4": replace(SMALL, family="glm4", rotary_dim=8, norms="around", qkv_bias=True),
    "granite": replace(SMALL, family="granite", embed_scale=6.0, residual_scale=0.22, attention_scale=0.1,
                       logits_scale=0.125),
    "olmo2": replace(SMALL, family="olmo2", norms="behind", qk_norm=True, wide_qk_norm=True),
    "olmo3": replace(SMALL, family="olmo3", norms="behind", qk_norm=True, wide_qk_norm=True, window=9,
                     windowed=(True, False), local_rope=Rope(3e2), rope_scaling=YarnRope(4.0, 16, 1.25)),
    "gemma2": replace(SMALL, **GEMMA, family="gemma2", attention_cap=2.0, logits_cap=2.0),
    "gemma3": replace(SMALL, **GEMMA, family="gemma3_text", qk_norm=True, local_rope=Rope(1e2),
                      rope_scaling=LinearRope(8.0)),
    "gemma4": replace(SMALL, **GEMMA | GEMMA4, full_kv_heads=1, full_k_is_v=True),
    "gemma4 values": replace(SMALL, **GEMMA | GEMMA4),
}  # fmt: skip
NEAR = {DType.F32: 2e-5, DType.BF16: 0.06}
"""Of the largest element. In half types a whole step's roundings pile up, differently in each of the two."""


def program_of(spec: DecoderSpec, dtype: DType) -> MegakernelProgram:
    return lower(decode_step(spec, CONTEXT, dtype), ScheduleConfig(), replace(TARGETS["h100"], num_sms=6))


def session_of(spec: DecoderSpec, dtype: DType) -> ReferenceSession:
    return ReferenceSession(program_of(spec, dtype), spec, random_weights(spec, 1, TORCH_DTYPES[dtype]))


@pytest.mark.parametrize("chunk", [CHUNK, 7])
@pytest.mark.parametrize("dtype", NEAR, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_at_once_is_its_tokens_one_by_one(
    family: str, dtype: DType, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.decode.prompts.CHUNK", chunk)
    monkeypatch.setattr("flywheel.decode.prompts.PIECE", 5)
    at_once, stepped = session_of(FAMILIES[family], dtype), session_of(FAMILIES[family], dtype)
    at_once.prefill(PROMPT)
    for position, token in enumerate(PROMPT):
        stepped.step(token, position)
    for layer in range(FAMILIES[family].n_layers):
        for mine, wanted in zip(
            at_once.caches.seen(layer, 0, len(PROMPT)), stepped.caches.seen(layer, 0, len(PROMPT)), strict=True
        ):
            assert (mine - wanted).abs().max() <= NEAR[dtype] * wanted.abs().max()
    mine, wanted = (session.step(5, len(PROMPT)).logits for session in (at_once, stepped))
    assert (mine - wanted).abs().max() <= NEAR[dtype] * wanted.abs().max()


def test_positions_behind_the_prompt_are_forgotten_and_other_sequences_are_not() -> None:
    program = lower(decode_step(SMALL, CONTEXT, DType.F32, 2), ScheduleConfig(), replace(TARGETS["h100"], num_sms=6))
    weights = random_weights(SMALL, 1, torch.float32)
    session = ReferenceSession(program, SMALL, weights)
    run = Prefill(SMALL, weights, CONTEXT)
    run(PROMPT, session.caches, row=0)
    run(PROMPT[:9], session.caches, row=1)
    run(PROMPT[:4], session.caches, row=0)
    first, second = (session.caches.seen(1, row, CONTEXT)[0] for row in (0, 1))
    assert not first[:, :4].isnan().any()
    assert first[:, 4:].isnan().all()
    assert not second[:, :9].isnan().any()


def test_a_prompt_that_does_not_fit_leaves_the_caches_alone() -> None:
    session = session_of(SMALL, DType.F32)
    session.prefill(PROMPT)
    before = [side.clone() for side in session.caches.seen(0, 0, CONTEXT)]
    with pytest.raises(UsageError, match=r"token 80 is not in 0\.\.79"):
        session.prefill((1, 80))
    with pytest.raises(UsageError, match=r"position 48 is not in 0\.\.47"):
        session.prefill((1,) * (CONTEXT + 1))
    for mine, wanted in zip(session.caches.seen(0, 0, CONTEXT), before, strict=True):
        assert torch.equal(mine.nan_to_num(9e9), wanted.nan_to_num(9e9))
