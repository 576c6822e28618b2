from __future__ import annotations

import dataclasses

import pytest
import torch

from flywheel.errors import WeightsError
from flywheel.ir import TARGETS, Buffer, BufferKind, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models import weights as drawing
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.families import count_params
from flywheel.models.oracle import EagerDecoder
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import (
    WeightsOnRequest,
    bind,
    bind_on_request,
    checkpoint_tensors,
    random_on_request,
    random_weights,
    random_words,
)

SPEC = DecoderSpec("tiny", "qwen2", 64, 96, 2, 4, 2, 16, 160, 1e4, 1e-5, 64, qkv_bias=True)
QWEN3 = DecoderSpec("tiny-qwen3", "qwen3", 256, 512, 2, 4, 2, 64, 500, 1e4, 1e-6, 64, qk_norm=True, tied_head=True)

X = BufferKind.ACTIVATION, DType.F32, (8,)


def weight_buffers(*buffers: Buffer) -> MegakernelProgram:
    return MegakernelProgram(buffers=buffers)


def weight(source: str | None, dtype: DType = DType.F32, shape: tuple[int, ...] = (4,), number: int = 0) -> Buffer:
    return Buffer(number, f"w{number}", BufferKind.WEIGHT, dtype, shape, source=source)


@pytest.mark.parametrize("name", CATALOG)
def test_a_checkpoint_holds_every_parameter_once(name: str) -> None:
    spec = CATALOG[name]
    shapes = checkpoint_tensors(spec)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == count_params(spec)
    assert ("lm_head.weight" in shapes) is not spec.tied_head
    assert shapes[f"model.layers.{spec.n_layers - 1}.mlp.down_proj.weight"] == (spec.hidden, spec.intermediate)


def test_random_weights_are_what_a_checkpoint_holds() -> None:
    weights = random_weights(SPEC, seed=0, dtype=torch.float16)
    assert {key: tuple(tensor.shape) for key, tensor in weights.items()} == checkpoint_tensors(SPEC)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}


def test_random_weights_are_the_same_everywhere() -> None:
    key = "model.layers.1.self_attn.q_proj.weight"
    drawn = random_weights(SPEC, seed=0, dtype=torch.float32)[key]
    assert torch.equal(drawn, random_weights(SPEC, seed=0, dtype=torch.float32)[key])
    assert drawn.flatten()[:4].tolist() == [
        0.09009479731321335,
        0.145070418715477,
        -0.1176866739988327,
        -0.21180032193660736,
    ]
    assert torch.equal(drawn.to(torch.bfloat16), random_weights(SPEC, seed=0)[key])


def test_weights_on_request_are_the_same_and_only_the_embedding_is_held() -> None:
    made = random_on_request(SPEC, 0, torch.float16, "cpu")
    whole = random_weights(SPEC, seed=0, dtype=torch.float16)
    assert (set(made), len(made)) == (set(whole), len(whole))
    assert all(torch.equal(made[key], tensor) for key, tensor in whole.items())
    assert {key for key in made if made[key] is made[key]} == {"model.embed_tokens.weight"}
    assert "w" not in made and made.get("w") is None


def test_buffers_are_bound_on_request_to_the_parts_that_bind_finds() -> None:
    made = WeightsOnRequest(["a", "b"], {"a": torch.arange(8.0), "b": torch.ones(4).half()}.__getitem__)
    part = dataclasses.replace(weight("a", shape=(3,)), part=(0, 2))
    bound = bind_on_request(weight_buffers(part, weight("b", number=1), Buffer(2, "x", *X)), made)
    assert set(bound) == {"w0", "w1"}
    assert bound["w0"].tolist() == [2.0, 3.0, 4.0]
    with pytest.raises(WeightsError, match=r"buffer 'w1' is torch.float32, its tensor 'b' is torch.float16"):
        bound["w1"]
    with pytest.raises(WeightsError, match=r"buffer 'w0': no tensor is called 'c'"):
        bind_on_request(weight_buffers(weight("c")), made)


def test_random_words_are_those_of_splitmix64() -> None:
    """The first ones of seeds 0 and 1234567, as published with its C source."""
    assert random_words(0, 0, 1).tolist() == [0xE220A8397B1DCDAF - 2**64]
    words = [word % 2**64 for word in random_words(1234567, 0, 5).tolist()]
    assert words == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821
    ]  # fmt: skip
    assert random_words(1234567, 3, 2).tolist() == random_words(1234567, 0, 5).tolist()[3:]


def test_a_weight_does_not_depend_on_how_much_is_drawn_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_weights(SPEC, seed=0)
    monkeypatch.setattr(drawing, "_CHUNK", 60)
    assert all(torch.equal(tensor, whole[key]) for key, tensor in random_weights(SPEC, seed=0).items())


def test_a_weight_depends_on_its_key_not_on_the_others() -> None:
    deeper = dataclasses.replace(SPEC, n_layers=3, tied_head=True)
    weights, others = random_weights(SPEC, seed=0), random_weights(deeper, seed=0)
    shared = [key for key in weights if key in others]
    assert len(shared) == len(weights) - 1
    assert all(torch.equal(weights[key], others[key]) for key in shared)


def test_seeds_and_keys_give_different_weights() -> None:
    first, second = random_weights(SPEC, seed=0), random_weights(SPEC, seed=1)
    assert not any(torch.equal(first[key], second[key]) for key in first)
    gates = [first[f"model.layers.{layer}.mlp.{role}_proj.weight"] for layer in (0, 1) for role in ("gate", "up")]
    assert not any(torch.equal(a, b) for number, a in enumerate(gates) for b in gates[:number])


@pytest.mark.parametrize("spec", [SPEC, QWEN3], ids=lambda spec: spec.name)
def test_random_weights_give_lively_logits(spec: DecoderSpec) -> None:
    weights = random_weights(spec, seed=0, dtype=torch.float32)
    decoder = EagerDecoder(spec, weights, torch.float32, 64)
    rows = torch.stack([decoder.step(position % 40, position) for position in range(64)])
    assert rows.isfinite().all()
    assert rows.argmax(1).unique().numel() > 16
    decoder.reset()
    # The same token without its context.
    assert (decoder.step(63 % 40, 0) - rows[63]).std() > 0.2 * rows.std()


def test_a_lowered_program_binds_every_weight_without_a_copy() -> None:
    program = lower(decode_step(QWEN3, 16), ScheduleConfig(), TARGETS["h100"])
    weights = random_weights(QWEN3, seed=0)
    bound = bind(program, weights)
    buffers = {buffer.name: buffer for buffer in program.buffers if buffer.kind is BufferKind.WEIGHT}
    assert bound.keys() == buffers.keys()
    assert all(bound[name] is weights[buffer.source or ""] for name, buffer in buffers.items())
    assert {buffer.source for buffer in buffers.values()} == weights.keys()


def test_a_cast_happens_once_for_a_shared_tensor() -> None:
    program = weight_buffers(weight("w", DType.BF16), weight("w", DType.BF16, number=1), weight("w", number=2))
    given = torch.tensor([1.0, 2.0, 3.0, 1 / 3])
    bound = bind(program, {"w": given}, cast=True)
    assert bound["w0"] is bound["w1"]
    assert bound["w0"].dtype == torch.bfloat16
    assert bound["w2"] is given


def test_constants_are_bound_and_other_buffers_are_not() -> None:
    kinds = [BufferKind.CONST, BufferKind.ACTIVATION, BufferKind.KV_CACHE, BufferKind.IO_INPUT, BufferKind.IO_OUTPUT]
    buffers = [Buffer(number, kind.name, kind, DType.I8, (2,), source="x") for number, kind in enumerate(kinds)]
    assert list(bind(weight_buffers(*buffers), {"x": torch.ones(2, dtype=torch.int8)})) == ["CONST"]


@pytest.mark.parametrize(
    ("buffer", "cast", "message"),
    [
        (weight("absent"), True, "buffer 'w0': no tensor is called 'absent'"),
        (weight(None), True, "buffer 'w0': it has no source"),
        (weight("w", shape=(2, 2)), True, "buffer 'w0' is [2, 2], its tensor 'w' is [4]"),
        (weight("w", DType.BF16), False, "buffer 'w0' is torch.bfloat16, its tensor 'w' is torch.float32"),
        (weight("w", DType.I8), True, "buffer 'w0' is torch.int8, its tensor 'w' is torch.float32"),
        (weight("w", DType.I4), True, "buffer 'w0' is torch.uint8, its tensor 'w' is torch.float32"),
    ],
)
def test_a_buffer_that_no_tensor_fits_is_refused(buffer: Buffer, cast: bool, message: str) -> None:
    with pytest.raises(WeightsError) as caught:
        bind(weight_buffers(buffer), {"w": torch.ones(4)}, cast)
    assert str(caught.value) == message
