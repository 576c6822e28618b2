"""StarCoder2: layers of LayerNorms, an MLP without a gate, and biases. Source: huggingface/transformers,
`models/starcoder2`."""

from __future__ import annotations

from typing import Any, Final

from flywheel.models.config_reading import Fields
from flywheel.models.family import Family, in_all_layers


def read(fields: Fields) -> dict[str, Any]:
    """The spec's further fields. transformers gives the window to all layers, whatever `layer_types` says."""
    fields.check_neutral({"layer_types": ()})
    biased = fields.flag("use_bias", absent=True)
    return {
        "qkv_bias": biased, "o_bias": biased, "mlp_bias": biased, "norm": "layer", "norm_bias": True, "gated": False,
    }  # fmt: skip


FAMILY: Final = Family(
    "starcoder2", "Starcoder2ForCausalLM", n_kv_heads=2, windows=in_all_layers, tied_head=True,
    norm_eps=("norm_epsilon", 1e-5), activation="gelu_tanh", read=read, reads=("use_bias",),
    joined=(("c_fc", ("up_proj",)), ("c_proj", ("down_proj",))), tokenizer="GPT2Tokenizer",
)  # fmt: skip
