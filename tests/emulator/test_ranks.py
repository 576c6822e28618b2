"""Several ranks on the kernel's own sources: late pushes, skewed starts, launch after launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from effort import LONG, pairs, sample
from emulator.gpu import EmulatedGpu, build_variant
from emulator.ranks import Ranks

from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.fusion import COMBINE
from flywheel.lowering.lower import lower
from flywheel.models.oracle import EagerDecoder
from flywheel.models.rope import LinearRope, Rope
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.abi import InstructionFlag
from flywheel.vm.pack import pack_ranks

SPEC = DecoderSpec("tiny", "llama", 64, 128, 2, 8, 4, 16, 200, 1e4, 1e-5, 64)
GEMMA: Mapping[str, Any] = {
    "tied_head": True, "norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh", "embed_scale": 8.0,
    "embed_scale_rounds": True, "attention_scale": 0.2, "window": 3, "windowed": (True, False),
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tied_head": True}, "mistral": {}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True},
    "phi3": {"rotary_dim": 8},
    "smollm3": {"turned": (True, False), "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "cohere2": {"norm": "layer", "norms": "shared", "logits_scale": 0.5},
    "starcoder2": {
        "norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu_tanh", "qkv_bias": True, "o_bias": True,
        "mlp_bias": True,
    },
    "ministral": {"window": 3},
    "glm4": {"rotary_dim": 8, "norms": "around", "qkv_bias": True},
    "granite": {"embed_scale": 6.0, "residual_scale": 0.22, "attention_scale": 0.1, "logits_scale": 0.125},
    "gemma2": {**GEMMA, "attention_cap": 2.0, "logits_cap": 2.0},
    "gemma3_text": {**GEMMA, "qk_norm": True, "local_rope": Rope(1e2), "rope_scaling": LinearRope(8.0)},
}  # fmt: skip
OFTEN_ELSEWHERE = ("granite", "gemma3_text")
"""What their kernels have and those of other rows have not, one GPU runs too; to compile each takes seconds."""
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("attn_combine", "o_proj", "attn_add"),
    ("mlp_norm", "gate_proj", "up_proj", "silu_mul", "gelu_mul"), ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
LAUNCHES, DTYPE, TOLERANCE = 4, DType.BF16, 0.03


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    monkeypatch.setattr("flywheel.vm.gpu.weights.compile_variant", build_variant)
    return EmulatedGpu(num_sms=2, limit_s=60.0)


def lowered(
    spec: DecoderSpec, ranks: int, batch: int, by_data: bool, columns: int = 16, fused: Any = FUSED
) -> MegakernelProgram:
    target = replace(TARGETS["h100"], name="here", num_sms=2)
    config = ScheduleConfig(
        {"attention": {"kv_block": 16}, "gemv": {"N_tile": columns}, "hand_off": {"data": int(by_data)},
         "stream": {"chunk_bytes": 4096, "inflight_bytes": 8192}},
        page_allocation="none", threads_per_block=128, smem_bytes_per_block=96 * 1024,
    )  # fmt: skip
    graph = shared_step(spec, 16, DTYPE, batch, ranks=ranks)
    there = {op.name for block in graph.blocks for op in block.ops} | {COMBINE}
    there -= {"attn_add", "mlp_add"} if spec.norms == "around" else set()  # a norm is between
    own = [[name for name in names if name in there] for names in fused]
    return lower(graph, replace(config, fusion_grouping=own), target)


def check(
    gpu: EmulatedGpu, spec: DecoderSpec, ranks: int, batch: int, by_data: bool, ties: bool = False, **how: Any
) -> None:
    """With `ties`, each row of the head's second half is one of the first half."""
    weights = dict(random_weights(spec, 0, TORCH_DTYPES[DTYPE]))
    if ties:
        half = weights["lm_head.weight"][: spec.vocab // 2]
        weights["lm_head.weight"] = torch.cat([half, half])
    tokens = [[(7 * launch + 3 * row + 1) % spec.vocab for row in range(batch)] for launch in range(LAUNCHES)]
    with Ranks(gpu, lowered(spec, ranks, batch, by_data, **how), weights, DTYPE) as loaded:
        logits, chosen = loaded.launch(tokens)
    assert (logits.view(np.uint32) == logits[:, :1].view(np.uint32)).all()
    assert (chosen == logits.reshape(LAUNCHES, ranks, batch, -1).argmax(-1)).all()
    for row in range(batch):
        oracle = EagerDecoder(spec, weights, torch.float32, 16)
        for launch in range(LAUNCHES):
            wanted = oracle.step(tokens[launch][row], launch)
            got = torch.from_numpy(logits[launch, 0].reshape(batch, -1)[row])
            assert float((got - wanted).abs().max()) <= TOLERANCE * float(wanted.abs().max()), (row, launch)


@pytest.mark.parametrize(
    ("family", "batch"),
    [pytest.param(*each, marks=LONG if each[0] in OFTEN_ELSEWHERE else ()) for each in pairs(FAMILIES, [1, 2])],
)
def test_two_ranks_make_the_oracles_logits_and_the_same_bits(gpu: EmulatedGpu, family: str, batch: int) -> None:
    gpu.seed = 1 + list(FAMILIES).index(family)
    check(gpu, replace(SPEC, family=family, **FAMILIES[family]), 2, batch, by_data=True)


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_ranks_whose_own_hand_offs_go_by_counters_make_the_oracles_logits(gpu: EmulatedGpu, seed: int) -> None:
    gpu.seed = seed
    check(gpu, replace(SPEC, family="mistral"), 2, 1, by_data=False)


@pytest.mark.parametrize("ranks", [4, pytest.param(8, marks=LONG)])
def test_more_ranks_make_the_oracles_logits(gpu: EmulatedGpu, ranks: int) -> None:
    check(gpu, replace(SPEC, family="qwen3", **FAMILIES["qwen3"]), ranks, 1, by_data=True)


@pytest.mark.parametrize("batch", [1, 2])
def test_logits_whose_rows_are_no_multiple_of_sixteen_bytes_are_the_oracles(
    gpu: EmulatedGpu, batch: int
) -> None:
    gpu.seed = 16 * batch
    check(gpu, replace(SPEC, family="mistral", vocab=203), 2, batch, by_data=True, columns=48)


@pytest.mark.parametrize(("ranks", "batch"), sample([(2, 1), (2, 2), (4, 1), (4, 2)]))
def test_products_that_add_the_shards_of_all_ranks_make_the_oracles_logits(
    gpu: EmulatedGpu, ranks: int, batch: int
) -> None:
    gpu.seed = 11 * ranks + batch
    spec = replace(SPEC, family="mistral")
    for packed in pack_ranks(lowered(spec, ranks, batch, by_data=True, columns=32)):
        adds = packed.instructions["flags"] & InstructionFlag.ADDS
        assert (adds != 0).sum() == 2 * 2 * spec.n_layers  # two tiles of o_proj and of down_proj in each layer
    check(gpu, spec, ranks, batch, by_data=True, columns=32)


@pytest.mark.parametrize(("ranks", "batch"), [(2, 2), (4, 1)])
def test_pushes_of_what_no_product_stores_make_the_oracles_logits(gpu: EmulatedGpu, ranks: int, batch: int) -> None:
    gpu.seed = ranks
    check(gpu, replace(SPEC, family="mistral"), ranks, batch, by_data=True, fused=())


@pytest.mark.parametrize(("ranks", "batch"), [(2, 2), (4, 1)])
def test_of_equal_logits_of_several_ranks_the_first_is_chosen(gpu: EmulatedGpu, ranks: int, batch: int) -> None:
    gpu.seed = 7 + ranks
    check(gpu, replace(SPEC, family="mistral", vocab=192), ranks, batch, by_data=True, ties=True)
