"""Three-way agreement on small checkpoints that transformers made: transformers == eager == a program in the VM."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from effort import examples, pairs
from safetensors.torch import load_file, save_file
from tiny_checkpoints import CONTEXT, FAMILIES, POSITIONS, SIZES, build

from flywheel.cli.main import cli
from flywheel.decode.generate import generate
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.source import open_source
from flywheel.ir import DType
from flywheel.judge.verdicts import make_oracle, verify
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES
from flywheel.models.oracle import EagerDecoder
from flywheel.models.stored import canonical
from flywheel.runtime.sequences import Request
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, find_target
from flywheel.tensors import TORCH_DTYPES

# transformers also rounds inside operations; over these 3 layers and logits of deviation 1 that is up to 0.17.
BF16_ABS = 0.25

READ_ALIKE = ("gemma4-unified", "glm", "llama-scaled-tied", "llama-yarn", "ministral3", "phi3-short", "phi3-window",
              "qwen3-tied", "smollm3", "smollm3-turned", "starcoder2-plain")  # fmt: skip
"""Those of which the oracle alone is compared: their programs have nothing that others have not."""
PROGRAMS = [family for family in FAMILIES if family not in READ_ALIKE]

Opened = tuple[Any, ReferenceSession, EagerDecoder]


@pytest.fixture(params=PROGRAMS)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Opened]]:
    """`opened(dtype)`: a family's checkpoint as transformers reads it, as a program and as the oracle."""

    def open_as(dtype: str) -> Opened:
        model = build(request.param, tmp_path, TORCH_DTYPES[DTYPES[dtype]])
        return model, *session_of(tmp_path, dtype)

    yield open_as


def session_of(folder: Path, dtype: str, text: str | None = None) -> tuple[ReferenceSession, EagerDecoder]:
    """A checkpoint, with matrices of such a format, as a program and as the oracle."""
    source = open_source(str(folder))
    assert source.dtype == dtype
    workload = Workload(source.name, source.spec, find_target("h100"), dtype, CONTEXT, 1, text)
    space = make_space(workload)
    program = lower(workload.graph, space.to_config(space.known_good()[1]), workload.target)
    weights = source.weights(DTYPES[dtype], 0, formats=workload.formats)
    session = ReferenceSession(program, source.spec, weights, order="queues", seed=1)
    return session, make_oracle(session, weights)


def logits_three_ways(opened: Opened) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each [len(POSITIONS), vocab]."""
    model, session, oracle = opened
    ids = torch.randint(0, SIZES["vocab_size"], (CONTEXT,), generator=torch.Generator().manual_seed(11)).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, list(POSITIONS)].float()
    eager, ours = [], []
    for position in POSITIONS:
        oracle.reset()
        if position:
            oracle.prefill(ids[:position])
        session.write_cache(oracle.read_cache())
        ours.append(session.step(ids[position], position).logits)
        eager.append(oracle.step(ids[position], position))
    return theirs, torch.stack(eager), torch.stack(ours)


def test_logits_agree_three_ways_in_float32(opened: Callable[[str], Opened]) -> None:
    theirs, eager, ours = logits_three_ways(opened("f32"))
    assert theirs.std() > 0.5
    torch.testing.assert_close(eager, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, eager, atol=1e-4, rtol=1e-4)


def test_logits_agree_three_ways_in_bfloat16(opened: Callable[[str], Opened]) -> None:
    model, session, oracle = opened("bf16")
    theirs, eager, ours = logits_three_ways((model, session, oracle))
    torch.testing.assert_close(eager, theirs, atol=BF16_ABS, rtol=0.0)
    torch.testing.assert_close(ours, theirs, atol=BF16_ABS, rtol=0.0)
    verdict = verify(session, canonical(session.spec, model.state_dict()), POSITIONS)
    assert session.dtype is DType.BF16
    assert verdict.passed, verdict.reason


def test_greedy_generation_agrees_token_for_token(opened: Callable[[str], Opened]) -> None:
    count = examples(32, 12)
    model, session, oracle = opened("f32")
    length = 40 + (session.spec.turned_anew or 0)
    prompt = torch.randint(0, SIZES["vocab_size"], (1, length), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        # Without a mask, transformers would leave out the prompt's token 0, which it pads with.
        wanted = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, min_new_tokens=count, max_new_tokens=count
        )[0, length:].tolist()
    generation = generate(session, Request(tuple(prompt[0].tolist()), count), oracle)
    assert list(generation.token_ids) == wanted
    assert len(set(wanted)) > 3


def meant(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The matrices of a checkpoint of compressed-tensors, of fp8 by rows or of eight int4 a word in groups of 32."""
    made = {key: each for key, each in stored.items() if not key.endswith(("_packed", "_scale", "_shape"))}
    for key in [key.removesuffix("_scale") for key in stored if key.endswith("_scale")]:
        scales = stored[f"{key}_scale"].float()
        if key in stored:
            made[key] = stored[key].float() * scales
        else:
            words = stored[f"{key}_packed"].unsqueeze(-1)
            numbers = (words >> torch.arange(0, 32, 4, dtype=torch.int32) & 15).flatten(1) - 8
            made[key] = numbers * scales.repeat_interleave(32, 1)
    return made


QUANTIZED = pairs(("gemma3", "phi3", "granite", "glm4", "granite4"), ("int4-g32", "fp8"))


@pytest.mark.parametrize(("family", "text"), QUANTIZED)
def test_what_flywheel_quantizes_decodes_as_transformers_decodes_what_it_means(
    family: str, text: str, tmp_path: Path
) -> None:
    plain, made = tmp_path / "plain", tmp_path / "made"
    model = build(family, plain, torch.float32)
    result = CliRunner().invoke(cli, ["quantize", "--model", str(plain), "--weights", text, "--output", str(made)])
    assert result.exit_code == 0, result.output
    wanted = model.state_dict()
    given = {key: each.to(wanted[key]) for key, each in meant(load_file(made / "model.safetensors")).items()}
    assert sum(not torch.equal(given[key], wanted[key]) for key in wanted) >= 4 * model.config.num_hidden_layers
    model.load_state_dict(given)
    theirs, eager, ours = logits_three_ways((model, *session_of(made, "f32", text)))
    torch.testing.assert_close(eager, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_the_text_model_of_a_multimodal_checkpoint_is_quantized_to_one_that_transformers_knows(tmp_path: Path) -> None:
    from transformers import AutoConfig

    plain, made = tmp_path / "plain", tmp_path / "made"
    build("gemma3", plain, torch.float32)
    text, path = json.loads((plain / "config.json").read_text()), plain / "model.safetensors"
    around = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {}}
    around |= {"eos_token_id": text.pop("eos_token_id", None) or [1, 106]}
    (plain / "config.json").write_text(json.dumps({**around, "text_config": text}))
    tensors = {key.replace("model.", "language_model.model.", 1): each for key, each in load_file(path).items()}
    save_file(tensors | {"vision_tower.x": torch.ones(1)}, path)
    result = CliRunner().invoke(cli, ["quantize", "--model", str(plain), "--weights", "fp8", "--output", str(made)])
    assert result.exit_code == 0, result.output
    config = AutoConfig.from_pretrained(made)
    assert (config.model_type, config.architectures) == ("gemma3_text", ["Gemma3ForCausalLM"])
    assert config.eos_token_id == [1, 106]
    assert {key.partition(".")[0] for key in load_file(made / "model.safetensors")} == {"model", "lm_head"}
    assert open_source(str(made)).spec == dataclasses.replace(open_source(str(plain)).spec, name="made")
