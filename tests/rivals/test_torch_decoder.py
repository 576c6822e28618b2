from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import pytest
import torch
from captured import Capturing
from effort import pairs, sample
from interpreted import interpret
from torch.utils._python_dispatch import TorchDispatchMode

from flywheel.decode.session import Step
from flywheel.errors import UsageError
from flywheel.ir import DType, InstructionKind
from flywheel.judge.verdicts import Judge, default_positions, judge_free
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import DTYPES
from flywheel.models.families import layer_weight_shapes
from flywheel.models.footprint import bytes_per_token
from flywheel.models.formats import WeightFormat, parse_formats
from flywheel.models.oracle import EagerDecoder, OracleWeights
from flywheel.models.quantise import quantise, quantised
from flywheel.models.rope import LinearRope, LongRope, ProportionalRope, Rope, RopeScaling, YarnRope
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.rivals.lineup import RIVALS, Form, refusal, usual_rivals
from flywheel.rivals.products import Coded, multiply
from flywheel.rivals.torch_decoder import BoundBlock, BoundCall, TorchDecoder, bytes_read, fuse, steps_of
from flywheel.tensors import TORCH_DTYPES

CONTEXT = 48
LLAMA = DecoderSpec("llama", "llama", 64, 96, 2, 4, 2, 16, 120, 1e4, 1e-5, 128)
GEMMA: dict[str, Any] = {
    "tied_head": True, "norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh", "embed_scale": 8.0,
    "embed_scale_rounds": True, "attention_scale": 0.2, "window": 7, "windowed": (True, False),
}  # fmt: skip
SPECS = (
    LLAMA,
    dataclasses.replace(LLAMA, name="scaled", tied_head=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
    dataclasses.replace(LLAMA, name="mistral", family="mistral", n_kv_heads=4),
    dataclasses.replace(LLAMA, name="qwen2", family="qwen2", qkv_bias=True),
    dataclasses.replace(LLAMA, name="qwen3", family="qwen3", head_dim=32, qk_norm=True, tied_head=True),
    dataclasses.replace(
        LLAMA, name="smollm3", family="smollm3", turned=(True, False), qkv_bias=True, o_bias=True, mlp_bias=True
    ),
    dataclasses.replace(
        LLAMA, name="phi3", family="phi3", rope_scaling=LongRope((1.0,) * 6, (1.5,) * 6, 20, 1.25), rotary_dim=12
    ),
    dataclasses.replace(LLAMA, name="cohere2", family="cohere2", norm="layer", norms="shared", logits_scale=0.5),
    dataclasses.replace(
        LLAMA, name="starcoder2", family="starcoder2", norm="layer", norm_bias=True, gated=False, activation="gelu_tanh"
    ),
    dataclasses.replace(LLAMA, name="granite4", family="granitemoehybrid", turned=(False,), residual_scale=0.5),
    dataclasses.replace(LLAMA, name="window", family="ministral", window=7, windowed=(True, False)),
    dataclasses.replace(LLAMA, name="glm4", family="glm4", rotary_dim=8, norms="around", qkv_bias=True),
    dataclasses.replace(
        LLAMA, name="granite", family="granite", embed_scale=6.0, residual_scale=0.22, attention_scale=0.1,
        logits_scale=0.125,
    ),
    dataclasses.replace(LLAMA, name="olmo2", family="olmo2", norms="behind", qk_norm=True, wide_qk_norm=True),
    dataclasses.replace(
        LLAMA, name="olmo3", family="olmo3", norms="behind", qk_norm=True, wide_qk_norm=True, window=7,
        windowed=(True, False), local_rope=Rope(3e2), rope_scaling=YarnRope(4.0, 16, 1.25),
    ),
    dataclasses.replace(LLAMA, **GEMMA, name="gemma2", family="gemma2", attention_cap=2.0, logits_cap=2.0),
    dataclasses.replace(
        LLAMA, **GEMMA, name="gemma3", family="gemma3_text", qk_norm=True, local_rope=Rope(1e2),
        rope_scaling=LinearRope(8.0),
    ),
    dataclasses.replace(
        LLAMA, **GEMMA | {"norm_offset": 0.0, "attention_scale": 0.5}, name="gemma4", family="gemma4_text",
        qk_norm=True, v_norm=True, layer_scalar=True, logits_cap=2.0, local_rope=Rope(1e2),
        rope_scaling=ProportionalRope(0.25), full_head_dim=32, full_kv_heads=1, full_k_is_v=True,
    ),
    dataclasses.replace(LLAMA, name="odd", hidden=72, intermediate=104, n_heads=3, n_kv_heads=1, head_dim=24),
)

each_spec = pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])


def pair(
    spec: DecoderSpec, dtype: DType = DType.F32, inline: bool = False, batch: int = 1
) -> tuple[TorchDecoder, EagerDecoder]:
    weights = random_weights(spec, 3, TORCH_DTYPES[dtype])
    oracle = EagerDecoder(spec, weights, TORCH_DTYPES[dtype], CONTEXT)
    return TorchDecoder(spec, fuse(spec, weights), dtype, CONTEXT, inline, batch), oracle


def held(block: BoundBlock, operation: str) -> BoundCall:
    """The call that has an operation, with its weights."""
    (found,) = (each for each in block if operation in each.call.names)
    return found


def judge_of(spec: DecoderSpec, dtype: DType, positions: Sequence[int], batch: int = 1, seed: int = 5) -> Judge:
    """Of the weights of `pair`."""
    own = OracleWeights(spec, random_weights(spec, 3, TORCH_DTYPES[dtype]), TORCH_DTYPES[dtype])
    return Judge(own, dtype, CONTEXT, positions, batch, seed)


def last_steps(decoder: TorchDecoder, judge: Judge) -> list[Step]:
    for row in range(judge.batch):
        decoder.write_cache(judge.layer_caches(-1, row), row)
    return decoder.step_rows(judge.tokens[-1].tolist(), judge.positions[-1])


@pytest.mark.parametrize("text", ["int8", "int4-row,lm_head=int8"])
def test_a_rival_multiplies_by_what_quantised_weights_mean(text: str) -> None:
    spec = SPECS[1]  # with a tied head
    weights = quantised(spec, random_weights(spec, 3, torch.float32), parse_formats(text, "f32"), DType.F32)
    judge = Judge(OracleWeights(spec, weights, torch.float32), DType.F32, CONTEXT, (0, 24, 47), 1, 5)
    decoder = TorchDecoder(spec, fuse(spec, weights), DType.F32, CONTEXT, False, 1)
    assert judge_free(last_steps(decoder, judge), judge).passed
    plain = TorchDecoder(spec, fuse(spec, random_weights(spec, 3, torch.float32)), DType.F32, CONTEXT, False, 1)
    assert not judge_free(last_steps(plain, judge), judge).passed


FORMS: list[tuple[Form, str, str]] = [
    ("codes", "int8", "bf16"), ("codes", "int8-tensor", "f32"), ("codes", "int8-g32-zeros", "bf16"),
    ("codes", "fp8", "f16"), ("codes", "fp8-block", "bf16"), ("codes", "int8,lm_head=int8", "bf16"),
    ("tiles", "int4-g32", "bf16"), ("tiles", "int4-g32-zeros", "bf16"),
    ("words", "int4,lm_head=int4", "bf16"), ("words", "int4-zeros", "f16"),
]  # fmt: skip


def coded(case: tuple[Form, str, str], batch: int) -> tuple[TorchDecoder, Judge]:
    """A rival that multiplies codes, and who judges it."""
    form, text, name = case
    spec, dtype = dataclasses.replace(SPECS[3], hidden=128, head_dim=32, intermediate=256), DTYPES[name]
    formats = parse_formats(text, name)
    assert formats.usual is not None
    rival = next(each for each in RIVALS.values() if each.form == form and each.codes is formats.usual.codes)
    if form == "words":
        interpret()
        spec = dataclasses.replace(spec, n_layers=1)  # the interpreter takes seconds
    assert refusal(rival, spec, formats, dtype) is None
    plain = random_weights(spec, 3, TORCH_DTYPES[dtype])
    weights = quantised(spec, plain, formats, dtype)
    judge = Judge(OracleWeights(spec, weights, TORCH_DTYPES[dtype]), dtype, CONTEXT, (0, 24, 47), batch, 5)
    fused = fuse(spec, weights, form)
    assert not isinstance(held(fused.layers[0], "q_proj").matrix, torch.Tensor)
    return TorchDecoder(spec, fused, dtype, CONTEXT, False, batch), judge


@pytest.mark.parametrize(("case", "batch"), pairs(FORMS, [1, 3]))
def test_a_rival_multiplies_the_same_codes(case: tuple[Form, str, str], batch: int) -> None:
    decoder, judge = coded(case, batch)
    verdict = judge_free(last_steps(decoder, judge), judge)
    assert verdict.passed, verdict.reason


@pytest.mark.parametrize(("case", "batch"), sample(zip(FORMS, [1, 3] * 5, strict=True), 7))
def test_a_step_of_codes_is_one_graph_to_a_compiler(case: tuple[Form, str, str], batch: int) -> None:
    decoder, judge = coded(case, batch)
    last_steps(decoder, judge)
    torch._dynamo.reset()
    with torch.no_grad():
        forward = torch.compile(decoder.forward, backend="aot_eager", fullgraph=True, dynamic=False)
        assert judge_free(steps_of(*forward(judge.positions[-1])), judge).passed


@pytest.mark.parametrize("codes", [DType.F8E4M3, DType.I8])
def test_sums_of_codes_that_float16_does_not_hold_are_products_all_the_same(codes: DType) -> None:
    matrix, x = torch.full((8, 2048), 0.01), torch.full((1, 2048), 8.0, dtype=torch.float16)
    product = multiply(x, Coded(*quantise(matrix, WeightFormat(codes, 1, None), DType.F16)))
    torch.testing.assert_close(product.float(), x.float() @ matrix.T, rtol=0.01, atol=0.0)


def test_tiles_of_another_order_of_nibbles_fail_the_verdict() -> None:
    spec, formats = SPECS[0], parse_formats("int4-g32", "bf16")
    weights = quantised(spec, random_weights(spec, 3), formats, DType.BF16)
    judge = Judge(OracleWeights(spec, weights, torch.bfloat16), DType.BF16, CONTEXT, (47,), 1, 5)
    swapped = {key: each << 4 | each >> 4 if key.endswith("codes") else each for key, each in weights.items()}
    right = TorchDecoder(spec, fuse(spec, weights, "tiles"), DType.BF16, CONTEXT)
    assert judge_free(last_steps(right, judge), judge).passed
    decoder = TorchDecoder(spec, fuse(spec, swapped, "tiles"), DType.BF16, CONTEXT)
    assert not judge_free(last_steps(decoder, judge), judge).passed


@pytest.mark.parametrize(
    ("rival", "text", "name", "why"),
    [
        ("tinygemm", "int8", "bf16", "q_proj is int8; it multiplies int4"),
        ("tinygemm", "bf16", "bf16", "the weights are bf16; it multiplies int4"),
        ("tinygemm", "int4", "f16", "computes in f16; it computes in bf16"),
        ("tinygemm", "int4-row", "bf16", "q_proj is int4-row; it takes bf16 scales of groups of 32, 64, 128, 256"),
        ("tinygemm", "int4-g32-f32", "bf16", "q_proj is int4-g32-f32; it takes bf16 scales of groups"),
        ("compile-int8", "int8,lm_head=int4", "bf16", "lm_head is int4; it multiplies int8"),
        ("compile-int8", "int8,k_proj=int8-g64", "bf16", "q_proj, k_proj, v_proj are multiplied together, and their"),
        ("compile-fp8", "int8", "bf16", "q_proj is int8; it multiplies fp8"),
        ("triton", "int8", "bf16", "q_proj is int8; it multiplies int4"),
        ("triton", "int4", "f32", "computes in f32; it computes in bf16 and f16"),
        ("triton", "int4-row", "bf16", "q_proj is int4-row; it takes scales of groups of multiples of 128"),
        ("compile-triton", "int4,lm_head=int4-g64", "bf16", "lm_head is int4-g64; it takes scales of groups"),
        ("humming", "int4-f32", "bf16", "q_proj is int4-f32; it takes scales in bf16"),
    ],
)
def test_what_a_rival_does_not_multiply_it_refuses_by_name(rival: str, text: str, name: str, why: str) -> None:
    given = refusal(RIVALS[rival], LLAMA, parse_formats(text, name), DTYPES[name])
    assert given is not None
    assert given.startswith(why)


def test_without_its_package_a_rival_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    formats = parse_formats("int4", "bf16")
    monkeypatch.setattr("flywheel.rivals.lineup.find_spec", lambda name: name)
    assert [refusal(RIVALS[name], LLAMA, formats, DType.BF16) for name in ("triton", "humming")] == [None, None]
    monkeypatch.setattr("flywheel.rivals.lineup.find_spec", lambda name: None)
    assert [refusal(RIVALS[name], LLAMA, formats, DType.BF16) for name in ("triton", "humming", "tinygemm")] == [
        "triton is not installed; pip install triton", "humming is not installed; pip install humming-kernels", None,
    ]  # fmt: skip


@each_spec
def test_a_step_reads_the_bytes_of_the_weights_that_it_holds(spec: DecoderSpec) -> None:
    assert bytes_read(fuse(spec, random_weights(spec, 3))) == bytes_per_token(spec, DType.BF16)


@pytest.mark.parametrize("form", ["codes", "tiles", "words"])
def test_forms_read_their_codes_and_all_that_they_keep_beside_them(form: Form) -> None:
    spec = dataclasses.replace(SPECS[3], hidden=512, head_dim=128, intermediate=1024, vocab=128)
    formats = parse_formats("int4,lm_head=int4", "bf16")
    fused = fuse(spec, quantised(spec, random_weights(spec, 3), formats, DType.BF16), form)
    offsets = sum(size // 128 * 2 for size in matrix_sizes(spec)) if form == "tiles" else 0  # of every group, in bf16
    assert bytes_read(fused) == bytes_per_token(spec, DType.BF16, formats) + offsets


def matrix_sizes(spec: DecoderSpec) -> list[int]:
    """Elements of each matrix that a step multiplies."""
    layers = [prod(shape) for shape in layer_weight_shapes(spec).values() if len(shape) == 2]
    return [*(layers * spec.n_layers), spec.vocab * spec.hidden]


def test_the_usual_rivals_multiply_what_they_are_given() -> None:
    wanted = {"bf16": ["cublas", "compile"], "int8": ["compile-int8"], "fp8-block": ["compile-fp8"]}
    wanted["int4,lm_head=int4"] = ["tinygemm", "compile-tinygemm", "triton"]
    for text, names in wanted.items():
        formats = parse_formats(text, "bf16")
        rivals = usual_rivals(formats)
        assert [rival.name for rival in rivals] == names
        assert all(refusal(rival, CATALOG["llama3-8b"], formats, DType.BF16) is None for rival in rivals)


@each_spec
@pytest.mark.parametrize("inline", [False, True], ids=["library", "inline"])
@pytest.mark.parametrize("position", [1, 24, 47])
def test_logits_are_the_oracles_behind_filled_caches(spec: DecoderSpec, inline: bool, position: int) -> None:
    decoder, _ = pair(spec, inline=inline)
    judge = judge_of(spec, DType.F32, (position,))
    verdict = judge_free(last_steps(decoder, judge), judge)
    assert verdict.passed, verdict.reason


@each_spec
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
@pytest.mark.parametrize("inline", [False, True], ids=["library", "inline"])
def test_every_sequence_of_a_batch_is_its_own_oracles(spec: DecoderSpec, dtype: DType, inline: bool) -> None:
    decoder, _ = pair(spec, dtype, inline, batch=3)
    judge = judge_of(spec, dtype, default_positions(CONTEXT), 3)
    steps = last_steps(decoder, judge)
    verdict = judge_free(steps, judge)
    assert verdict.passed, verdict.reason
    assert 2 * verdict.error <= verdict.bound
    assert not judge_free([steps[1], steps[0], steps[2]], judge).passed
    assert not judge_free([*steps[:2], dataclasses.replace(steps[2], token=steps[2].token ^ 1)], judge).passed


@each_spec
def test_a_sequence_of_its_own_steps_is_the_oracles(spec: DecoderSpec) -> None:
    decoder, oracle = pair(spec)
    for position, token in enumerate((3, 79, 0, 3, 41, 119)):
        torch.testing.assert_close(
            decoder.step(token, position).logits, oracle.step(token, position), atol=1e-4, rtol=0.0
        )


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("inline", [False, True], ids=["library", "inline"])
def test_the_step_is_one_graph_to_a_compiler(inline: bool, batch: int) -> None:
    spec = dataclasses.replace(SPECS[4], n_layers=1, qkv_bias=True)
    decoder, _ = pair(spec, inline=inline, batch=batch)
    judge = judge_of(spec, DType.F32, (40,), batch)
    for row in range(batch):
        decoder.write_cache(judge.layer_caches(-1, row), row)
    decoder.set_tokens(judge.tokens[-1].tolist())
    torch._dynamo.reset()
    with torch.no_grad():
        forward = torch.compile(decoder.forward, backend="aot_eager", fullgraph=True, dynamic=False)
        logits, token = forward(40)
    wanted = judge.logits[-1]
    torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0.0)
    assert token.tolist() == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("inline", [False, True], ids=["library", "inline"])
@each_spec
def test_a_cuda_graph_can_capture_the_step(spec: DecoderSpec, inline: bool) -> None:
    decoder, oracle = pair(spec, DType.F32, inline, 2)
    decoder.set_tokens([3, 5])
    with Capturing(), torch.no_grad():
        logits, tokens = decoder.forward(0)
    torch.testing.assert_close(logits[0], oracle.step(3, 0), atol=1e-4, rtol=0.0)
    assert tokens.tolist() == logits.argmax(-1).tolist()


class Counting(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, operation: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.counts[operation.name().removeprefix("aten::")] += 1
        return operation(*args, **(kwargs or {}))


@each_spec
def test_a_step_launches_one_product_for_qkv_and_one_for_gate_and_up_and_copies_nothing(spec: DecoderSpec) -> None:
    decoder, _ = pair(spec, DType.BF16)
    with Counting() as counting, torch.no_grad():
        decoder.forward(40)
    turned = sum(map(spec.has_rope, range(spec.n_layers))) * (1 + spec.qk_norm)
    silu = spec.gated and spec.activation == "silu"
    wanted = {"mm": 4, "silu": int(silu), "add.Tensor": 2, "copy_": 2, "cat": 0, "clone": 0, "stack": 0}
    biased = spec.qkv_bias + spec.o_bias + 2 * spec.mlp_bias
    if biased:
        wanted |= {"mm": 4 - biased, "addmm": biased}
    wanted = {name: count * spec.n_layers for name, count in wanted.items()}
    if spec.norm_offset:  # to the weights of each norm: four in a layer, those of queries and keys, and the last
        wanted["add.Tensor"] += (4 + 2 * spec.qk_norm) * spec.n_layers + 1
    wanted |= {"mm": wanted["mm"] + 1, "embedding": 1, "argmax": 1, "flip": turned, "addcmul": turned}
    assert {name: counting.counts[name] for name in wanted} == wanted


@each_spec
def test_a_step_hashes_no_opcode_which_torch_2_11_does_not_compile(
    spec: DecoderSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, oracle = pair(spec)
    wanted = oracle.step(0, 0)

    def refused(kind: InstructionKind) -> int:
        raise AssertionError(f"{kind.name} is hashed")

    monkeypatch.setattr(InstructionKind, "__hash__", refused)
    with pytest.raises(AssertionError, match="ADD is hashed"):
        hash(InstructionKind.ADD)
    with torch.no_grad():
        logits, _ = decoder.forward(0)
    torch.testing.assert_close(logits[0], wanted, atol=1e-4, rtol=0.0)


def test_a_wrong_cache_fails_the_verdict() -> None:
    decoder, _ = pair(LLAMA)
    judge = judge_of(LLAMA, DType.F32, (0, 7, 40))
    decoder.write_cache([(keys, values.roll(1, 0)) for keys, values in judge.layer_caches(-1, 0)])
    assert not judge_free(decoder.step_rows(judge.tokens[-1].tolist(), 40), judge).passed


def test_a_position_that_no_token_has_written_shows() -> None:
    decoder, oracle = pair(LLAMA)
    oracle.prefill(range(5))
    decoder.write_cache(oracle.read_cache())
    assert decoder.step(1, 5).logits.isfinite().all()
    assert decoder.step(1, 8).logits.isnan().any()


def test_products_with_the_same_vector_are_one_and_the_rest_is_shared() -> None:
    spec = SPECS[3]
    weights = random_weights(spec, 3, torch.float32)
    fused = fuse(spec, weights)
    layer = fused.layers[1]
    qkv, gate_up, down = (held(layer, name).matrix for name in ("k_proj", "up_proj", "down_proj"))
    (bias,), head = held(layer, "v_proj").tensors, held(fused.epilogue, "lm_head").matrix
    for each in (qkv, gate_up, down, head):
        assert isinstance(each, torch.Tensor)
    assert qkv.shape == (spec.q_width + 2 * spec.kv_width, spec.hidden)
    assert gate_up.shape == (2 * spec.intermediate, spec.hidden)
    assert torch.equal(bias[-spec.kv_width :], weights["model.layers.1.self_attn.v_proj.bias"])
    assert down.data_ptr() == weights["model.layers.1.mlp.down_proj.weight"].data_ptr()
    assert head.data_ptr() == weights["lm_head.weight"].data_ptr()


def test_a_tied_head_is_the_table() -> None:
    fused = fuse(SPECS[1], random_weights(SPECS[1], 3, torch.float32))
    head = held(fused.epilogue, "lm_head").matrix
    assert isinstance(head, torch.Tensor)
    assert head.data_ptr() == fused.embed.data_ptr()


def test_what_does_not_fit_is_refused() -> None:
    decoder, _ = pair(LLAMA)
    for token, position in ((-1, 0), (120, 0), (0, CONTEXT)):
        with pytest.raises(UsageError, match=r"is not in 0\.\."):
            decoder.step(token, position)
    with pytest.raises(UsageError, match="a cache of 1 layers"):
        decoder.write_cache([(torch.zeros(1, 2, 16), torch.zeros(1, 2, 16))])
    with pytest.raises(UsageError, match=r"context 129 is not in 1\.\.128"):
        TorchDecoder(LLAMA, fuse(LLAMA, random_weights(LLAMA, 0)), DType.BF16, 129)
