"""What single families ask of a kernel, a macro of its variant each, is what the oracle computes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from effort import sample
from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session

from flywheel.ir import TARGETS, DType, validate
from flywheel.judge.verdicts import Judge, default_positions
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import OracleWeights
from flywheel.models.rope import LinearRope, ProportionalRope, Rope, YarnRope
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.plan.variant import variant_of
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.tensors import TORCH_DTYPES

CONTEXT, THREADS = 160, 192
SPECS = {
    "granite": DecoderSpec(
        "granite", "granite", 128, 256, 2, 4, 2, 64, 520, 1e5, 1e-5, 512, embed_scale=6.0, residual_scale=0.22,
        attention_scale=0.1, logits_scale=0.125,
    ),
    "olmo2": DecoderSpec(
        "olmo2", "olmo2", 128, 256, 2, 4, 2, 64, 520, 1e5, 1e-5, 512, norms="behind", qk_norm=True, wide_qk_norm=True,
    ),
    "phi3": DecoderSpec(
        "phi3", "phi3", 128, 256, 2, 4, 2, 64, 520, 1e4, 1e-5, 512, rope_scaling=YarnRope(4.0, 64, 1.25), rotary_dim=48,
    ),
    "cohere2": DecoderSpec(
        "cohere2", "cohere2", 128, 256, 4, 4, 2, 64, 520, 1e5, 1e-5, 512, tied_head=True, norm="layer", norms="shared",
        logits_scale=0.25, window=512, windowed=(True, True, True, False), nope_full=True,
    ),
    "starcoder2": DecoderSpec(
        "starcoder2", "starcoder2", 128, 256, 2, 4, 2, 64, 520, 1e5, 1e-5, 512, qkv_bias=True, o_bias=True,
        mlp_bias=True, norm="layer", norm_bias=True, gated=False, activation="gelu_tanh",
    ),
    "gemma2": DecoderSpec(
        "gemma2", "gemma2", 128, 256, 2, 4, 2, 64, 520, 1e5, 1e-6, 512, tied_head=True, norms="around", norm_offset=1.0,
        activation="gelu_tanh", embed_scale=128**0.5, embed_scale_rounds=True, attention_scale=0.2, attention_cap=2.0,
        logits_cap=2.0,
    ),
    "gemma3": DecoderSpec(
        "gemma3", "gemma3_text", 128, 256, 3, 4, 2, 64, 520, 1e6, 1e-6, 512, tied_head=True, norms="around",
        norm_offset=1.0, activation="gelu_tanh", embed_scale=128**0.5, embed_scale_rounds=True, attention_scale=0.2,
        qk_norm=True, window=100, windowed=(True, True, False), local_rope=Rope(1e2), rope_scaling=LinearRope(8.0),
    ),
}  # fmt: skip
FEATURES = {
    "granite": ("EMBED_SCALE", "PRODUCT_SCALE"), "olmo2": (), "phi3": ("ROPE_SCALE",),
    "cohere2": ("PRODUCT_SCALE", "LAYERNORM"), "starcoder2": ("GELU_MUL", "LAYERNORM"),
    "gemma2": ("GELU_MUL", "NORM_OFFSET", "EMBED_SCALE", "PRODUCT_CAP", "ATTENTION_CAP"),
    "gemma3": ("GELU_MUL", "NORM_OFFSET", "EMBED_SCALE", "WINDOW"),
}  # fmt: skip
SPECS |= {
    "mistral": DecoderSpec("mistral", "mistral", 128, 256, 2, 4, 2, 64, 520, 1e5, 1e-5, 512, window=37),
    "ministral": DecoderSpec(
        "ministral", "ministral", 128, 256, 2, 4, 1, 128, 520, 1e5, 1e-5, 512, window=101, windowed=(False, True)
    ),
}
FEATURES |= {"mistral": ("WINDOW",), "ministral": ("WINDOW",)}
GEMMA4 = DecoderSpec(
    "gemma4", "gemma4_text", 128, 256, 2, 4, 2, 64, 520, 1e6, 1e-6, 512, tied_head=True, norms="around",
    activation="gelu_tanh", embed_scale=128**0.5, embed_scale_rounds=True, attention_scale=1.0, logits_cap=2.0,
    qk_norm=True, v_norm=True, layer_scalar=True, window=100, windowed=(True, False), local_rope=Rope(1e2),
    rope_scaling=ProportionalRope(0.25), full_head_dim=512, full_kv_heads=1, full_k_is_v=True,
)  # fmt: skip
OF_GEMMA4 = ("GELU_MUL", "EMBED_SCALE", "PRODUCT_CAP", "WINDOW", "ADD_BY", "NORM_PLAIN")
SPECS |= {"gemma4": GEMMA4, "gemma4-values": replace(GEMMA4, full_head_dim=128, full_kv_heads=2, full_k_is_v=False)}
FEATURES |= {"gemma4": (*OF_GEMMA4, "LONG_HEADS"), "gemma4-values": OF_GEMMA4}
WORKS = [(name, dtype, choice) for name in SPECS for dtype in (DType.BF16, DType.F32) for choice in (0, 1)]
ALWAYS = ("gemma4-values", DType.BF16, 0)
"""An attention to older rows whose new value is normed before."""


@pytest.mark.parametrize(("name", "dtype", "choice"), dict.fromkeys([*sample(WORKS, 3), ALWAYS]))
def test_a_family_s_kernel_computes_what_the_oracle_computes(name: str, dtype: DType, choice: int) -> None:
    spec, gpu = SPECS[name], EmulatedGpu()
    target = replace(TARGETS["h100"], num_sms=gpu.num_sms)
    space = make_space(Workload(name, spec, target, dtype.name.lower(), CONTEXT))
    config = replace(space.to_config(space.known_good()[choice]), threads_per_block=THREADS)
    config = replace(config, tiling={**config.tiling, "warps": {"matrix": 2, "chunk": 1}})
    program = lower(decode_step(spec, CONTEXT, dtype), config, target)
    assert validate(program, strict=True).ok and variant_of(program).features == FEATURES[name]
    weights = random_weights(spec, 1, TORCH_DTYPES[dtype])
    judge = Judge(OracleWeights(spec, weights, TORCH_DTYPES[dtype]), dtype, CONTEXT, default_positions(CONTEXT), 1)
    with emulated_session(gpu, program, spec, weights) as session, torch.no_grad():
        verdict = judge.examine(session).verdict
    assert verdict.error <= verdict.bound / 2, verdict
