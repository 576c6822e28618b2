"""Llama 2 and 3, and models of the same structure. Source: huggingface/transformers, `models/llama`."""

from __future__ import annotations

from typing import Final

from flywheel.models.family import Family

FAMILY: Final = Family("llama", "LlamaForCausalLM", biases=("attention_bias", "mlp_bias"), tokenizer=None)
