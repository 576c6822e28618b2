"""OLMo 2: norms behind attention and MLP, and of whole rows of queries and keys. Source: huggingface/transformers,
`models/olmo2`."""

from __future__ import annotations

from typing import Final

from flywheel.models.family import Family

FAMILY: Final = Family(
    "olmo2", "Olmo2ForCausalLM", norm_eps=("rms_norm_eps", 1e-5), qk_norm=True, biases=("attention_bias",),
    read=lambda _: {"norms": "behind", "wide_qk_norm": True},
)  # fmt: skip
