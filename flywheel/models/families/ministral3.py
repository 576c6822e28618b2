"""Ministral 3: Mistral's layers, in contexts in which queries are not scaled by their position.

Source: huggingface/transformers, `models/ministral3`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.families import mistral
from flywheel.models.family import Family
from flywheel.models.rope import MAX_CONTEXT

_ROPE: Final = "rope_parameters"
_BETA: Final = "llama_4_scaling_beta"
_ORIGINAL: Final = "original_max_position_embeddings"


def _read(fields: Fields) -> dict[str, Any]:
    """The longest context is the original one: queries of later positions are multiplied by more than 1."""
    given = fields.values[_ROPE]
    if not isinstance(given, Mapping):
        raise fields.refusal(_ROPE, "an object, or absent")
    section = Fields(fields.source, f"{_ROPE}.", given)
    if type(given.get(_BETA)) in (int, float) and given[_BETA] == 0:
        return {}
    section.positive_float(_BETA)
    longest = fields.positive_int("max_position_embeddings", MAX_CONTEXT)
    return {"max_position": min(section.positive_int(_ORIGINAL, MAX_CONTEXT), longest)}


FAMILY: Final[Family] = replace(
    mistral.FAMILY, name="ministral3", architecture="Ministral3ForCausalLM", text_of=None, head_dim=128,
    norm_eps=("rms_norm_eps", 1e-5), sliding_window=None, rope_theta=1e6, read=_read,
    rope_keys=(_BETA, "max_position_embeddings"),
    defaults={
        "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 34,
        "num_attention_heads": 32, "max_position_embeddings": 262144,
        _ROPE: {
            "type": "yarn", "rope_theta": 1e6, "factor": 16.0, _ORIGINAL: 16384, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale_all_dim": 1.0, "mscale": 1.0, _BETA: 0.1,
        },
    },
)  # fmt: skip
