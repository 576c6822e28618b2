"""Granite 3: Llama's layers with four multipliers. Source: huggingface/transformers, `models/granite`."""

from __future__ import annotations

from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.family import Family


def read(fields: Fields) -> dict[str, Any]:
    """The multipliers, of which `logits_scaling` divides."""
    return {
        "embed_scale": fields.positive_float("embedding_multiplier", absent=1.0),
        "residual_scale": fields.positive_float("residual_multiplier", absent=1.0),
        "attention_scale": fields.positive_float("attention_multiplier", absent=1.0),
        "logits_scale": 1 / fields.positive_float("logits_scaling", absent=1.0),
    }


FAMILY: Final = Family(
    "granite", "GraniteForCausalLM", biases=("attention_bias", "mlp_bias"), read=read,
    reads=("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"),
)  # fmt: skip
