"""Qwen 3: Llama's layers with a norm of each query and key head. Source: huggingface/transformers, `models/qwen3`."""

from __future__ import annotations

from typing import Final

from flywheel.models.family import WINDOW, Family, in_later_layers

FAMILY: Final = Family(
    "qwen3", "Qwen3ForCausalLM", n_kv_heads=32, head_dim=128, sliding_window=WINDOW, window_needs_flag=True,
    windows=in_later_layers, qk_norm=True, biases=("attention_bias",), tokenizer="Qwen2Tokenizer",
)  # fmt: skip
