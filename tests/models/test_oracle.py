from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from flywheel.errors import UsageError, WeightsError
from flywheel.models.oracle import EagerDecoder, rope_table
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights

LLAMA = DecoderSpec("tiny", "llama", 64, 96, 2, 4, 2, 16, 120, 1e4, 1e-5, 1024)
SCALED = dataclasses.replace(
    LLAMA, tied_head=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, original_max_position=64), name="tiny-scaled"
)
QWEN2 = dataclasses.replace(LLAMA, family="qwen2", qkv_bias=True, name="tiny-qwen2")
QWEN3 = dataclasses.replace(LLAMA, family="qwen3", head_dim=32, qk_norm=True, name="tiny-qwen3")
SPECS = (LLAMA, SCALED, QWEN2, QWEN3)
IDS = torch.randint(0, LLAMA.vocab, (300,), generator=torch.Generator().manual_seed(2)).tolist()

each_spec = pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])


def decoder(spec: DecoderSpec, dtype: torch.dtype = torch.float32, context: int = 320) -> EagerDecoder:
    return EagerDecoder(spec, random_weights(spec, seed=3, dtype=torch.float32), dtype, context)


@each_spec
def test_prefill_gives_what_steps_give(spec: DecoderSpec) -> None:
    # More than one chunk of tokens.
    stepped, filled = decoder(spec, torch.float64), decoder(spec, torch.float64)
    for position, token in enumerate(IDS):
        last = stepped.step(token, position)
    torch.testing.assert_close(filled.prefill(IDS), last, atol=1e-9, rtol=0.0)
    assert filled.length == stepped.length == len(IDS)


@each_spec
@pytest.mark.parametrize(
    ("dtype", "bound"),
    [(torch.float32, 1e-4), (torch.float16, 0.03), (torch.bfloat16, 0.2)],
    ids=["f32", "f16", "bf16"],
)
def test_every_dtype_stays_near_float64(spec: DecoderSpec, dtype: torch.dtype, bound: float) -> None:
    weights = random_weights(spec, seed=3, dtype=dtype)
    exact = EagerDecoder(spec, weights, torch.float64, 64).prefill(IDS[:50])
    logits = EagerDecoder(spec, weights, dtype, 64).prefill(IDS[:50])
    assert (logits.dtype, exact.dtype) == (torch.float32, torch.float64)
    assert 0 < (logits - exact).abs().max() < bound


@each_spec
def test_every_weight_moves_the_logits(spec: DecoderSpec) -> None:
    weights = random_weights(spec, seed=3, dtype=torch.float32)
    logits = EagerDecoder(spec, weights, torch.float64, 32).prefill(IDS[:20])
    generator = torch.Generator().manual_seed(1)
    for key, weight in weights.items():
        noise = torch.randn(weight.shape, generator=generator) * weight.std()
        changed = EagerDecoder(spec, {**weights, key: weight + noise}, torch.float64, 32).prefill(IDS[:20])
        # A bias of the keys adds the same to all scores of a query, but for RoPE.
        assert (changed - logits).abs().max() > (1e-6 if key.endswith("k_proj.bias") else 1e-3), key


def test_logits_depend_on_every_cached_position() -> None:
    own = decoder(LLAMA)
    own.prefill(IDS[:40])
    before = own.step(5, 40)
    for position in (0, 17, 39):
        layers = [(k[:40].clone(), v[:40].clone()) for k, v in own.read_cache()]
        layers[0][1][position] += 1.0
        other = decoder(LLAMA)
        other.write_cache(layers)
        assert (other.step(5, 40) - before).abs().max() > 1e-3


def test_a_cache_moves_between_decoders() -> None:
    first, second = decoder(QWEN3), decoder(QWEN3)
    first.prefill(IDS[:30])
    second.prefill(IDS[100:150])
    second.write_cache(first.read_cache())
    assert second.length == 30
    torch.testing.assert_close(second.step(7, 30), first.step(7, 30), atol=0.0, rtol=0.0)


def test_stepping_back_forgets_what_followed() -> None:
    own = decoder(SCALED)
    own.prefill(IDS[:10])
    once = own.step(3, 10)
    own.prefill(IDS[20:40])
    torch.testing.assert_close(own.step(3, 10), once, atol=0.0, rtol=0.0)
    assert own.length == 11


def test_reset_starts_another_sequence() -> None:
    own = decoder(LLAMA)
    fresh = own.step(9, 0)
    own.prefill(IDS[:10])
    own.reset()
    assert own.length == 0
    torch.testing.assert_close(own.step(9, 0), fresh, atol=0.0, rtol=0.0)


def test_weights_of_the_right_dtype_are_shared() -> None:
    weights = random_weights(LLAMA, seed=3, dtype=torch.float32)
    own = EagerDecoder(LLAMA, weights, torch.float32, 8)
    before = own.step(1, 0)
    weights["model.norm.weight"].mul_(2.0)
    torch.testing.assert_close(own.step(1, 0), 2 * before)


def test_rope_turns_low_frequencies_slower_when_scaled() -> None:
    plain, scaled = (rope_table(spec.rope_of(0), spec, False)[0] for spec in (LLAMA, SCALED))
    turns = 64 * plain / (2 * math.pi)
    torch.testing.assert_close(plain, 1e4 ** -(torch.arange(8) / 8))
    assert torch.equal(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns >= 1) & (turns <= 4)
    assert between.any()
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


@pytest.mark.parametrize("position", [-1, 4, 320])
def test_a_position_behind_an_uncached_one_is_refused(position: int) -> None:
    own = decoder(LLAMA)
    own.prefill(IDS[:3])
    with pytest.raises(UsageError, match=rf"^tiny: position {position} is not in 0\.\.3"):
        own.step(1, position)


def test_the_context_ends() -> None:
    own = decoder(LLAMA, context=4)
    own.prefill(IDS[:4])
    with pytest.raises(UsageError, match=r"^tiny: 1 tokens at position 4; .* within context 4$"):
        own.step(1, 4)
    with pytest.raises(UsageError, match=r"^tiny: 0 tokens"):
        own.prefill([])


@pytest.mark.parametrize("token", [-1, 120])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(UsageError, match=rf"^tiny: token {token} is not in 0\.\.119$"):
        decoder(LLAMA).prefill([1, token])


@pytest.mark.parametrize("context", [0, 1025])
def test_a_context_beyond_the_model_is_refused(context: int) -> None:
    with pytest.raises(UsageError, match=rf"^tiny: context {context} is not in 1\.\.1024$"):
        decoder(LLAMA, context=context)


def test_a_missing_or_misshapen_weight_is_refused_by_name() -> None:
    weights = random_weights(LLAMA, seed=3)
    for changed, fact in (({}, "is missing"), ({"model.norm.weight": torch.ones(63)}, r"is \[63\]")):
        broken = {key: weight for key, weight in weights.items() if key != "model.norm.weight"} | changed
        with pytest.raises(WeightsError, match=rf"^tiny: tensor 'model.norm.weight' {fact}; wanted: \[64\]$"):
            EagerDecoder(LLAMA, broken, torch.float32, 8)


def test_a_cache_of_another_shape_is_refused_and_changes_nothing() -> None:
    own = decoder(LLAMA, context=16)
    own.prefill(IDS[:4])
    k, v = (torch.zeros(5, 2, 16) for _ in "kv")
    for layers, fact in (
        ([(k, v)], "a cache of 1 layers and 5 positions"),
        ([(k, v), (k, v[:4])], r"the cache of layer 1 is \[4, 2, 16\]; wanted: \[5, 2, 16\]"),
        ([(torch.zeros(17, 2, 16),) * 2] * 2, "a cache of 2 layers and 17 positions"),
    ):
        with pytest.raises(UsageError, match=f"^tiny: {fact}"):
            own.write_cache(layers)
    assert own.length == 4
    assert own.read_cache()[0][0].abs().max() > 0


@pytest.mark.gpu
@each_spec
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)], ids=["f32", "bf16"])
def test_a_gpu_gives_the_numbers_of_the_cpu(spec: DecoderSpec, dtype: torch.dtype, bound: float) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    weights = random_weights(spec, seed=3, dtype=dtype)
    on_gpu = random_weights(spec, seed=3, dtype=dtype, device="cuda")
    assert all(torch.equal(tensor.cpu(), weights[key]) for key, tensor in on_gpu.items())
    wanted, got = EagerDecoder(spec, weights, dtype, 64), EagerDecoder(spec, on_gpu, dtype, 64, "cuda")
    wanted.prefill(IDS[:50])
    got.prefill(IDS[:50])
    assert (got.step(7, 50).cpu() - wanted.step(7, 50)).abs().max() < bound
