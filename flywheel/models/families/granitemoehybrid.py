"""Granite 4 without experts and recurrent layers: Granite 3's layers, with RoPE or without.

Source: huggingface/transformers, `models/granitemoehybrid`.
"""

from __future__ import annotations

from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.families import granite
from flywheel.models.family import Family
from flywheel.models.spec import MAX_LAYERS

_EXPERTS: Final = "num_local_experts"
_POSITIONS: Final = "position_embedding_type"
_KINDS: Final = "layer_types"
_OTHER_KINDS: Final = "layers_block_type"
"""transformers' other name of _KINDS; it goes before."""

_ATTENTION: Final = ("attention", "full_attention")


def read(fields: Fields) -> dict[str, Any]:
    """The spec's further fields. By the defaults, layers are recurrent and have experts, and none has RoPE."""
    if fields.whole(_EXPERTS, absent=8):
        raise fields.refusal(_EXPERTS, "0")
    count = fields.positive_int("num_hidden_layers", MAX_LAYERS)
    kinds = fields.values.get(_OTHER_KINDS)
    if kinds is None and fields.values.get(_KINDS) is None:
        raise fields.refusal(_KINDS, '"attention" for each layer')
    alike = isinstance(kinds, list) and len(kinds) == count and all(kind in _ATTENTION for kind in kinds)
    if kinds is not None and not alike:
        raise fields.refusal(_OTHER_KINDS, f'"attention" for each of {count} layers')
    positions = fields.values.get(_POSITIONS)
    if positions is not None and not isinstance(positions, str):
        raise fields.refusal(_POSITIONS, '"rope", or "nope" or null for none')
    return {**granite.read(fields), "turned": () if positions == "rope" else (False,)}


FAMILY: Final = Family(
    "granitemoehybrid", "GraniteMoeHybridForCausalLM", intermediate="shared_intermediate_size",
    joined=(("shared_mlp.input_linear", ("gate_proj", "up_proj")), ("shared_mlp.output_linear", ("down_proj",))),
    biases=("attention_bias",), defaults={"shared_intermediate_size": 1024}, read=read,
    reads=(*granite.FAMILY.reads, _EXPERTS, _POSITIONS, _OTHER_KINDS),
    irrelevant=(
        "intermediate_size", "num_experts_per_tok", "output_router_logits", "router_aux_loss_coef", "time_step_limit",
        "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv", "mamba_expand",
        "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias",
    ),
)  # fmt: skip
