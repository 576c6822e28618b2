"""Qwen 2 and 2.5: Llama's layers with biases of q, k and v. Source: huggingface/transformers, `models/qwen2`."""

from __future__ import annotations

from typing import Final

from flywheel.models.family import WINDOW, Family, in_later_layers

FAMILY: Final = Family(
    "qwen2", "Qwen2ForCausalLM", n_kv_heads=32, sliding_window=WINDOW, window_needs_flag=True,
    windows=in_later_layers, qkv_bias=True, tokenizer="Qwen2Tokenizer", tokenizer_wins=True,
)  # fmt: skip
