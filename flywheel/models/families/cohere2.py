"""Command R7B: Command R's layers, most of which have a window and RoPE, and the others neither. Source:
huggingface/transformers, `models/cohere2`."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

from flywheel.models.config_fields import ONE, Neutral
from flywheel.models.config_reading import Fields
from flywheel.models.families import cohere
from flywheel.models.family import WINDOW, Family, in_all_layers
from flywheel.models.rope import MAX_CONTEXT
from flywheel.models.spec import MAX_LAYERS

_SLIDING: Final = "sliding_attention"
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
    """The spec's further fields. A layer without a window has no RoPE, however wide the others' window is."""
    fields.check_neutral(_NEUTRAL)
    count = fields.positive_int("num_hidden_layers", MAX_LAYERS)
    kinds = fields.values.get("layer_types")
    if kinds is None:
        pattern = fields.values.get("sliding_window_pattern", _PATTERN)
        if type(pattern) is not int or pattern < 1:
            raise fields.refusal("sliding_window_pattern", "an integer of at least 1")
        windowed = tuple([(layer + 1) % pattern != 0 for layer in range(count)])
    elif isinstance(kinds, list) and len(kinds) == count:
        windowed = tuple([kind == _SLIDING for kind in kinds])
    else:
        raise fields.refusal("layer_types", f"one for each of {count} layers")
    given = "sliding_window" in fields.values
    window = fields.positive_int("sliding_window", MAX_CONTEXT) if given else WINDOW
    marks = {"window": window, "windowed": windowed} if any(windowed) else {"window": None}
    return {**cohere.read(fields), **marks, "nope_full": True}


FAMILY: Final = Family(
    "cohere2", "Cohere2ForCausalLM", interleaved=True, tied_head=True, norm_eps=cohere.NORM_EPS, sliding_window=WINDOW,
    windows=in_all_layers, biases=("attention_bias",), tokenizer="CohereTokenizer", read=read,
    reads=(*cohere.FAMILY.reads, "sliding_window_pattern", *_NEUTRAL),
)  # fmt: skip
