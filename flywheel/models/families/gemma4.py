"""Gemma 4 without experts, embeddings of layers and shared caches: as Gemma 3, with plain weights of norms, norms of
values, a factor of each layer, and other heads in the layers without a window, where keys may be values; also the text
part of multimodal checkpoints. Source: huggingface/transformers, `models/gemma4`."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.families.gemma2 import cap_of
from flywheel.models.family import Family
from flywheel.models.spec import MAX_HEADS, MAX_LAYERS

_KINDS: Final = ("full_attention", "sliding_attention")
_OF_LAYERS: Final = "per_layer_config"
_PLACES: Final = "hidden_size_per_layer_input"
_SIZE, _HEADS, _K_IS_V = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"
_CAP, _ROPES, _TYPES = "final_logit_softcapping", "rope_parameters", "layer_types"
_NEUTRAL: Final = {
    "use_bidirectional_attention": ("vision",), "enable_moe_block": (False,), "num_kv_shared_layers": (0,),
    "rope_theta": (), "rope_scaling": (),
}  # fmt: skip


def _windows(_: Fields, n_layers: int) -> list[bool]:
    """One layer in six has none, the last of them, and the last of all."""
    return [(layer + 1) % 6 != 0 for layer in range(n_layers - 1)] + [False]


def _read(fields: Fields) -> dict[str, Any]:
    fields.check_neutral(_NEUTRAL)
    if fields.values[_ROPES] is None:
        raise fields.refusal(_ROPES, "an object, or absent")
    if fields.whole(_PLACES, absent=256):
        raise fields.refusal(_PLACES, "0, no embeddings of layers")
    return {
        "norms": "around", "v_norm": True, "layer_scalar": True, "attention_scale": 1.0,
        "embed_scale": sqrt(fields.positive_int("hidden_size")), "embed_scale_rounds": True,
        "logits_cap": cap_of(fields, _CAP, None), **_heads(fields),
    }  # fmt: skip


def _heads(fields: Fields) -> dict[str, Any]:
    """The heads of the layers without a window, where they are others."""
    count, kinds = fields.positive_int("num_hidden_layers", MAX_LAYERS), fields.values.get(_TYPES)
    if kinds is None:
        kinds = [_KINDS[window] for window in _windows(fields, count)]
    if not isinstance(kinds, list) or any(kind not in _KINDS for kind in kinds) or kinds[-1:] != [_KINDS[0]]:
        raise fields.refusal(_TYPES, f"{' or '.join(_KINDS)}, with {_KINDS[0]} last")
    k_is_v = fields.flag(_K_IS_V, absent=False)
    size = 512 if _SIZE not in fields.values else fields.positive_int(_SIZE)
    heads = None if fields.values.get(_HEADS) is None else fields.positive_int(_HEADS, MAX_HEADS)
    own = _of_layers(fields, kinds) if _OF_LAYERS in fields.values else (size, heads if k_is_v else None)
    return {"full_head_dim": own[0], "full_kv_heads": own[1], "full_k_is_v": k_is_v}


def _of_layers(fields: Fields, kinds: list[str]) -> tuple[int | None, int | None]:
    """(head_dim, num_key_value_heads) of the layers without a window, as transformers 5.23 writes them."""
    given = fields.values[_OF_LAYERS]
    if given is None or given == {}:  # which says that they are no others
        return None, None
    full = [str(layer) for layer, kind in enumerate(kinds) if kind == _KINDS[0]]
    listed = dict(given) if isinstance(given, Mapping) else {}
    same = [each for each in listed.values() if each != next(iter(listed.values()))] == []
    if sorted(str(key).lstrip("0") or "0" for key in listed) != sorted(full) or not same:
        raise fields.refusal(_OF_LAYERS, f"the same for each layer of {_KINDS[0]}, and for no other")
    own = next(iter(listed.values()))
    if not isinstance(own, Mapping) or not own.keys() <= {"head_dim", "num_key_value_heads"}:
        raise fields.refusal(_OF_LAYERS, "head_dim and num_key_value_heads of layers")
    section = Fields(fields.source, f"{_OF_LAYERS}.{full[0]}.", own)
    size, heads = (section.positive_int(key) if key in own else None for key in ("head_dim", "num_key_value_heads"))
    return size, heads


FAMILY: Final = Family(
    "gemma4_text", "Gemma4ForCausalLM", n_kv_heads=4, head_dim=256, rope_theta=1e6,
    rope_types=("default", "proportional"), local_rope=(None, 1e4), tied_head=True, sliding_window=512,
    windows=_windows, activation="gelu_tanh", activation_field="hidden_activation", qk_norm=True,
    biases=("attention_bias",), read=_read, text_of="gemma4",
    reads=(*_NEUTRAL, _PLACES, _SIZE, _HEADS, _K_IS_V, _CAP, _OF_LAYERS), tokenizer=None,
    irrelevant=(
        "vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts", "moe_intermediate_size",
    ),
    defaults={
        "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
        "num_attention_heads": 8, "max_position_embeddings": 131072,
        _ROPES: {
            _KINDS[0]: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
            _KINDS[1]: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)  # fmt: skip
