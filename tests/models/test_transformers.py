"""Agreement with transformers on small random checkpoints that it saved itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoints import write

from flywheel.decode.source import open_source
from flywheel.errors import UnsupportedModelError
from flywheel.ir import DType
from flywheel.models.checkpoint import load_weights
from flywheel.models.config_fields import FOREIGN
from flywheel.models.hf import load_spec, spec_from_config, unread_fields
from flywheel.models.oracle import EagerDecoder
from flywheel.models.quantise import matrix_of
from flywheel.models.stored import canonical, stored_tensors
from flywheel.models.weights import checkpoint_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = 160
POSITIONS = (0, 1, 7, 63, 100, CONTEXT - 1)
# bf16 keeps 8 bits. Measured over 3 layers and logits of deviation 1, between eager and transformers: 0.011 to 0.020
# root mean square, 0.17 at most; between either and float64: 0.008 to 0.016, 0.12 at most.
BF16_RMS = 0.03
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
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 3.0, 6.0, 9.0, 9.5],
}
"""Of 12 elements of a head. With Phi-3's default, contexts of up to 4096 are short."""
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
FULL, SLIDING = "full_attention", "sliding_attention"
DENSE = {
    "num_local_experts": 0, "layer_types": [FULL] * 3, "shared_intermediate_size": 96, "mamba_n_heads": 4,
    "embedding_multiplier": 3.7, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 0.8,
}  # fmt: skip
"""A Granite 4 without experts and recurrent layers."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", dict(SIZES)),
    "llama-tied": ("Llama", dict(SIZES, tie_word_embeddings=True)),
    "llama-scaled": ("Llama", dict(SIZES, rope_parameters=LLAMA3_ROPE)),
    "llama-scaled-tied": (
        "Llama", dict(SIZES, rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True, head_dim=32),
    ),
    "llama-biased": ("Llama", dict(SIZES, attention_bias=True, mlp_bias=True)),
    "cohere": ("Cohere", dict(SIZES, logit_scale=0.8)),
    "cohere2": ("Cohere2", dict(SIZES, logit_scale=0.8, sliding_window=CONTEXT, num_hidden_layers=4)),
    "mistral": ("Mistral", dict(SIZES, sliding_window=None)),
    "mistral-window": ("Mistral", dict(SIZES, sliding_window=37)),
    "mistral-short-window": ("Mistral", dict(SIZES, sliding_window=3)),
    "ministral": ("Ministral", dict(SIZES, head_dim=16, sliding_window=50, layer_types=[SLIDING, FULL, SLIDING])),
    "qwen2-window": ("Qwen2", dict(SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1)),
    "smollm3-window": ("SmolLM3", dict(SIZES, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=40)),
    "qwen2": ("Qwen2", dict(SIZES)),
    "qwen3": ("Qwen3", dict(SIZES, head_dim=32)),
    "qwen3-tied": ("Qwen3", dict(SIZES, head_dim=16, tie_word_embeddings=True)),
    "starcoder2": ("Starcoder2", dict(SIZES, intermediate_size=256, num_key_value_heads=4)),
    "starcoder2-plain": ("Starcoder2", dict(SIZES, use_bias=False, num_key_value_heads=4)),
    "smollm3": ("SmolLM3", dict(SIZES, num_hidden_layers=5)),
    "smollm3-untied": ("SmolLM3", dict(SIZES, no_rope_layers=[1, 0, 1], tie_word_embeddings=False)),
    "phi3": ("Phi3", dict(SIZES, rope_parameters={"partial_rotary_factor": 0.5})),
    "phi3-window": ("Phi3", dict(SIZES, sliding_window=23)),
    "phi3-short": ("Phi3", dict(SIZES, rope_parameters=LONG_ROPE | {"partial_rotary_factor": 0.75})),
    "glm": ("Glm", dict(SIZES, head_dim=32)),
    "glm4": ("Glm4", dict(SIZES, head_dim=32)),
    "llama-yarn": ("Llama", dict(SIZES, rope_parameters=YARN_ROPE)),
    "granite": (
        "Granite", dict(SIZES, embedding_multiplier=3.7, residual_multiplier=0.4, attention_multiplier=0.2,
                        logits_scaling=0.8),
    ),
    "granite4": ("GraniteMoeHybrid", dict(SIZES, **DENSE, position_embedding_type="rope", attention_bias=True)),
    "granite4-without-rope": ("GraniteMoeHybrid", dict(SIZES, **DENSE)),
    "olmo2": ("Olmo2", dict(SIZES)),
    "olmo3": (
        "Olmo3", dict(SIZES, num_hidden_layers=4, sliding_window=CONTEXT, rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 9000.0, "factor": 4.0},
        }),
    ),
    "gemma": ("Gemma", dict(SIZES, head_dim=32, hidden_act="gelu", tie_word_embeddings=False)),
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
    "smollm3-turned": ("SmolLM3", dict(SIZES, no_rope_layers=[1, 1, 1])),
}
"""Of transformers: what stands before ForCausalLM and Config, and the config's fields."""


def known(family: str) -> tuple[type[PreTrainedModel], Any]:
    """A family's class and config. Importing them takes seconds, which tests of other files need not wait for."""
    import transformers

    name, fields = FAMILIES[family]
    config = {"Gemma3": "Gemma3TextConfig"}.get(name, f"{name}Config")
    return getattr(transformers, f"{name}ForCausalLM"), getattr(transformers, config)(**fields)


def build(family: str, folder: Path, dtype: torch.dtype = torch.float32, shards: str = "1GB") -> PreTrainedModel:
    """A checkpoint in `folder`, with norms and biases that a decoder cannot leave out unnoticed; read back, since a
    model converted in memory would have its RoPE frequencies rounded too."""
    kind, config = known(family)
    model = kind(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            deviation = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            deviation = 0.03 if name.endswith(SMALL) else deviation
            mean = 1.0 if name.endswith("norm.weight") and "Gemma" not in type(model).__name__ else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + mean)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    return kind.from_pretrained(folder, dtype=dtype).eval()


def decoder_in(folder: Path, dtype: torch.dtype = torch.float32) -> EagerDecoder:
    spec = load_spec(folder)
    return EagerDecoder(spec, canonical(spec, load_weights(folder, stored_tensors(spec).shapes)), dtype, CONTEXT)


def tokens(count: int) -> list[int]:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(11)).tolist()


@torch.no_grad()
def all_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab]"""
    return model(torch.tensor([ids])).logits[0].float()


def behind_a_filled_cache(decoder: EagerDecoder, ids: list[int]) -> torch.Tensor:
    """[len(POSITIONS), vocab]: each from a prefill of all before and one step."""
    rows = []
    for position in POSITIONS:
        decoder.reset()
        if position:
            decoder.prefill(ids[:position])
        rows.append(decoder.step(ids[position], position).float())
    return torch.stack(rows)


def rms(x: torch.Tensor) -> float:
    return float(x.square().mean().sqrt())


@pytest.mark.parametrize("kind", ["fp8 of transformers", "fp8 of transformers, dynamic", "fp8 of blocks"])
def test_fp8_means_what_transformers_reads(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers
    from transformers.quantizers import quantizer_finegrained_fp8

    # Without a GPU it turns codes into numbers, for which it does not need the package that it asks for.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    write(tmp_path, kind)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    source = open_source(str(tmp_path))
    weights = source.weights(DType.F32, 0, formats=source.formats(DType.F32))
    for key in checkpoint_tensors(source.spec):
        found = matrix_of(weights, key, torch.float64)
        if found is not None:
            torch.testing.assert_close(found, wanted[key].double(), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_agrees_in_float32_at_every_position(family: str, tmp_path: Path) -> None:
    model = build(family, tmp_path)
    decoder = decoder_in(tmp_path)
    ids = tokens(CONTEXT)
    wanted = all_logits(model, ids)
    assert wanted.std() > 0.5
    got = torch.stack([decoder.step(token, position) for position, token in enumerate(ids)])
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_agrees_in_bfloat16_behind_a_filled_cache(family: str, tmp_path: Path) -> None:
    ids = tokens(CONTEXT)
    wanted = all_logits(build(family, tmp_path, torch.bfloat16), ids)[list(POSITIONS)]
    got, exact = (behind_a_filled_cache(decoder_in(tmp_path, dtype), ids) for dtype in (torch.bfloat16, torch.float64))
    torch.testing.assert_close(got, wanted, atol=BF16_ABS, rtol=0.0)
    assert rms(got - wanted) < BF16_RMS
    assert rms(got - exact) < rms(wanted - exact) * 1.1


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_agrees_token_for_token(family: str, tmp_path: Path) -> None:
    model = build(family, tmp_path)
    decoder = decoder_in(tmp_path)
    prompt = tokens(40)
    with torch.no_grad():
        wanted = model.generate(torch.tensor([prompt]), do_sample=False, min_new_tokens=32, max_new_tokens=32)
    generated = [int(decoder.prefill(prompt).argmax())]
    while len(generated) < 32:
        generated.append(int(decoder.step(generated[-1], decoder.length).argmax()))
    assert generated == wanted[0, len(prompt) :].tolist()
    assert len(set(generated)) > 4


def test_shards_read_like_one_file(tmp_path: Path) -> None:
    model = build("qwen2", tmp_path, shards="100KB")
    decoder = decoder_in(tmp_path)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    ids = tokens(20)
    torch.testing.assert_close(decoder.prefill(ids), all_logits(model, ids)[-1], atol=1e-4, rtol=1e-4)


def test_the_cache_agrees_with_that_of_transformers(tmp_path: Path) -> None:
    model = build("llama-scaled", tmp_path)
    decoder = decoder_in(tmp_path)
    ids = tokens(30)
    decoder.prefill(ids)
    with torch.no_grad():
        layers = model(torch.tensor([ids]), use_cache=True).past_key_values.layers
    for (k, v), layer in zip(decoder.read_cache(), layers, strict=True):
        torch.testing.assert_close(k, layer.keys[0].transpose(0, 1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(v, layer.values[0].transpose(0, 1), atol=1e-4, rtol=1e-4)


def logits_with(folder: Path, changes: dict[str, Any], ids: list[int]) -> torch.Tensor:
    """[len(ids), vocab] of the checkpoint with other fields in its config.json."""
    import transformers

    before = (folder / "config.json").read_text()
    (folder / "config.json").write_text(json.dumps(json.loads(before) | changes))
    logits = all_logits(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), ids)
    (folder / "config.json").write_text(before)
    return logits


WINDOWS = [
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 8, "layer_types": [FULL] * 3}),
    ("mistral", {"sliding_window": 8, "layer_types": [FULL, SLIDING, FULL]}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3, "layer_types": None}),
    ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2, "layer_types": None}),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": [FULL, FULL, SLIDING]}),
    ("qwen3", {"sliding_window": 8, "use_sliding_window": True, "layer_types": [FULL] * 3}),
]


@pytest.mark.parametrize(("family", "changes"), WINDOWS)
def test_a_window_begins_to_count_where_transformers_has_it(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    build(family, tmp_path)
    ids = tokens(24)
    moved = (logits_with(tmp_path, changes, ids) - logits_with(tmp_path, {}, ids)).abs().amax(1) > 1e-4
    first = int(moved.nonzero()[0]) if bool(moved.any()) else None
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    assert spec_from_config(config, "x").window == first


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_transformers_does_not_read_the_fields_that_are_read_over(family: str, tmp_path: Path) -> None:
    build(family, tmp_path)
    ids = tokens(24)
    asking = {field: {(): 0.5, (1,): 2.0}.get(neutral, True) for field, neutral in FOREIGN.items()}
    (tmp_path / "told.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | asking))
    assert len(unread_fields(tmp_path / "told.json").foreign) >= len(asking)
    assert torch.equal(logits_with(tmp_path, asking, ids), logits_with(tmp_path, {}, ids))


@pytest.mark.parametrize("changes", [{"is_causal": False}, {"hidden_act": "gelu"}])
def test_transformers_reads_fields_that_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    build("llama", tmp_path)
    ids = tokens(24)
    assert not torch.allclose(logits_with(tmp_path, changes, ids), logits_with(tmp_path, {}, ids))
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        spec_from_config(json.loads((tmp_path / "config.json").read_text()) | changes, "x")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_checkpoint_is_read_alone(prefix: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = build("gemma3", tmp_path)
    ids = tokens(24)
    path, config = tmp_path / "model.safetensors", json.loads((tmp_path / "config.json").read_text())
    whole = {key.replace("model.", prefix, 1): each for key, each in load_file(path).items()}
    vision = {"vision_tower.x": torch.ones(1), "multi_modal_projector.y": torch.ones(1)}
    save_file({key.replace("lm_head", "language_model.lm_head"): each for key, each in (whole | vision).items()}, path)
    around = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(around | {"text_config": config}))
    torch.testing.assert_close(decoder_in(tmp_path).prefill(ids), all_logits(model, ids)[-1], atol=1e-4, rtol=1e-4)
