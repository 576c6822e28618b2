"""Gemma 2: norms before and behind attention and MLP, with weights 1 + w, and soft caps. Source:
huggingface/transformers, `models/gemma2`."""

from __future__ import annotations

from math import sqrt
from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.family import Family

READS: Final = ("query_pre_attn_scalar", "final_logit_softcapping", "use_bidirectional_attention")
"""Fields of Gemma that no other family has."""

_CAP: Final = "attn_logit_softcapping"


def read_gemma(fields: Fields, logits_cap: float | None) -> dict[str, Any]:
    """What all Gemmas have in common. `logits_cap` is the default of its field."""
    fields.check_neutral({"use_bidirectional_attention": (False,)})
    return {
        "norms": "around",
        "norm_offset": 1.0,
        "embed_scale": sqrt(fields.positive_int("hidden_size")),
        "embed_scale_rounds": True,
        "attention_scale": fields.positive_float("query_pre_attn_scalar", absent=256.0) ** -0.5,
        "logits_cap": cap_of(fields, "final_logit_softcapping", logits_cap),
    }


def cap_of(fields: Fields, name: str, absent: float | None) -> float | None:
    """A soft cap; None where its field is null, and `absent` where there is none."""
    if name not in fields.values:
        return absent
    return None if fields.values[name] is None else fields.positive_float(name)


def _read(fields: Fields) -> dict[str, Any]:
    return {**read_gemma(fields, 30.0), "attention_cap": cap_of(fields, _CAP, 50.0)}


def _windows(_: Fields, n_layers: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(n_layers)]


FAMILY: Final = Family(
    "gemma2", "Gemma2ForCausalLM", n_kv_heads=4, head_dim=256, tied_head=True, sliding_window=4096, windows=_windows,
    activation="gelu_tanh", activation_field="hidden_activation", biases=("attention_bias",),
    tokenizer="GemmaTokenizer",
    read=_read, reads=(*READS, _CAP),
    defaults={
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "max_position_embeddings": 8192,
    },
)  # fmt: skip
