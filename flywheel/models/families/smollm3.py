"""SmolLM3: Llama's layers, of which every fourth, say, has no RoPE. Source: huggingface/transformers, `models/smollm3`.
"""

from __future__ import annotations

from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.family import Family
from flywheel.models.spec import MAX_LAYERS

_INTERVAL: Final = 4
"""Default of `no_rope_layer_interval`."""


def in_plain_layers(fields: Fields, n_layers: int) -> list[bool]:
    """The layers without RoPE have the window."""
    return [not turned for turned in _turned(fields, n_layers)]


def _turned(fields: Fields, count: int) -> list[bool]:
    """Which layers have RoPE. `no_rope_layers` has a 1 for each layer with RoPE, and a 0 for each without; where it is
    absent, one layer in `no_rope_layer_interval` has none, the last of them."""
    listed = fields.values.get("no_rope_layers")
    interval = fields.values.get("no_rope_layer_interval", _INTERVAL)
    if type(interval) is not int or not 1 <= interval <= MAX_LAYERS:
        raise fields.refusal("no_rope_layer_interval", f"an integer from 1 to {MAX_LAYERS}")
    if listed is None:
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if not isinstance(listed, list) or len(listed) < count or any(type(each) is not int for each in listed):
        raise fields.refusal("no_rope_layers", f"an integer for each of {count} layers")
    return [bool(each) for each in listed[:count]]


def read(fields: Fields) -> dict[str, Any]:
    """The spec's further fields."""
    count = fields.positive_int("num_hidden_layers", MAX_LAYERS)
    turned = _turned(fields, count)
    period = next(size for size in range(1, count + 1) if turned[size:] == turned[:-size])
    return {"turned": () if all(turned) else tuple(turned[:period])}


FAMILY: Final = Family(
    "smollm3", "SmolLM3ForCausalLM", n_kv_heads=4, window_needs_flag=True, windows=in_plain_layers, rope_theta=2e6,
    tied_head=True, biases=("attention_bias", "mlp_bias"), read=read,
    reads=("no_rope_layers", "no_rope_layer_interval"), tokenizer=None,
)  # fmt: skip
