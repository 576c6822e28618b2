"""Fields of a `config.json` that may ask for another arithmetic, and the values that do not. Source: transformers 5.23,
the `models/` of the families, and its `cache_utils.py` and `masking_utils.py`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

Neutral = Mapping[str, tuple[object, ...]]
"""Field -> the values that leave the arithmetic and the weights alone. Absent and null do, too."""

OFF: Final = (False,)
NONE: Final = (0, False)
ONE: Final = (1,)

NEUTRAL: Final[Neutral] = MappingProxyType(
    {
        "attention_chunk_size": (),
        "is_causal": (True,),
        # another model around or in place of this one
        "quantization": (),
        "compression_config": ({},),
        "text_config": (),
        "vision_config": (),
        "audio_config": (),
        "per_layer_config": (),
        "pruned_heads": ({},),
        "is_encoder_decoder": OFF,
        "add_cross_attention": OFF,
    }
)
"""Fields that are refused with any other value."""

FOREIGN: Final[Neutral] = MappingProxyType(
    {
        # attention
        "rotary_pct": ONE,
        "rotary_dim": (),
        "rope_interleaved": OFF,
        "rope_traditional": OFF,
        "no_rope_layers": (),
        "no_rope_layer_interval": (),
        "use_mrope": OFF,
        "alibi": OFF,
        "use_bidirectional_attention": OFF,
        "clip_qkv": (),
        "qk_layernorm": OFF,
        "attention_multiplier": (),
        "query_pre_attn_scalar": (),
        "attn_logit_softcapping": (),
        "attn_temperature_tuning": OFF,
        "llama_4_scaling": (),
        "elementwise_attn_output_gate": OFF,
        "headwise_attn_output_gate": OFF,
        "attn_output_gate": OFF,
        "num_kv_shared_layers": NONE,
        # biases
        "attention_out_bias": OFF,
        "lm_head_bias": OFF,
        "use_bias": OFF,
        "bias": OFF,
        # mixture of experts
        "num_experts": NONE,
        "num_local_experts": NONE,
        "num_experts_per_tok": NONE,
        "n_routed_experts": NONE,
        "n_shared_experts": NONE,
        "moe_num_experts": NONE,
        "moe_intermediate_size": NONE,
        "shared_expert_intermediate_size": NONE,
        # norms and scales
        "normalization_function": ("rmsnorm",),
        "logit_scale": ONE,
        "logits_scaling": ONE,
        "residual_multiplier": ONE,
        "embedding_multiplier": ONE,
        "lm_head_multiplier": ONE,
        "scale_emb": ONE,
        "scale_depth": (),
        "dim_model_base": (),
        "final_logit_softcapping": (),
        "parallel_residual": OFF,
        "use_parallel_residual": OFF,
    }
)
"""Fields of other models. transformers' classes of these families do not read them."""
