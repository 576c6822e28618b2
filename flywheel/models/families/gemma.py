"""Gemma 1: Llama's layers with norms of weights 1 + w, GELU, and embeddings that are multiplied. Source:
huggingface/transformers, `models/gemma`."""

from __future__ import annotations

from math import sqrt
from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.family import Family

_NEUTRAL: Final = {"use_bidirectional_attention": (False,), "hidden_activation": ("gelu_pytorch_tanh",)}


def read(fields: Fields) -> dict[str, Any]:
    """The spec's further fields. transformers reads no `hidden_activation`, which releases 4 wrote."""
    fields.check_neutral(_NEUTRAL)
    return {"norm_offset": 1.0, "embed_scale": sqrt(fields.positive_int("hidden_size")), "embed_scale_rounds": True}


FAMILY: Final = Family(
    "gemma", "GemmaForCausalLM", n_kv_heads=16, head_dim=256, tied_head=True, activation="gelu_tanh",
    activation_also=("gelu",), biases=("attention_bias",), tokenizer="GemmaTokenizer", read=read, reads=(*_NEUTRAL,),
    defaults={
        "vocab_size": 256000, "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28,
        "num_attention_heads": 16, "max_position_embeddings": 8192,
    },
)  # fmt: skip
