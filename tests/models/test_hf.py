from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutated_configs import base_of

from flywheel.errors import UnsupportedModelError
from flywheel.models.catalog import CATALOG
from flywheel.models.families import FAMILIES, count_params
from flywheel.models.hf import load_spec, spec_from_config, unread_fields
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec

Config = dict[str, Any]

LLAMA3_8B: Config = json.loads("""
{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
 "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
 "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
 "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
 "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
 "transformers_version": "4.40.0.dev0", "use_cache": true, "vocab_size": 128256}
""")
LLAMA32_1B: Config = json.loads("""
{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
 "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
 "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
 "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
 "rms_norm_eps": 1e-05, "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
 "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": true,
 "vocab_size": 128256}
""")
MISTRAL_7B: Config = json.loads("""
{"architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
 "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
 "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
 "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": null,
 "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.0.dev0", "use_cache": true,
 "vocab_size": 32768}
""")
QWEN25_7B: Config = json.loads("""
{"architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151643,
 "hidden_act": "silu", "hidden_size": 3584, "initializer_range": 0.02, "intermediate_size": 18944,
 "max_position_embeddings": 131072, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
 "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
 "sliding_window": 131072, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.40.1",
 "use_cache": true, "use_mrope": false, "use_sliding_window": false, "vocab_size": 152064}
""")
QWEN3_06B: Config = json.loads("""
{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
 "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02,
 "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
 "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
 "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
 "vocab_size": 151936}
""")
SMOLLM2_135M: Config = json.loads("""
{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
 "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
 "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "model_type": "llama",
 "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pretraining_tp": 1,
 "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
 "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
 "vocab_size": 49152}
""")
SMOLLM3_3B: Config = json.loads("""
{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "eos_token_id": 128012,
 "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11008,
 "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false, "model_type": "smollm3",
 "no_rope_layer_interval": 4, "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
 "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 5000000.0,
 "sliding_window": null, "torch_dtype": "bfloat16", "use_cache": false, "use_sliding_window": false,
 "vocab_size": 128256}
""") | {"no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36}
COMMAND_R7B: Config = json.loads("""
{"architectures": ["Cohere2ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 5,
 "cache_implementation": "hybrid", "eos_token_id": 255001, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
 "initializer_range": 0.02, "intermediate_size": 14336, "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
 "max_position_embeddings": 132096, "model_type": "cohere2", "num_attention_heads": 32, "num_hidden_layers": 32,
 "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
 "position_embedding_type": "rope_gptj", "rope_scaling": null, "rope_theta": 50000, "rotary_pct": 1.0,
 "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16", "use_cache": true,
 "use_embedding_sharing": true, "use_gated_activation": true, "use_parallel_block": true,
 "use_parallel_embedding": false, "use_qk_norm": false, "vocab_size": 256000}
""")
STARCODER2_7B: Config = json.loads("""
{"architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 0, "embedding_dropout": 0.0,
 "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 4608, "initializer_range": 0.018042,
 "intermediate_size": 18432, "max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2",
 "norm_epsilon": 1e-05, "norm_type": "layer_norm", "num_attention_heads": 36, "num_hidden_layers": 32,
 "num_key_value_heads": 4, "residual_dropout": 0.0, "rope_theta": 1000000, "sliding_window": 4096,
 "torch_dtype": "float32", "use_bias": true, "use_cache": true, "vocab_size": 49152}
""")
GRANITE4_MICRO: Config = json.loads("""
{"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
 "attention_multiplier": 0.015625, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
 "hidden_act": "silu", "hidden_size": 2560, "init_method": "mup", "initializer_range": 0.1, "intermediate_size": 8192,
 "logits_scaling": 10, "mamba_d_conv": 4, "mamba_expand": 2, "max_position_embeddings": 131072,
 "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 40,
 "num_experts_per_tok": 0, "num_hidden_layers": 40, "num_key_value_heads": 8,
 "num_local_experts": 0, "output_router_logits": false, "pad_token_id": 100256, "position_embedding_type": "rope",
 "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000000,
 "router_aux_loss_coef": 0.01, "shared_intermediate_size": 8192, "tie_word_embeddings": true,
 "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 100352}
""") | {"layer_types": ["attention"] * 40}
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32,
    "num_hidden_layers": 36, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3_ROPE = LLAMA32_1B["rope_scaling"]
FULL, SLIDING = "full_attention", "sliding_attention"


def without(config: Config, *fields: str) -> Config:
    return {field: value for field, value in config.items() if field not in fields}


def refused(config: object) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_from_config(config, "stranger")
    message = str(caught.value)
    assert message.startswith("stranger: ")
    assert message.isprintable()
    return message


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama3-8b", LLAMA3_8B),
        ("llama3.2-1b", LLAMA32_1B),
        ("mistral-7b", MISTRAL_7B),
        ("qwen2.5-7b", QWEN25_7B),
        ("qwen3-0.6b", QWEN3_06B),
        ("qwen3-8b", QWEN3_8B),
        ("smollm2-135m", SMOLLM2_135M),
        ("smollm3-3b", SMOLLM3_3B),
        ("command-r7b", COMMAND_R7B),
        ("starcoder2-7b", STARCODER2_7B),
        ("granite-4.0-micro", GRANITE4_MICRO),
    ],
)
def test_a_published_config_is_the_catalogs_spec(name: str, config: Config, tmp_path: Path) -> None:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    assert load_spec(directory) == load_spec(directory / "config.json") == CATALOG[name]


def test_layers_without_a_window_have_no_rope_however_wide_the_window_is() -> None:
    for changes in ({}, {"max_position_embeddings": 2048}, {"layer_types": [SLIDING, FULL] * 16}):
        spec = spec_from_config(COMMAND_R7B | changes, "command")
        kinds = changes.get("layer_types", [SLIDING, SLIDING, SLIDING, FULL] * 8)
        assert [spec.rope_of(layer) is not None for layer in range(32)] == [kind == SLIDING for kind in kinds]
    alike = spec_from_config(COMMAND_R7B | {"layer_types": [FULL] * 32}, "command")
    assert alike.max_position == 132096 and not any(map(alike.rope_of, range(32)))


def test_rope_parameters_of_transformers_5_mean_the_same() -> None:
    bare = without(LLAMA32_1B, "rope_scaling", "rope_theta")
    newer = bare | {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}, "layer_types": ["full_attention"] * 16}
    assert spec_from_config(newer, "llama3.2-1b") == CATALOG["llama3.2-1b"]
    plain = without(QWEN3_06B, "rope_scaling", "rope_theta")
    plain |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000}}
    assert spec_from_config(plain, "qwen3-0.6b") == CATALOG["qwen3-0.6b"]


def test_rope_type_may_be_called_type() -> None:
    older = without(LLAMA3_ROPE, "rope_type") | {"type": "llama3"}
    assert spec_from_config(LLAMA32_1B | {"rope_scaling": older}, "llama3.2-1b") == CATALOG["llama3.2-1b"]


def test_default_rope_scaling_is_none() -> None:
    assert spec_from_config(LLAMA32_1B | {"rope_scaling": {"rope_type": "default"}}, "x").rope_scaling is None
    assert spec_from_config(LLAMA32_1B | {"rope_scaling": {}}, "x").rope_scaling is None


def spec_without(config: Config, field: str) -> DecoderSpec:
    return spec_from_config(without(config, field), "x")


def test_absent_fields_mean_what_transformers_assumes() -> None:
    assert spec_without(LLAMA3_8B, "num_key_value_heads").n_kv_heads == 32
    assert spec_without(MISTRAL_7B, "num_key_value_heads").n_kv_heads == 8
    assert spec_from_config(MISTRAL_7B | {"num_key_value_heads": None}, "x").n_kv_heads == 32
    assert spec_without(QWEN3_06B, "head_dim").head_dim == 128
    assert spec_without(LLAMA32_1B, "head_dim").head_dim == 64
    assert spec_from_config(LLAMA32_1B | {"head_dim": None}, "x").head_dim == 64
    assert spec_without(LLAMA32_1B, "tie_word_embeddings").tied_head is False
    assert spec_without(LLAMA3_8B, "rope_theta").rope_theta == 10000.0
    assert spec_without(LLAMA3_8B, "rms_norm_eps").norm_eps == 1e-6
    assert spec_without(LLAMA3_8B, "architectures") == dataclasses.replace(CATALOG["llama3-8b"], name="x")
    assert "num_key_value_heads is missing" in refused(without(QWEN25_7B, "num_key_value_heads"))


@pytest.mark.parametrize(
    ("listed", "turned"),
    [([1] * 36, ()), ([0] * 36, (False,)), ([1, 0] * 18, (True, False)), ([1, 0, 0, 1] * 9, (True, False, False, True)),
     ([0] + [1] * 35, (False, *[True] * 35))],
)  # fmt: skip
def test_any_layers_may_have_no_rope(listed: list[int], turned: tuple[bool, ...]) -> None:
    spec = spec_from_config(SMOLLM3_3B | {"no_rope_layers": listed}, "x")
    assert spec.turned == turned
    assert [spec.has_rope(layer) for layer in range(36)] == list(map(bool, listed))


def test_an_explicit_head_dim_wins_over_the_quotient() -> None:
    nemo = MISTRAL_7B | {"hidden_size": 5120, "head_dim": 128}
    assert spec_from_config(nemo, "x").q_width == 4096


def test_a_granite_without_experts_reads_its_layers_by_either_name_and_has_rope_where_it_says_so() -> None:
    micro, other = CATALOG["granite-4.0-micro"], without(GRANITE4_MICRO, "layer_types")
    assert spec_from_config(other | {"layers_block_type": [FULL] * 40}, micro.name) == micro
    for kind in (None, "nope"):
        found = spec_from_config(GRANITE4_MICRO | {"position_embedding_type": kind, "intermediate_size": 5}, micro.name)
        assert found == dataclasses.replace(micro, turned=(False,))
    assert "num_local_experts is missing" in refused(without(GRANITE4_MICRO, "num_local_experts"))
    assert "layer_types is missing" in refused(other)


@pytest.mark.parametrize(
    "extra",
    [
        {"torch_dtype": "float16", "pretraining_tp": 2, "use_cache": False, "_name_or_path": "x", "made_up": [1, {}]},
        {"partial_rotary_factor": 1.0, "logit_scale": 1, "residual_multiplier": 1.0, "num_experts": 0},
        {"quantization_config": None, "final_logit_softcapping": None, "sliding_window": None, "rope_parameters": None},
        {"dtype": "torch.bfloat16", "torch_dtype": "auto", "eos_token_id": [128001, 0], "pad_token_id": -1},
        {"is_causal": True, "use_qk_norm": False, "hidden_act": "swish", "pruned_heads": {}},
    ],
)
def test_fields_that_leave_the_arithmetic_alone_are_ignored(extra: Config) -> None:
    assert spec_from_config(LLAMA3_8B | extra, "llama3-8b") == CATALOG["llama3-8b"]


@pytest.mark.parametrize(
    ("base", "field", "value"),
    [
        (QWEN3_06B, "layer_types", ["full_attention", "sliding_attention"]),
        (QWEN3_06B, "layer_types", "sliding_attention"),
        (LLAMA3_8B, "attention_chunk_size", 8192),
        (LLAMA3_8B, "partial_rotary_factor", 0.5),
        (LLAMA3_8B, "partial_rotary_factor", True),
        (QWEN3_06B, "layer_types", ["chunked_attention"] * 28),
        (MISTRAL_7B, "sliding_window", 0),
        (QWEN25_7B, "use_sliding_window", "yes"),
        (LLAMA3_8B, "hidden_act", "gelu"),
        (LLAMA3_8B, "hidden_act", None),
        (LLAMA3_8B, "attention_bias", 1),
        (QWEN3_06B, "attention_bias", "true"),
        (LLAMA3_8B, "mlp_bias", 1),
        (LLAMA3_8B, "quantization_config", "gptq"),
        (LLAMA3_8B, "is_causal", False),
        (LLAMA3_8B, "is_encoder_decoder", True),
        (LLAMA3_8B, "auto_map", {"AutoModelForCausalLM": "modeling_custom.CustomForCausalLM"}),
        (LLAMA3_8B, "text_config", {"model_type": "llama"}),
        (LLAMA3_8B, "model_type", "qwen3_moe"),
        (SMOLLM3_3B, "no_rope_layers", [1, 1, 1, 0] * 8),
        (SMOLLM3_3B, "no_rope_layers", ["1"] * 36),
        (SMOLLM3_3B, "no_rope_layers", "all"),
        (COMMAND_R7B, "use_qk_norm", True),
        (COMMAND_R7B, "order_of_interleaved_layers", "global_attn_first"),
        (COMMAND_R7B, "sliding_window_pattern", 0),
        (COMMAND_R7B, "layer_types", ["full_attention"] * 31),
        (COMMAND_R7B, "logit_scale", None),
        (STARCODER2_7B, "hidden_act", "gelu"),
        (STARCODER2_7B, "use_bias", 1),
        (GRANITE4_MICRO, "num_local_experts", 62),
        (GRANITE4_MICRO, "layer_types", ["mamba", "attention"] * 20),
        (GRANITE4_MICRO, "layers_block_type", ["mamba"] * 36 + ["attention"] * 4),
        (GRANITE4_MICRO, "layers_block_type", ["attention"] * 39),
        (GRANITE4_MICRO, "layer_types", None),
        (GRANITE4_MICRO, "position_embedding_type", 1),
        (without(SMOLLM3_3B, "no_rope_layers"), "no_rope_layer_interval", 0),
        (without(SMOLLM3_3B, "no_rope_layers"), "no_rope_layer_interval", True),
        (LLAMA3_8B, "model_type", "gpt2"),
        (LLAMA3_8B, "model_type", ["llama"]),
        (LLAMA3_8B, "architectures", ["LlamaForSequenceClassification"]),
        (LLAMA3_8B, "architectures", ["LlamaModel"]),
        (LLAMA3_8B, "architectures", "LlamaForCausalLM"),
        (LLAMA3_8B, "hidden_size", 4096.0),
        (LLAMA3_8B, "hidden_size", "4096"),
        (LLAMA3_8B, "hidden_size", 4100),
        (LLAMA3_8B, "hidden_size", 2**31),
        (LLAMA3_8B, "intermediate_size", [11008, 14336]),
        (LLAMA3_8B, "num_hidden_layers", True),
        (LLAMA3_8B, "num_hidden_layers", 10**6),
        (LLAMA3_8B, "num_attention_heads", 0),
        (LLAMA3_8B, "num_key_value_heads", 5),
        (LLAMA3_8B, "head_dim", 127),
        (QWEN3_06B, "head_dim", None),
        (LLAMA3_8B, "vocab_size", -1),
        (LLAMA3_8B, "max_position_embeddings", None),
        (LLAMA3_8B, "rms_norm_eps", float("nan")),
        (LLAMA3_8B, "rms_norm_eps", "1e-5"),
        (LLAMA3_8B, "rope_theta", float("inf")),
        (LLAMA3_8B, "rope_theta", 10**400),
        (LLAMA3_8B, "rms_norm_eps", 1e-40),
        (GRANITE4_MICRO, "embedding_multiplier", 1e308),
        (GRANITE4_MICRO, "logits_scaling", 1e-308),
        (LLAMA3_8B, "eos_token_id", "</s>"),
        (LLAMA3_8B, "eos_token_id", True),
        (LLAMA3_8B, "eos_token_id", [128001, 1.0]),
        (LLAMA3_8B, "torch_dtype", "x"),
        (LLAMA3_8B, "torch_dtype", "int8"),
        (LLAMA3_8B, "dtype", 16),
        (QWEN25_7B, "max_window_layers", "28"),
        (SMOLLM3_3B, "no_rope_layer_interval", "4"),
        (LLAMA3_8B, "original_max_position_embeddings", "4096"),
        (LLAMA3_8B, "rope_theta", None),
        (LLAMA3_8B, "tie_word_embeddings", 1),
        (LLAMA3_8B, "rope_scaling", "llama3"),
    ],
)
def test_what_cannot_be_represented_is_refused_by_field(base: Config, field: str, value: object) -> None:
    message = refused(base | {field: value})
    assert message.startswith(f"stranger: {field} is ")
    assert "; supported: " in message


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_type", "proportional"),
        ("rope_type", ["yarn"]),
        ("type", "default"),
        ("factor", 0),
        ("factor", None),
        ("high_freq_factor", 1.0),
        ("low_freq_factor", "1"),
        ("original_max_position_embeddings", 8192.0),
        ("partial_rotary_factor", 0.5),
        ("attention_factor", 1.2),
        ("rope_theta", -1.0),
    ],
)
def test_rope_scaling_is_refused_by_key(field: str, key: str, value: object) -> None:
    config = without(LLAMA32_1B, "rope_scaling") | {field: LLAMA3_ROPE | {key: value}}
    assert f"{field}.{key} is " in refused(config)


def test_rope_per_layer_type_is_refused() -> None:
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    assert "rope_parameters.full_attention is " in refused(LLAMA3_8B | {"rope_parameters": nested})


@pytest.mark.parametrize("base", [None, 0, -1, "x"])
def test_the_base_of_layers_with_a_window_is_refused_by_its_own_key(base: object) -> None:
    config = {"model_type": "gemma3_text", "rope_local_base_freq": base}
    assert f"stranger: rope_local_base_freq is {json.dumps(base)}; supported: a number from" in refused(config)


def test_a_rope_of_a_kind_of_layers_is_refused_by_its_own_key() -> None:
    parameters = {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": -1.0}}
    config = {"model_type": "gemma3_text", "rope_parameters": parameters}
    assert "stranger: rope_parameters.sliding_attention.rope_theta is -1.0" in refused(config)
    contradicting = {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 2.0}}
    message = refused(config | {"rope_parameters": contradicting, "rope_local_base_freq": 1.0})
    assert "rope_local_base_freq is 1.0; supported: one value in rope_local_base_freq, rope_parameters.sl" in message


def test_rope_that_contradicts_itself_is_refused() -> None:
    twice = LLAMA32_1B | {"rope_parameters": {"rope_type": "default"}}
    assert "rope_scaling is " in refused(twice)
    assert "rope_theta is " in refused(LLAMA3_8B | {"rope_parameters": {"rope_theta": 10000.0}})


def test_a_llama_3_scaling_keeps_all_its_numbers() -> None:
    rope = LLAMA3_ROPE | {"factor": 8, "low_freq_factor": 2, "original_max_position_embeddings": 4096}
    assert spec_from_config(QWEN25_7B | {"rope_scaling": rope}, "x").rope_scaling == RopeScaling(8.0, 2.0, 4.0, 4096)


@pytest.mark.parametrize(
    "field",
    [
        "model_type",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "vocab_size",
        "max_position_embeddings",
    ],
)
def test_a_missing_required_field_is_refused_by_name(field: str) -> None:
    assert refused(without(LLAMA3_8B, field)).startswith(f"stranger: {field} is missing; supported: ")


@pytest.mark.parametrize(
    ("base", "changes", "window"),
    [
        (MISTRAL_7B, {"sliding_window": 4096}, 4096),
        (without(MISTRAL_7B, "sliding_window"), {}, 4096),
        (MISTRAL_7B, {"sliding_window": None}, None),
        (MISTRAL_7B, {"sliding_window": 32768}, None),  # as far as the model reaches
        (QWEN25_7B, {"use_sliding_window": False, "sliding_window": 1024}, None),
        (QWEN25_7B, {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 28}, None),
        (QWEN25_7B, {"use_sliding_window": True, "sliding_window": 1024, "max_window_layers": 27}, 1024),
        (QWEN3_06B, {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention"] * 28}, None),
    ],
)
def test_a_window_is_read_where_some_layer_has_one(base: Config, changes: Config, window: int | None) -> None:
    assert spec_from_config(base | changes, "x").window == window


@pytest.mark.parametrize(
    ("base", "changes", "marks"),
    [
        (MISTRAL_7B, {"sliding_window": 4096}, ()),
        (QWEN25_7B, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 27}, (*[False] * 27, True)),
        (SMOLLM3_3B, {"use_sliding_window": True, "sliding_window": 9, "layer_types": None}, (*[False] * 3, True) * 9),
    ],
)
def test_the_layers_with_a_window_are_those_of_transformers(
    base: Config, changes: Config, marks: tuple[bool, ...]
) -> None:
    assert spec_from_config(base | changes, "x").windowed == marks


@pytest.mark.parametrize("family", ["llama", "glm4", "granite", "olmo2"])
def test_a_family_without_windows_reaches_as_far_as_the_caches_of_transformers_keep_rows(family: str) -> None:
    config = LLAMA3_8B | {"model_type": family, "architectures": [FAMILIES[family].architecture]}
    spec = spec_from_config(config | {"sliding_window": 1024}, "x")
    assert (spec.window, spec.max_position) == (None, 1024)


@pytest.mark.parametrize(
    ("base", "fields", "told"),
    [
        (LLAMA3_8B, {"logits_scaling": 8.0, "scale_depth": None, "num_experts": 0}, ("logits_scaling 8.0",)),
        (LLAMA3_8B, {"use_qk_norm": True, "qkv_bias": False}, ("use_qk_norm true",)),
        (LLAMA3_8B, {"eos_token_id": [128001, 128256]}, ("eos_token_id [128001, 128256]",)),
        (LLAMA3_8B, {"eos_token_id": -1}, ("eos_token_id -1",)),
        (QWEN25_7B, {"attention_bias": False}, ("attention_bias false",)),
        (MISTRAL_7B, {"mlp_bias": True, "attention_bias": False}, ("mlp_bias true",)),
        (LLAMA3_8B, {"mlp_bias": False, "auto_map": {"AutoTokenizer": ["tokenization.Own", None]}}, ()),
    ],
)
def test_fields_that_transformers_does_not_read_change_nothing_and_are_told(
    base: Config, fields: Config, told: tuple[str, ...], tmp_path: Path
) -> None:
    assert spec_from_config(base | fields, "x") == spec_from_config(base, "x")
    (tmp_path / "config.json").write_text(json.dumps(base | fields))
    assert unread_fields(tmp_path) == (told, ())


@pytest.mark.parametrize("config", [None, [], "llama", 3, True])
def test_a_config_that_is_no_object_is_refused(config: object) -> None:
    assert "supported: an object" in refused(config)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"hidden_size": ' + b"9" * 5000 + b"}",
        b" " * (4 * 1024**2 + 1),
        b"null",
    ],
    ids=["empty", "cut", "binary", "deep", "long number", "large", "null"],
)
def test_a_file_that_is_no_config_is_refused_in_one_line(raw: bytes, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(raw)
    with pytest.raises(UnsupportedModelError) as caught:
        load_spec(file)
    assert str(caught.value).isprintable()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe", Path("/dev/zero"), Path("a\0b")):
        with pytest.raises(UnsupportedModelError):
            load_spec(path)


def test_a_file_with_another_name_names_the_spec(tmp_path: Path) -> None:
    file = tmp_path / "my-llama.json"
    file.write_text(json.dumps(LLAMA3_8B))
    assert load_spec(file).name == "my-llama"


def test_a_snapshot_in_the_hubs_cache_is_named_after_its_repository(tmp_path: Path) -> None:
    blob = tmp_path / "models--acme--Tiny-1B" / "blobs" / "b10b"
    snapshot = tmp_path / "models--acme--Tiny-1B" / "snapshots" / "c0ffee"
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_text(json.dumps(LLAMA3_8B))
    (snapshot / "config.json").symlink_to(blob)
    assert load_spec(snapshot).name == "Tiny-1B"


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
ROPES = st.dictionaries(st.sampled_from([*LLAMA3_ROPE, "type", "rope_theta"]) | st.text(max_size=5), JSON, max_size=4)
FIELDS = st.sampled_from(sorted({*LLAMA32_1B, *QWEN3_06B, "sliding_window", "layer_types", "rope_parameters"}))


def answers_in_one_line(config: object) -> None:
    try:
        spec = spec_from_config(config, "stranger")
    except UnsupportedModelError as error:
        assert str(error).isprintable()
    else:
        assert count_params(spec) > 0


@given(JSON)
def test_no_json_raises_anything_else(config: object) -> None:
    answers_in_one_line(config)


@given(
    st.sampled_from([LLAMA32_1B, MISTRAL_7B, QWEN25_7B, QWEN3_06B]), st.dictionaries(FIELDS, JSON | ROPES, max_size=3)
)
def test_no_mutation_of_a_real_config_raises_anything_else(base: Config, changes: Config) -> None:
    answers_in_one_line(base | changes)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "config.json"
    file.write_bytes(raw)
    with pytest.raises(UnsupportedModelError):
        load_spec(file)


def test_a_multimodal_config_is_read_by_its_text_part() -> None:
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
        "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}, "mm_tokens_per_image": 256,
    }  # fmt: skip
    assert spec_from_config(config, "gemma3-4b") == CATALOG["gemma3-4b"]
    with pytest.raises(UnsupportedModelError, match=r"^x: text_config is not an object; supported: "):
        spec_from_config({**config, "text_config": None}, "x")


GEMMA4_12B = {
    "attention_k_eq_v": True, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3840, "hidden_size_per_layer_input": 0,
    "intermediate_size": 15360, "max_position_embeddings": 262144, "model_type": "gemma4_unified_text",
    "num_attention_heads": 16, "num_global_key_value_heads": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
    "num_kv_shared_layers": 0, "sliding_window": 1024, "use_double_wide_mlp": False, "vocab_size": 262144,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
}  # fmt: skip


def test_contexts_end_where_queries_would_be_scaled_by_their_position() -> None:
    config = {"model_type": "ministral3"}
    assert spec_from_config(config, "ministral3-8b") == CATALOG["ministral3-8b"]
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 64}
    scaled, unscaled = (config | {"rope_parameters": rope | {"llama_4_scaling_beta": beta}} for beta in (0.2, 0))
    assert [spec_from_config(each, "x").max_position for each in (scaled, unscaled)] == [64, 262144]
    assert "llama_4_scaling_beta is missing" in refused(config | {"rope_parameters": rope})


def test_the_text_part_of_a_multimodal_model_may_be_of_another_family() -> None:
    around = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "vision_config": {}}
    text = MISTRAL_7B | {"architectures": None}
    assert spec_from_config(around | {"text_config": text}, "x") == spec_from_config(MISTRAL_7B, "x")
    assert spec_from_config(around | {"text_config": {"model_type": "ministral3"}}, "x").family == "ministral3"


def test_heads_of_layers_without_a_window_are_read_as_both_releases_write_them() -> None:
    around = {"architectures": ["Gemma4UnifiedForConditionalGeneration"], "model_type": "gemma4_unified"}
    assert spec_from_config(around | {"text_config": GEMMA4_12B}, "gemma4-12b") == CATALOG["gemma4-12b"]
    heads = {"head_dim": 512, "num_key_value_heads": 1}
    of_layers = {f"{layer:02d}": heads for layer in range(5, 48, 6)}
    new = {key: value for key, value in GEMMA4_12B.items() if "global" not in key} | {"per_layer_config": of_layers}
    assert spec_from_config(around | {"text_config": new}, "gemma4-12b") == CATALOG["gemma4-12b"]
    for other in ({**of_layers, "11": {"head_dim": 256}}, {**of_layers, "04": heads}, {"05": heads}, []):
        assert "per_layer_config" in refused(new | {"per_layer_config": other})
    for none in ({}, None):  # the first one is what transformers writes where they are no others
        alike = spec_from_config(new | {"per_layer_config": none}, "x").of_layer(5)
        assert (alike.head_dim, alike.n_kv_heads) == (256, 8)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input is 256; supported: 0"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers is 2; supported: 0"),
        ({"enable_moe_block": True}, "enable_moe_block is true; supported: false"),
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types is "),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is "),
    ],
)
def test_what_gemma_4_has_beyond_what_runs_is_refused_by_its_key(fields: Config, message: str) -> None:
    assert message in refused(GEMMA4_12B | fields)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("gemma2", {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, "sliding_window is null"),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8, "layer_types": ["sliding_attention"] * 3},
         "use_sliding_window is false"),
        ("mistral", {"sliding_window": 1}, "sliding_window is 1; supported: an integer from 2"),
        ("olmo3", {"rope_parameters": {"full_attention": {
            "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "truncate": False,
            "original_max_position_embeddings": 16}, "sliding_attention": {"rope_theta": 1e4}}}, "truncate is false"),
    ],
)  # fmt: skip
def test_what_transformers_reads_otherwise_is_refused_by_its_own_key(
    family: str, fields: Config, message: str
) -> None:
    assert message in refused(base_of(family) | fields)


def test_gemma_3_has_no_cap_of_scores_whatever_its_config_says(tmp_path: Path) -> None:
    config = base_of("gemma3_text") | {"attn_logit_softcapping": 2.0}
    assert spec_from_config(config, "x").attention_cap is None
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert unread_fields(tmp_path) == (("attn_logit_softcapping 2.0",), ())


def test_layers_without_a_window_have_no_rope_however_wide_the_window_of_others_is() -> None:
    spec = spec_from_config(base_of("cohere2") | {"sliding_window": 4096, "max_position_embeddings": 64}, "x")
    assert [spec.rope_of(layer) is None for layer in range(spec.n_layers)] == [False] * 3
    kinds = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    wide = spec_from_config(base_of("cohere2") | kinds | {"sliding_window": 4096, "max_position_embeddings": 64}, "x")
    assert [wide.rope_of(layer) is None for layer in range(3)] == [False, True, True]
