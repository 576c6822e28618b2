"""Mistral: Llama's layers, perhaps with a sliding window. Source: huggingface/transformers, `models/mistral`."""

from __future__ import annotations

from typing import Final

from flywheel.models.family import WINDOW, Family, in_all_layers

FAMILY: Final = Family(
    "mistral", "MistralForCausalLM", n_kv_heads=8, sliding_window=WINDOW, windows=in_all_layers, text_of="mistral3"
)  # fmt: skip
