"""GLM-4 9B of 2024: Llama's layers with biases of q, k and v, and RoPE of a half of each head, in interleaved pairs.

Source: huggingface/transformers, `models/glm`.
"""

from __future__ import annotations

from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.family import JOINED_MLP, Family


def read(fields: Fields) -> dict[str, Any]:
    """The spec's further fields: `attention_bias` is of q, k and v alone."""
    return {"qkv_bias": fields.flag("attention_bias", absent=True)}


FAMILY: Final = Family(
    "glm", "GlmForCausalLM", n_kv_heads=2, head_dim=128, norm_eps=("rms_norm_eps", 1.5625e-7), partial_rotary=0.5,
    interleaved=True, joined=(JOINED_MLP,), read=read, reads=("attention_bias",),
)  # fmt: skip
