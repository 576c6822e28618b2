"""Sequences at positions of their own on a GPU: right, and each what it is alone. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from chorus import alone, sing, voices

from flywheel.decode.choices import choose
from flywheel.decode.cuda import CudaModel
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.judge.verdicts import verify
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import Sampling
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu

pytestmark = pytest.mark.gpu

SPEC = DecoderSpec("small", "llama", 256, 384, 2, 4, 2, 64, 520, 1e5, 1e-5, 512)
CONTEXT = 256
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
CONFIGS = {
    "one block": ScheduleConfig(),
    "blocks, by counters": ScheduleConfig({"attention": {"kv_block": 64}, "gemv": {"N_tile": 48}}, FUSED),
    "blocks, by data": ScheduleConfig(
        {"attention": {"kv_block": 64}, "hand_off": {"data": 1}}, FUSED, page_allocation="none"
    ),
}


def model_of(gpu: Gpu, dtype: DType, batch: int) -> CudaModel:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[dtype], "cuda")
    return CudaModel(gpu, SPEC, dtype, CONTEXT, weights, batch)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("dtype", "batch"), [(DType.BF16, 8), (DType.F32, 3)])
def test_rows_at_positions_of_their_own_are_right_and_each_what_it_is_alone(
    gpu: Gpu, config: str, dtype: DType, batch: int
) -> None:
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    program = lower(
        decode_step(SPEC, CONTEXT, dtype, batch), CONFIGS[config], replace(alike, name="few", num_sms=12)
    )
    with model_of(gpu, dtype, batch) as model, model.load(program) as session:
        verdict = verify(session, model.weights, (0, 31, 63, 64, 65, 100, 254, 255))
        assert verdict.passed, verdict.where
        every = voices(3 * batch, SPEC.vocab, CONTEXT, 7)
        sequences = session.sequences()
        together = sing(sequences, every)
        sequences.close()
        for number in range(0, len(every), 5):
            assert together[number] == alone(session.sequences, every[number], number % batch)
        assert len({tuple(heard) for heard in together}) > batch


def test_caches_that_grow_in_granules_give_the_same_tokens_and_their_memory_back(gpu: Gpu) -> None:
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    config = CONFIGS["blocks, by data"]
    program = lower(decode_step(SPEC, CONTEXT, DType.BF16, 4), config, replace(alike, name="few", num_sms=12))
    every = voices(12, SPEC.vocab, CONTEXT, 7)
    with model_of(gpu, DType.BF16, 4) as model, model.load(program) as session:
        sequences = session.sequences()
        expected = sing(sequences, every)
        sequences.close()
    granules = gpu.granules()
    assert granules is not None and granules.nbytes % 2**16 == 0
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.BF16], "cuda")
    with (
        CudaModel(gpu, SPEC, DType.BF16, CONTEXT, weights, 4, granules) as model,
        model.load(program) as session,
    ):
        assert session.caches.held_bytes == 0
        sequences = session.sequences()
        assert sing(sequences, every) == expected
        sequences.close()
        held, free = session.caches.held_bytes, gpu.free_bytes()
        assert held > 0
        session.caches.give_back()
        assert gpu.free_bytes() == free + held
        verdict = verify(session, model.weights, (0, 63, 64, 255))
        assert verdict.passed, verdict.where


@pytest.mark.parametrize(
    "sampling", [Sampling(1.0), Sampling(0.7, top_k=12), Sampling(1.3, top_p=0.8), Sampling(1.0, min_p=0.1)], ids=str
)
def test_draws_on_the_gpu_follow_the_shares(gpu: Gpu, sampling: Sampling) -> None:
    draws, vocab = 4000, 40
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)).mul(2.0)
    seen = torch.zeros(vocab, dtype=torch.bool)
    # The shares by their definition, on the CPU and in float64.
    scores = logits.double() / sampling.temperature
    if sampling.top_k:
        scores[scores < scores.topk(sampling.top_k).values[-1]] = -torch.inf
    shares = scores.softmax(0)
    shares[shares < sampling.min_p * shares.max()] = 0.0
    order = shares.argsort(descending=True)
    shares[order[shares[order].cumsum(0) - shares[order] >= sampling.top_p * shares.sum()]] = 0.0
    expected = shares / shares.sum() * draws
    given, nothing = logits.cuda(), seen.cuda()
    drawn = torch.stack([choose(given, nothing, sampling, place) for place in range(draws)]).bincount(minlength=vocab)
    kept = expected > 5
    found = drawn.cpu().double()
    assert found[expected == 0].sum() == 0
    distance = float(((found - expected)[kept].square() / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert distance < freedom + 4.5 * (2 * freedom) ** 0.5
