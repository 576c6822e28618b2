"""Tiny random checkpoints that transformers makes, of each family and of what its configs can say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONTEXT = 160
POSITIONS = (0, 1, 7, 63, 100, CONTEXT - 1)

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
WHOLE_LONG_ROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.1, 1.3, 1.5, 2.0, 3.0, 3.5, 3.9],
}
"""Of 16 elements of a head."""
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
    "llama-biased": ("Llama", dict(SIZES, attention_bias=True, mlp_bias=True, intermediate_size=128)),
    "cohere": ("Cohere", dict(SIZES, logit_scale=0.8, tie_word_embeddings=False)),
    "cohere2": ("Cohere2", dict(SIZES, logit_scale=0.8, sliding_window=CONTEXT, num_hidden_layers=4)),
    "mistral": ("Mistral", dict(SIZES, sliding_window=None)),
    "mistral-window": ("Mistral", dict(SIZES, sliding_window=37)),
    "mistral-short-window": ("Mistral", dict(SIZES, sliding_window=3)),
    "ministral3": (
        "Ministral3", dict(SIZES, head_dim=16, rope_parameters=YARN_ROPE | {
            "original_max_position_embeddings": 192, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
        }),
    ),
    "ministral": ("Ministral", dict(SIZES, head_dim=16, sliding_window=50, layer_types=[SLIDING, FULL, SLIDING])),
    "qwen2-window": ("Qwen2", dict(SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1)),
    "smollm3-window": ("SmolLM3", dict(SIZES, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=40,
                                       tie_word_embeddings=False)),
    "qwen2": ("Qwen2", dict(SIZES)),
    "qwen3": ("Qwen3", dict(SIZES, head_dim=32)),
    "qwen3-tied": ("Qwen3", dict(SIZES, head_dim=16, tie_word_embeddings=True)),
    "starcoder2": ("Starcoder2", dict(SIZES, intermediate_size=256, num_key_value_heads=4)),
    "starcoder2-plain": ("Starcoder2", dict(SIZES, use_bias=False, num_key_value_heads=4)),
    "smollm3": ("SmolLM3", dict(SIZES, num_hidden_layers=5)),
    "smollm3-untied": ("SmolLM3", dict(SIZES, no_rope_layers=[1, 0, 0], tie_word_embeddings=False)),
    "phi3": ("Phi3", dict(SIZES, rope_parameters={"partial_rotary_factor": 0.5})),
    "phi3-window": ("Phi3", dict(SIZES, sliding_window=23)),
    "phi3-long": ("Phi3", dict(SIZES, rope_parameters=WHOLE_LONG_ROPE, original_max_position_embeddings=64)),
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
    "gemma4": (
        "Gemma4", dict(SIZES, num_hidden_layers=4, head_dim=16, global_head_dim=32, num_key_value_heads=4,
                       num_global_key_value_heads=2, attention_k_eq_v=True, sliding_window=37,
                       layer_types=[SLIDING, FULL, SLIDING, FULL], hidden_size_per_layer_input=0,
                       final_logit_softcapping=2.0, tie_word_embeddings=False, rope_parameters={
                           FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 9e3},
                           SLIDING: {"rope_type": "default", "rope_theta": 300.0},
                       }),
    ),
    "gemma4-unified": (
        "Gemma4Unified", dict(SIZES, head_dim=16, global_head_dim=32, num_global_key_value_heads=1,
                              attention_k_eq_v=True, sliding_window=50, layer_types=[SLIDING, SLIDING, FULL],
                              tie_word_embeddings=False),
    ),
    "gemma4-values": (
        "Gemma4", dict(SIZES, head_dim=32, global_head_dim=16, sliding_window=CONTEXT, hidden_size_per_layer_input=0,
                       attention_bias=True, tie_word_embeddings=False),
    ),
    "smollm3-turned": ("SmolLM3", dict(SIZES, no_rope_layers=[1, 1, 1])),
}
"""Of transformers: what stands before ForCausalLM and Config, and the config's fields."""


def known(family: str) -> tuple[type[PreTrainedModel], Any]:
    """A family's class and config. Importing them takes seconds, which tests of other files need not wait for."""
    import transformers

    name, fields = FAMILIES[family]
    config = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig",
              "Gemma4Unified": "Gemma4UnifiedTextConfig"}.get(name, f"{name}Config")
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
            added_to = type(model).__name__.startswith(("Gemma2", "Gemma3", "GemmaFor"))
            mean = 1.0 if name.endswith("norm.weight") and not added_to else 0.0
            if type(model).__name__.startswith("Gemma4") and name.endswith("q_norm.weight"):
                mean, deviation = 0.2, 0.06  # scores are not divided by the root of head_dim
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + mean)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=shards)
    return kind.from_pretrained(folder, dtype=dtype).eval()
