"""Phi-3, 3.5 and 4: Llama's layers, with RoPE of longrope type or of a part of each head.

Source: huggingface/transformers, `models/phi3`.
"""

from __future__ import annotations

from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.family import JOINED_ATTENTION, JOINED_MLP, Family, in_all_layers


def read(fields: Fields) -> dict[str, Any]:
    """No further field of the spec. transformers gives the window to all layers, whatever `layer_types` says."""
    fields.check_neutral({"layer_types": ()})
    return {}


FAMILY: Final = Family(
    "phi3", "Phi3ForCausalLM", norm_eps=("rms_norm_eps", 1e-5), rope_types=("default", "longrope"), partial_rotary=1.0,
    original_context=4096, windows=in_all_layers, joined=(JOINED_ATTENTION, JOINED_MLP), read=read,
    own_code=("configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"),
)  # fmt: skip
