"""A new family of today's operations is one file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flywheel.decode.reference import ReferenceSession
from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, DType, validate
from flywheel.lowering.lower import lower
from flywheel.models import families, hf
from flywheel.models.blocks import attention_ops, mlp_ops
from flywheel.models.decoder import decode_step
from flywheel.models.family import Family
from flywheel.models.graph import Op
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.rivals.torch_decoder import TorchDecoder, fuse
from flywheel.search.space import make_space
from flywheel.search.workload import Workload

CONTEXT = 32
TOKENS = tuple((11 * place + 3) % 80 for place in range(20))
FEW = replace(TARGETS["h100"], num_sms=6)


@pytest.fixture(scope="module")
def theirs() -> tuple[dict[str, object], torch.nn.Module]:
    """(the config, the model) of transformers' own code, with random weights."""
    from transformers import Olmo2Config, Olmo2ForCausalLM

    config = Olmo2Config(
        vocab_size=80, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, rms_norm_eps=1e-5, rope_theta=1e4,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Olmo2ForCausalLM(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return config.to_dict(), model


def spec_of(config: dict[str, object]) -> DecoderSpec:
    return hf.spec_from_config({**config, "architectures": ["Olmo2ForCausalLM"]}, "olmo")


def test_it_has_the_weights_of_a_checkpoint(theirs: tuple[dict[str, object], torch.nn.Module]) -> None:
    config, model = theirs
    shapes = {key: each.shape for key, each in random_weights(spec_of(config), 0).items()}
    assert shapes == {key: each.shape for key, each in model.state_dict().items()}


@pytest.mark.parametrize("choice", range(3))
def test_a_program_a_prompt_and_a_rival_compute_what_transformers_computes(
    theirs: tuple[dict[str, object], torch.nn.Module], choice: int
) -> None:
    config, model = theirs
    spec, weights = spec_of(config), {key: each.detach() for key, each in model.state_dict().items()}
    with torch.no_grad():
        wanted = model(torch.tensor([TOKENS])).logits[0, -1]
    workload = Workload("olmo", spec, FEW, "f32", CONTEXT)
    space = make_space(workload)
    program = lower(workload.graph, space.to_config(space.known_good()[choice]), FEW)
    assert validate(program, strict=True).ok
    session = ReferenceSession(program, spec, weights)
    session.prefill(TOKENS[:-1])
    torch.testing.assert_close(session.step(TOKENS[-1], len(TOKENS) - 1).logits, wanted, atol=2e-4, rtol=0.0)
    rival = TorchDecoder(spec, fuse(spec, weights), DType.F32, CONTEXT)
    for position, token in enumerate(TOKENS):
        step = rival.step(token, position)
    torch.testing.assert_close(step.logits, wanted, atol=2e-4, rtol=0.0)


def test_what_fuses_follows_from_who_reads_what(theirs: tuple[dict[str, object], torch.nn.Module]) -> None:
    spec = spec_of(theirs[0])
    space = make_space(Workload("olmo", spec, FEW, "f32", CONTEXT))
    levels = {each.name: each.values for each in space.dimensions if each.name.startswith("fuse.")}
    assert levels == {
        "fuse.qkv": (0,), "fuse.attention": (0, 1, 2, 3, 4), "fuse.out": (0, 2), "fuse.mlp_in": (0, 1),
        "fuse.down": (0,), "fuse.head": (0, 1),
    }  # fmt: skip


def test_a_norm_of_all_heads_is_not_shared_by_gpus(theirs: tuple[dict[str, object], torch.nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"^olmo: q_norm is a norm of all heads, which several GPUs cannot share$"):
        shared_step(spec_of(theirs[0]), CONTEXT, DType.BF16, 1, ranks=2)


def mixed_layers(spec: DecoderSpec, context: int, lanes: int) -> list[tuple[Op, ...]]:
    """Of six layers, four that turn by angles of their own, one by the usual ones, and one not at all."""
    mlp, others = mlp_ops(spec), (replace(spec, rope_theta=100.0), spec, replace(spec, turned=(False,)))
    turned, far, plain = ((*attention_ops(each, context, lanes), *mlp) for each in others)
    return [turned, turned, far, turned, turned, plain]


def test_layers_may_turn_by_different_angles_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**families.FAMILIES, "mixed": Family("mixed", "MixedForCausalLM", mixed_layers)}
    monkeypatch.setattr(families, "FAMILIES", own)
    spec = DecoderSpec("mixed", "mixed", 64, 96, 6, 4, 2, 16, 80, 1e4, 1e-6, 128)
    weights = random_weights(spec, 1, torch.float32)
    workload = Workload("mixed", spec, FEW, "f32", CONTEXT)
    space = make_space(workload)
    program = lower(workload.graph, space.to_config(space.known_good()[0]), FEW)
    assert workload.graph.order == (0, 0, 1, 0, 0, 2)
    at_once, stepped = (ReferenceSession(program, spec, weights) for _ in range(2))
    rival = TorchDecoder(spec, fuse(spec, weights), DType.F32, CONTEXT)
    at_once.prefill(TOKENS[:-1])
    for position, token in enumerate(TOKENS):
        step, theirs = stepped.step(token, position), rival.step(token, position)
    last = at_once.step(TOKENS[-1], len(TOKENS) - 1)
    for logits in (last.logits, theirs.logits):
        torch.testing.assert_close(logits, step.logits, atol=2e-4, rtol=0.0)


@pytest.mark.parametrize("path", sorted(Path(families.__file__).parent.glob("*.py")), ids=lambda path: path.stem)
def test_the_file_of_a_family_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 120


def test_layers_are_one_kind(theirs: tuple[dict[str, object], torch.nn.Module]) -> None:
    assert decode_step(spec_of(theirs[0]), CONTEXT).order == (0, 0)
