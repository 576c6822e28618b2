"""Gemma 4 unified, of models that read images and sounds without encoders: Gemma 4's layers with other defaults.
Source: huggingface/transformers, `models/gemma4_unified`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flywheel.models.families import gemma4
from flywheel.models.family import Family

FAMILY: Final[Family] = replace(
    gemma4.FAMILY, name="gemma4_unified_text", architecture="Gemma4UnifiedForCausalLM", text_of="gemma4_unified",
    sliding_window=1024,
    defaults={**gemma4.FAMILY.defaults, "max_position_embeddings": 262144, "hidden_size_per_layer_input": 0},
)  # fmt: skip
