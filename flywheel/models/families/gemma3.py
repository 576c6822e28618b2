"""Gemma 3: as Gemma 2, with norms of each query and key head, a RoPE of their own for layers with a window, and without
caps; also the text part of multimodal checkpoints. Source: huggingface/transformers, `models/gemma3`."""

from __future__ import annotations

from typing import Final

from flywheel.models.config_reading import Fields
from flywheel.models.families.gemma2 import READS, read_gemma
from flywheel.models.family import Family

_PATTERN: Final = "sliding_window_pattern"


def _windows(fields: Fields, n_layers: int) -> list[bool]:
    """One layer in so many has none, the last of them."""
    every = fields.whole(_PATTERN, absent=6)
    if every == 0:
        raise fields.refusal(_PATTERN, "an integer of at least 1")
    return [(layer + 1) % every != 0 for layer in range(n_layers)]


FAMILY: Final = Family(
    "gemma3_text", "Gemma3ForCausalLM", n_kv_heads=4, head_dim=256, rope_theta=1e6,
    local_rope=("rope_local_base_freq", 1e4), tied_head=True, sliding_window=4096, windows=_windows,
    activation="gelu_tanh", activation_field="hidden_activation", qk_norm=True, biases=("attention_bias",),
    read=lambda fields: read_gemma(fields, None), reads=(*READS, _PATTERN), text_of="gemma3",
    tokenizer="GemmaTokenizer",
    defaults={
        "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "max_position_embeddings": 131072,
    },
)  # fmt: skip
