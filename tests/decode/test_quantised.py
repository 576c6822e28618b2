"""Programs of quantised models give what their weights mean, in every format, family and batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from damage import FAMILIES, TARGET, spec_of
from effort import pairs

from flywheel.decode.reference import ReferenceSession
from flywheel.ir import DType, validate
from flywheel.judge.verdicts import default_positions, make_oracle, verify
from flywheel.lowering.lower import lower
from flywheel.models.quantise import quantised, scales_of
from flywheel.models.rope import Rope
from flywheel.models.weights import random_weights
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.tensors import TORCH_DTYPES

OWN: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "phi3": {"rotary_dim": 8},
    "granite": {"embed_scale": 6.0, "residual_scale": 0.22, "attention_scale": 0.1, "logits_scale": 0.125},
    "gemma3_text": {
        "norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh", "embed_scale": 96**0.5, "qk_norm": True,
        "embed_scale_rounds": True, "tied_head": True, "window": 20, "windowed": (True, False), "local_rope": Rope(1e2),
    },
    "starcoder2": {"norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu_tanh", "mlp_bias": True},
    "gemma4_text": {
        "norms": "around", "activation": "gelu_tanh", "qk_norm": True, "v_norm": True, "layer_scalar": True,
        "tied_head": True, "window": 20, "windowed": (True, False), "full_head_dim": 64, "full_kv_heads": 1,
        "full_k_is_v": True,
    },
}
"""Family -> its own fields."""
FORMATS = (
    "fp8", "fp8-tensor", "int8", "int8-zeros", "int4-g32", "int4-g32-zeros", "int4-row", "int4-g32-f32",
    "int4-g32,lm_head=int8", "fp8,down_proj=int4-g32,q_proj=bf16",
)  # fmt: skip


def workload(family: str, text: str, batch: int = 1, dtype: str = "bf16", context: int = 40) -> Workload:
    stored = text if dtype == "bf16" else text.replace("bf16", dtype)
    spec = replace(spec_of("llama", 2), **{"family": family, "tied_head": family == "qwen3"} | OWN[family])
    return Workload("small", spec, TARGET, dtype, context, batch, stored)


def session(work: Workload, choice: int = 0) -> tuple[ReferenceSession, dict[str, object]]:
    space = make_space(work)
    good = space.known_good()
    program = lower(work.graph, space.to_config(good[choice % len(good)]), work.target)
    assert validate(program, strict=True).ok
    dtype = next(each for each in DType if each.name.lower() == work.dtype)
    weights = quantised(work.spec, random_weights(work.spec, 0, TORCH_DTYPES[dtype]), work.formats, dtype)
    return ReferenceSession(program, work.spec, weights), weights


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("text", "family"), pairs(FORMATS, OWN))
def test_a_quantised_program_is_what_its_weights_mean(text: str, family: str, batch: int) -> None:
    made, weights = session(workload(family, text, batch), FORMATS.index(text))
    verdict = verify(made, weights, default_positions(made.context))
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("text", ["fp8", "int8", "int4-g32-zeros"])
def test_every_compute_type_takes_quantised_weights(text: str, dtype: str) -> None:
    made, weights = session(workload("llama", text, dtype=dtype))
    assert verify(made, weights, default_positions(made.context)).passed


def test_blocks_of_fp8_are_what_they_mean() -> None:
    spec = replace(spec_of("llama", 1), hidden=256, intermediate=384, n_heads=16, n_kv_heads=8)
    work = Workload("blocks", spec, TARGET, "bf16", 24, 1, "fp8-block")
    made, weights = session(work)
    assert verify(made, weights, default_positions(24)).passed


@pytest.mark.parametrize("text", ["int8", "int4-g32"])
def test_a_wrong_scale_is_found(text: str) -> None:
    work = workload("llama", text)
    made, weights = session(work)
    wrong = dict(weights)
    key = scales_of("model.layers.1.mlp.down_proj.weight")
    wrong[key] = wrong[key].clone()
    wrong[key][17] *= 2
    assert not verify(made, wrong, default_positions(40)).passed


def test_a_quantised_model_decodes_token_for_token_like_its_oracle() -> None:
    made, weights = session(workload("qwen2", "int4-g32", dtype="f32"))
    oracle = make_oracle(made, weights)
    token = 7
    for position in range(12):
        step, logits = made.step(token, position), oracle.step(token, position)
        assert step.token == int(logits.argmax())
        token = step.token
