"""Command R: LayerNorms without biases, one for attention and MLP side by side, and RoPE of neighbouring elements.
Source: huggingface/transformers, `models/cohere`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from flywheel.models.config_fields import OFF, Neutral
from flywheel.models.config_reading import Fields
from flywheel.models.family import Family

NORM_EPS: Final = ("layer_norm_eps", 1e-5)
_LOGIT_SCALE: Final = 0.0625
_NEUTRAL: Final[Neutral] = MappingProxyType({"use_qk_norm": OFF})


def read(fields: Fields) -> dict[str, Any]:
    """The spec's further fields."""
    fields.check_neutral(_NEUTRAL)
    scale = fields.positive_float("logit_scale", absent=_LOGIT_SCALE)
    return {"norm": "layer", "norms": "shared", "logits_scale": scale}


FAMILY: Final = Family(
    "cohere", "CohereForCausalLM", rope_theta=5e5, interleaved=True, tied_head=True, norm_eps=NORM_EPS,
    biases=("attention_bias",), tokenizer="CohereTokenizer", read=read, reads=("logit_scale", *_NEUTRAL),
)  # fmt: skip
