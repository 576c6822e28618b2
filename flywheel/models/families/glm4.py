"""GLM-4 of 2025 (0414): GLM's layers, with norms before and behind attention and MLP.

Source: huggingface/transformers, `models/glm4`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from flywheel.models.blocks import LayerWeight, usual_weights
from flywheel.models.config_reading import Fields
from flywheel.models.families import glm
from flywheel.models.spec import DecoderSpec

_NORMS: Final = {
    "post_attention_norm": "post_self_attn_layernorm",
    "pre_feedforward_norm": "post_attention_layernorm",
    "post_feedforward_norm": "post_mlp_layernorm",
}
"""Role -> what this family calls it."""


def weights(spec: DecoderSpec) -> dict[str, LayerWeight]:
    """Role -> the weight of a layer."""
    own = {role: f"model.layers.{{i}}.{name}.weight" for role, name in _NORMS.items()}
    return {role: each._replace(key=own.get(role, each.key)) for role, each in usual_weights(spec).items()}


def read(fields: Fields) -> dict[str, Any]:
    """The spec's further fields."""
    return glm.read(fields) | {"norms": "around"}


FAMILY: Final = replace(glm.FAMILY, name="glm4", architecture="Glm4ForCausalLM", weights=weights, read=read)
