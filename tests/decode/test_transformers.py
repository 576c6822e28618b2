"""Three-way agreement on small checkpoints that transformers made: transformers == eager == a program in the VM."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from click.testing import CliRunner
from effort import examples, pairs
from safetensors.torch import load_file, save_file

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

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = 160
POSITIONS = (0, 1, 7, 63, 100, CONTEXT - 1)
# transformers also rounds inside operations; over these 3 layers and logits of deviation 1 that is up to 0.17.
BF16_ABS = 0.25

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMALL = ("o_proj.bias", "down_proj.bias", "gate_proj.bias", "up_proj.bias", "c_proj.bias", "c_fc.bias", "norm.bias")
LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0, 3.5, 3.9],
}
FULL, SLIDING = "full_attention", "sliding_attention"
DENSE = {
    "num_local_experts": 0, "layer_types": [FULL] * 3, "shared_intermediate_size": 96, "mamba_n_heads": 4,
    "embedding_multiplier": 3.7, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.8,
}  # fmt: skip
"""A Granite 4 without experts and recurrent layers."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(SIZES)),
    "llama-scaled": ("Llama", dict(SIZES, rope_parameters=LLAMA3_ROPE)),
    "llama-tied": ("Llama", dict(SIZES, tie_word_embeddings=True)),
    "llama-biased": ("Llama", dict(SIZES, attention_bias=True, mlp_bias=True, intermediate_size=128)),
    "cohere": ("Cohere", dict(SIZES, logit_scale=0.8, tie_word_embeddings=False)),
    "cohere2": ("Cohere2", dict(SIZES, logit_scale=0.8, sliding_window=CONTEXT, num_hidden_layers=4)),
    "mistral": ("Mistral", dict(SIZES, sliding_window=None)),
    "mistral-window": ("Mistral", dict(SIZES, sliding_window=37)),
    "mistral-short-window": ("Mistral", dict(SIZES, sliding_window=3)),
    "ministral": ("Ministral", dict(SIZES, head_dim=16, sliding_window=50, layer_types=[SLIDING, FULL, SLIDING])),
    "qwen2": ("Qwen2", dict(SIZES)),
    "qwen2-window": ("Qwen2", dict(SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1)),
    "qwen3": ("Qwen3", dict(SIZES, head_dim=32)),
    "phi3": ("Phi3", dict(SIZES, rope_parameters={"partial_rotary_factor": 0.5})),
    "glm4": ("Glm4", dict(SIZES, head_dim=32)),
    "phi3-long": ("Phi3", dict(SIZES, rope_parameters=LONG_ROPE, original_max_position_embeddings=64)),
    "granite": (
        "Granite", dict(SIZES, embedding_multiplier=3.7, residual_multiplier=0.4, attention_multiplier=0.2,
                        logits_scaling=0.8),
    ),
    "granite4": ("GraniteMoeHybrid", dict(SIZES, **DENSE, position_embedding_type="rope", attention_bias=True)),
    "granite4-without-rope": ("GraniteMoeHybrid", dict(SIZES, **DENSE)),
    "olmo2": ("Olmo2", dict(SIZES)),
    "starcoder2": ("Starcoder2", dict(SIZES, intermediate_size=256, num_key_value_heads=4)),
    "olmo3": (
        "Olmo3", dict(SIZES, num_hidden_layers=4, sliding_window=CONTEXT, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 4.0},
        }),
    ),
    "gemma": ("Gemma", dict(SIZES, head_dim=32, tie_word_embeddings=False)),
    "gemma2": (
        "Gemma2", dict(SIZES, head_dim=32, sliding_window=CONTEXT, query_pre_attn_scalar=20,
                       attn_logit_softcapping=3.0, final_logit_softcapping=2.0, attn_implementation="eager",
                       tie_word_embeddings=False),
    ),
    "gemma3": (
        "Gemma3", dict(SIZES, num_hidden_layers=4, head_dim=32, sliding_window=CONTEXT, query_pre_attn_scalar=24,
                       sliding_window_pattern=2, rope_theta=5e4, rope_local_base_freq=100.0,
                       tie_word_embeddings=False),
    ),
    "smollm3": ("SmolLM3", dict(SIZES, no_rope_layer_interval=2, tie_word_embeddings=False)),
    "smollm3-window": ("SmolLM3", dict(SIZES, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=40,
        tie_word_embeddings=False)),
}
"""Of transformers: what stands before ForCausalLM and Config, and the config's fields."""


def known(family: str) -> tuple[type[PreTrainedModel], Any]:
    """A family's class and config. Importing them takes seconds, which tests of other files need not wait for."""
    import transformers

    name, fields = FAMILIES[family]
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, config)(**fields)

Opened = tuple[Any, ReferenceSession, EagerDecoder]


def written(family: str, folder: Path, precision: torch.dtype) -> PreTrainedModel:
    """A family's checkpoint in `folder`, as transformers reads it."""
    kind, config = known(family)
    model = kind(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            deviation = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            deviation = 0.03 if name.endswith(SMALL) else deviation
            mean = 1.0 if name.endswith("norm.weight") and "Gemma" not in type(model).__name__ else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + mean)
    model.to(precision).save_pretrained(folder)
    # A model converted in memory would have its RoPE frequencies rounded too.
    return kind.from_pretrained(folder, dtype=precision).eval()


@pytest.fixture(params=FAMILIES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], Opened]]:
    """`opened(dtype)`: a family's checkpoint as transformers reads it, as a program and as the oracle."""

    def build(dtype: str) -> Opened:
        model = written(request.param, tmp_path, TORCH_DTYPES[DTYPES[dtype]])
        return model, *session_of(tmp_path, dtype)

    yield build


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
    model = written(family, plain, torch.float32)
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
    written("gemma3", plain, torch.float32)
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
