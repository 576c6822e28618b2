"""Command R7B: Command R's layers, most of which have a window and RoPE, and the others neither. Source:
huggingface/transformers, `models/cohere2`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from flywheel.models.config_fields import ONE, Neutral
from flywheel.models.config_reading import Fields
from flywheel.models.families import cohere
from flywheel.models.family import WINDOW, Family

_EVERY: Final = "sliding_window_pattern"
_PATTERN: Final = 4
"""Default of `sliding_window_pattern`: of so many layers the last has no window."""

_NEUTRAL: Final[Neutral] = MappingProxyType(
    {
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": ONE,
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
    }
)


def read(fields: Fields) -> dict[str, Any]:
    """The spec's further fields."""
    fields.check_neutral(_NEUTRAL)
    return {**cohere.read(fields), "nope_full": True}


def _windows(fields: Fields, n_layers: int) -> list[bool]:
    pattern = fields.values.get(_EVERY, _PATTERN)
    if type(pattern) is not int or pattern < 1:
        raise fields.refusal(_EVERY, "an integer of at least 1")
    return [(layer + 1) % pattern != 0 for layer in range(n_layers)]


FAMILY: Final = Family(
    "cohere2", "Cohere2ForCausalLM", interleaved=True, tied_head=True, norm_eps=cohere.NORM_EPS, sliding_window=WINDOW,
    windows=_windows, biases=("attention_bias",), tokenizer="CohereTokenizer", read=read,
    reads=(*cohere.FAMILY.reads, _EVERY, *_NEUTRAL),
)  # fmt: skip
