"""What distinguishes a family of models: how its config is read, and the operations of its layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flywheel.models.blocks import LayerWeight, attention_ops, in_order, mlp_ops, usual_weights
from flywheel.models.config_reading import Fields
from flywheel.models.graph import Op
from flywheel.models.spec import DecoderSpec

WINDOW: Final = 4096
"""Default of `sliding_window` in families that have one."""

WINDOW_FROM: Final = 28
"""Default of `max_window_layers` in families that have it."""

WindowsOf = Callable[[Fields, int], Sequence[bool]]
"""(fields, number of layers) -> which layers have the window, where the config does not list them. Raises
UnsupportedModelError."""


def in_all_layers(_: Fields, n_layers: int) -> list[bool]:
    """Every layer has the window."""
    return [True] * n_layers


def in_later_layers(fields: Fields, n_layers: int) -> list[bool]:
    """The layers from `max_window_layers` on have the window."""
    first = fields.whole("max_window_layers", absent=WINDOW_FROM)
    return [layer >= first for layer in range(n_layers)]


JOINED_ATTENTION: Final = ("qkv_proj", ("q_proj", "k_proj", "v_proj"))
"""For `Family.joined`, of checkpoints with one matrix of queries, keys and values."""

JOINED_MLP: Final = ("gate_up_proj", ("gate_proj", "up_proj"))
"""For `Family.joined`, of checkpoints with one matrix of gate and up."""


AS_SAVED: Final = "TokenizersBackend"
"""For `Family.tokenizer`: the class that takes tokenizer.json as it is."""


def usual_layers(spec: DecoderSpec, context: int, lanes: int) -> list[tuple[Op, ...]]:
    """The operations of each layer: layers differ by their RoPE, their window and their heads alone."""
    kinds = [(spec.rope_of(layer), spec.window_of(layer)) for layer in range(spec.n_layers)]
    mlp = mlp_ops(spec)
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    attending = {kind: attention_ops(spec.of_layer(layer), context, lanes, layer) for kind, layer in first.items()}
    made = {kind: in_order(spec, ops, mlp) for kind, ops in attending.items()}
    return [made[kind] for kind in kinds]


@dataclass(frozen=True, slots=True)
class Family:
    """The behaviour of transformers' code for one `model_type`, also where a field of the config is absent."""

    name: str
    """`model_type`."""
    architecture: str
    layers: Callable[[DecoderSpec, int, int], Sequence[tuple[Op, ...]]] = usual_layers
    """(spec, context, lanes) -> the operations of each layer."""
    weights: Callable[[DecoderSpec], Mapping[str, LayerWeight]] = usual_weights
    """The weights of a layer by role: operations name them `ROLE.w`. Matrices have the roles of LAYER_MATRICES."""
    own_code: tuple[str, ...] = ()
    """Classes that repositories name in `auto_map` and that are what the family's code was made of."""
    n_kv_heads: int | None = None
    """None: as many as query heads."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    rope_theta: float = 10000.0
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    rope_keys: tuple[str, ...] = ()
    """Further keys of `rope_parameters`, which `read` reads."""
    partial_rotary: float | None = None
    """The part of each head that RoPE turns where `partial_rotary_factor` is absent; None where it is always all."""
    original_context: int | None = None
    """`original_max_position_embeddings` where that field is absent; None where RoPE's own counts."""
    joined: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """(a module of a checkpoint, or its parent and it; the modules whose weights it stores as one, row after row, in
    the order of LAYER_WEIGHT_KEYS)."""
    interleaved: bool = False
    """A checkpoint stores the elements of a pair that RoPE turns side by side."""
    tied_head: bool = False
    tokenizer: str | None = AS_SAVED
    """The class that transformers takes for its tokenizers; None where it takes the one that their files name."""
    tokenizer_wins: bool = False
    """Whether that class goes before a name in the files, as AS_SAVED always does."""
    sliding_window: int | None = None
    window_needs_flag: bool = False
    """sliding_window counts only with use_sliding_window."""
    windows: WindowsOf | None = None
    """None where transformers has no windows for the family: of `sliding_window`, its caches know alone."""
    local_rope: tuple[str | None, float] | None = None
    """(the field of the base of RoPE in layers with a window, its default), where these have a RoPE of their own: then
    `rope_parameters` has an object for each kind of layer."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    """Further fields that may be absent, with their defaults."""
    text_of: str | None = None
    """`model_type` of multimodal models whose `text_config` is of this family, where it does not name another."""
    norm_eps: tuple[str, float] = ("rms_norm_eps", 1e-6)
    """(the field of the norms' epsilon, its default)."""
    intermediate: str = "intermediate_size"
    """The field of the width of one of gate and up."""
    activation: str = "silu"
    """The activation that `activation_field` may name, one of spec.ACTIVATIONS."""
    activation_field: str = "hidden_act"
    activation_also: tuple[str, ...] = ()
    """Names of other activations that mean this one here."""
    qkv_bias: bool = False
    qk_norm: bool = False
    biases: tuple[str, ...] = ()
    """Which of the fields `attention_bias` (of q, k, v and o) and `mlp_bias` it has."""
    read: Callable[[Fields], dict[str, Any]] = lambda _: {}
    """Further fields of the spec, which go before those that follow from the fields above. Raises
    UnsupportedModelError."""
    reads: tuple[str, ...] = ()
    """The fields that `read` reads."""
    irrelevant: tuple[str, ...] = ()
    """Fields of its configuration class that change no logits of the models that `read` lets through."""
