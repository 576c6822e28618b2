"""A family as a stranger would add it: norms behind attention and MLP, and of whole rows of queries and keys.

Source: huggingface/transformers, `models/olmo2`.
"""

from __future__ import annotations

from typing import Final

from flywheel.ir import InstructionKind
from flywheel.models.blocks import LayerWeight, activated_ops, attending_ops, norm_op, usual_weights
from flywheel.models.family import Family
from flywheel.models.graph import Op
from flywheel.models.spec import DecoderSpec

_ADD = InstructionKind.ADD


def weights(spec: DecoderSpec) -> dict[str, LayerWeight]:
    """Role -> weight of a layer."""
    found = usual_weights(spec)
    del found["input_norm"]
    behind = LayerWeight("model.layers.{i}.post_feedforward_layernorm.weight", (spec.hidden,))
    wide = {f"{side}_norm": found[f"{side}_norm"]._replace(shape=found[f"{side}_proj"].shape[:1]) for side in "qk"}
    return {**found, **wide, "post_feedforward_norm": behind}


def layers(spec: DecoderSpec, context: int, lanes: int) -> list[tuple[Op, ...]]:
    """The operations of each layer."""
    layer = (
        *attending_ops(spec, context, lanes, "x", norm_widths=(spec.q_width, spec.kv_width)),
        norm_op(spec, "attn_norm", "attn_out", "post_attention_norm", "attn_normed"),
        Op("attn_add", _ADD, ("attn_normed", "x"), "x_mid"),
        *activated_ops(spec, "x_mid"),
        norm_op(spec, "mlp_norm", "mlp_out", "post_feedforward_norm", "mlp_normed"),
        Op("mlp_add", _ADD, ("mlp_normed", "x_mid"), "x_out"),
    )
    return [layer] * spec.n_layers


FAMILY: Final = Family(
    "olmo2", "Olmo2ForCausalLM", layers, weights, rope_theta=5e5, qk_norm=True, biases=("attention_bias",)
)
