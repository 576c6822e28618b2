"""Phi-3, 3.5 and 4: Llama's layers, with RoPE of longrope type or of a part of each head.

Source: huggingface/transformers, `models/phi3`.
"""

from __future__ import annotations

from typing import Final

from flywheel.models.family import JOINED_ATTENTION, JOINED_MLP, Family

FAMILY: Final = Family(
    "phi3", "Phi3ForCausalLM", norm_eps=("rms_norm_eps", 1e-5), rope_types=("default", "longrope"), partial_rotary=1.0,
    original_context=4096, joined=(JOINED_ATTENTION, JOINED_MLP),
    own_code=("configuration_phi3.Phi3Config", "modeling_phi3.Phi3ForCausalLM"),
)  # fmt: skip
