"""Decoder dimensions as data, and the state-dict keys and shapes that they imply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import ConfigError, FlywheelError, UnsupportedModelError
from flywheel.models.rope import (
    FLOATS,
    MAX_CONTEXT,
    LongRope,
    Rope,
    Scaling,
    check_scaling,
    is_constant,
    rope_params,
    scaling_from_dict,
)

Shape = tuple[int, ...]

MAX_DIM: Final = 2**20
"""Largest dimension. The widest published decoders have under 2^17. The cost of a program and its search grows with
it."""

MAX_HEADS: Final = 4096
"""Most heads; a program has tasks and buffers for each."""

MAX_VOCAB: Final = 2**22
"""Largest vocabulary. The largest published have under 2^19."""

MAX_LAYERS: Final = 1024
"""Largest n_layers. The deepest published dense decoders have under 200; a program grows with each layer."""

MAX_LAYER_HEADS: Final = 2**14
"""Most KV heads of all layers together: each has caches and tasks of its own. The published dense decoders with the
most have under 10,000."""

_BOUNDS: Final = (
    ("hidden", MAX_DIM),
    ("intermediate", MAX_DIM),
    ("n_layers", MAX_LAYERS),
    ("n_heads", MAX_HEADS),
    ("n_kv_heads", MAX_HEADS),
    ("head_dim", MAX_DIM),
    ("vocab", MAX_VOCAB),
    ("max_position", MAX_CONTEXT),
)


_OPTIONAL_FACTORS: Final = ("attention_scale", "attention_cap", "logits_cap")
_FACTORS: Final = ("rope_theta", "norm_eps", "logits_scale", "embed_scale", "residual_scale", *_OPTIONAL_FACTORS)

_FLAGS: Final = (
    "tied_head", "qkv_bias", "qk_norm", "nope_full", "norm_bias", "wide_qk_norm", "gated", "o_bias", "mlp_bias",
    "embed_scale_rounds", "v_norm", "full_k_is_v", "layer_scalar",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder with grouped-query attention and a KV cache. By the defaults, layers have RMSNorms before attention and
    MLP, rotate-half RoPE over the whole head, attention to all positions, and SwiGLU.

    `intermediate` is the width of one of gate and up, `max_position` the longest context in tokens. With `tied_head`
    the output head is the embedding table.

    Raises UnsupportedModelError if `check_spec` does.
    """

    name: str
    family: str
    hidden: int
    intermediate: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab: int
    rope_theta: float
    norm_eps: float
    max_position: int
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    rope_scaling: Scaling | None = None
    window: int | None = None
    """The number of last positions to which layers with a window attend, itself included; None where none has one."""
    turned: tuple[bool, ...] = ()
    """Which layers have RoPE; behind the last, the list begins again. Empty: all."""
    windowed: tuple[bool, ...] = ()
    """Which layers have the window. Empty: all, if there is one."""
    local_rope: Rope | None = None
    """RoPE of the layers with a window, where it is another."""
    nope_full: bool = False
    """The layers without a window have no RoPE."""
    rotary_dim: int | None = None
    """How many elements of each head RoPE turns, the first pairs of elements i and i + head_dim / 2; None for all."""
    attention_scale: float | None = None
    """What scores are multiplied by; None for head_dim ** -0.5."""
    attention_cap: float | None = None
    """Scores x become cap * tanh(x / cap); None where they stay."""
    logits_cap: float | None = None
    """The same of logits."""
    logits_scale: float = 1.0
    """What logits are multiplied by."""
    embed_scale: float = 1.0
    """What embeddings are multiplied by."""
    embed_scale_rounds: bool = False
    """The multiplier is first rounded to the model's type."""
    residual_scale: float = 1.0
    """What attention and MLP are multiplied by before they are added to the residual stream."""
    norm: str = "rms"
    """One of NORMS."""
    norm_bias: bool = False
    norm_offset: float = 0.0
    """What is added to the weights of norms."""
    norms: str = "before"
    """Where norms stand: one of NORM_PLACES."""
    wide_qk_norm: bool = False
    """q/k norms are of all heads together, not of each."""
    activation: str = "silu"
    """One of ACTIVATIONS."""
    gated: bool = True
    """The MLP multiplies the activation of gate by up. Otherwise it has no gate: the activation is of up."""
    o_bias: bool = False
    mlp_bias: bool = False
    full_head_dim: int | None = None
    """`head_dim` of the layers without a window, where it is another."""
    full_kv_heads: int | None = None
    """The same of `n_kv_heads`."""
    full_k_is_v: bool = False
    """The layers without a window have no products of values: those of keys are values, too."""
    v_norm: bool = False
    """Each head's values have an RMSNorm without weights."""
    layer_scalar: bool = False
    """The residual stream behind each layer is multiplied by a weight of the layer, one number."""

    def __post_init__(self) -> None:
        check_spec(self)

    def of_layer(self, layer: int) -> DecoderSpec:
        """The decoder all of whose layers are as this one, where heads differ by layer; else the decoder itself."""
        return _of_kind(self, self.window_of(layer) is None) if self._differs else self

    @property
    def layer_kinds(self) -> Mapping[DecoderSpec, int]:
        """The decoders of `of_layer`, each with the number of its layers."""
        return Counter(map(self.of_layer, range(self.n_layers))) if self._differs else {self: self.n_layers}

    @property
    def _differs(self) -> bool:
        return self.full_head_dim is not None or self.full_kv_heads is not None or self.full_k_is_v

    @property
    def most_cached(self) -> tuple[int, int]:
        """(KV heads, head_dim) that have room for the cached rows of every layer."""
        kinds = self.layer_kinds
        return max(own.n_kv_heads for own in kinds), max(own.head_dim for own in kinds)

    def window_of(self, layer: int) -> int | None:
        """The number of last positions to which a layer attends, itself included; None for all."""
        return self.window if not self.windowed or self.windowed[layer] else None

    def rope_of(self, layer: int) -> Rope | None:
        """A layer's RoPE; None where its queries and keys are not turned."""
        local = self.window_of(layer) is not None
        if not self.has_rope(layer) or (self.nope_full and not local):
            return None
        return self.local_rope if local and self.local_rope is not None else Rope(self.rope_theta, self.rope_scaling)

    def check_context(self, context: int, raises: type[FlywheelError] = ConfigError) -> None:
        """Raises ConfigError, or `raises`, for a context that is not in 1..max_position."""
        if not 1 <= context <= self.max_position:
            raise raises(f"{self.name}: context {context} is not in 1..{self.max_position}")

    @property
    def turned_anew(self) -> int | None:
        """The number of tokens beyond which RoPE has other frequencies; None where they are the same in all contexts.
        """
        return self.rope_scaling.original_max_position if isinstance(self.rope_scaling, LongRope) else None

    def has_rope(self, layer: int) -> bool:
        """Whether a layer turns its queries and keys by RoPE."""
        return not self.turned or self.turned[layer % len(self.turned)]

    @property
    def q_width(self) -> int:
        """Rows of q_proj: all query heads."""
        return self.n_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Rows of k_proj, and of v_proj: all KV heads."""
        return self.n_kv_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.n_heads // self.n_kv_heads


@lru_cache(maxsize=64)
def _of_kind(spec: DecoderSpec, full: bool) -> DecoderSpec:
    same = replace(spec, windowed=(), full_head_dim=None, full_kv_heads=None, full_k_is_v=full and spec.full_k_is_v)
    if not full:
        return same
    n_kv_heads, head_dim = spec.full_kv_heads or spec.n_kv_heads, spec.full_head_dim or spec.head_dim
    return replace(same, window=None, n_kv_heads=n_kv_heads, head_dim=head_dim)


NORMS: Final = ("rms", "layer")
"""RMSNorm, and LayerNorm, which subtracts the mean."""

NORM_PLACES: Final = ("before", "behind", "around", "shared")
"""Norms before attention and MLP; behind them, before they are added; both; one for attention and MLP side by side."""

ACTIVATIONS: Final = ("silu", "gelu", "gelu_tanh")
"""SiLU; GELU by the error function; GELU by tanh."""


def spec_from_dict(given: Mapping[str, Any]) -> DecoderSpec:
    """The spec of `dataclasses.asdict`, or of what JSON made of that. Absent fields have their defaults.

    Raises TypeError for an unknown field or one of another type, and UnsupportedModelError as `check_spec`.
    """
    fields = dict(given)
    scaling, local = fields.get("rope_scaling"), fields.get("local_rope")
    if scaling is not None:
        fields["rope_scaling"] = scaling_from_dict(scaling)
    if local is not None:
        own: Any = Rope(**local).scaling
        fields["local_rope"] = Rope(local["theta"], None if own is None else scaling_from_dict(own))
    for listed in ("windowed", "turned"):
        if listed in fields:
            fields[listed] = tuple(fields[listed])
    if "nope_every" in fields:  # of before 2026-11-29: one layer in so many, the last of them, has no RoPE
        every = fields.pop("nope_every")
        fields["turned"] = () if every is None else (True,) * (every - 1) + (False,)
    return DecoderSpec(**fields)


MODEL_WEIGHT_KEYS: Final = MappingProxyType(
    {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "final_norm_bias": "model.norm.bias",
        "lm_head": "lm_head.weight",
    }
)
"""Role of a weight that exists once -> its Hugging Face state-dict key."""

LAYER_WEIGHT_KEYS: Final = MappingProxyType(
    {
        "input_norm": "model.layers.{i}.input_layernorm.weight",
        "input_norm_bias": "model.layers.{i}.input_layernorm.bias",
        "q_proj": "model.layers.{i}.self_attn.q_proj.weight",
        "k_proj": "model.layers.{i}.self_attn.k_proj.weight",
        "v_proj": "model.layers.{i}.self_attn.v_proj.weight",
        "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
        "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
        "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
        "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "o_proj": "model.layers.{i}.self_attn.o_proj.weight",
        "o_bias": "model.layers.{i}.self_attn.o_proj.bias",
        "post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "post_attention_norm_bias": "model.layers.{i}.post_attention_layernorm.bias",
        "pre_feedforward_norm": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "gate_proj": "model.layers.{i}.mlp.gate_proj.weight",
        "gate_bias": "model.layers.{i}.mlp.gate_proj.bias",
        "up_proj": "model.layers.{i}.mlp.up_proj.weight",
        "up_bias": "model.layers.{i}.mlp.up_proj.bias",
        "down_proj": "model.layers.{i}.mlp.down_proj.weight",
        "down_bias": "model.layers.{i}.mlp.down_proj.bias",
        "post_feedforward_norm": "model.layers.{i}.post_feedforward_layernorm.weight",
        "layer_scalar": "model.layers.{i}.layer_scalar",
    }
)
"""Role of a layer's weight -> the state-dict key that most families have, with `{i}` for the layer."""


def model_weight_key(spec: DecoderSpec, role: str) -> str:
    """State-dict key of a weight that exists once; a tied `lm_head` is the embedding table. Raises KeyError."""
    return MODEL_WEIGHT_KEYS["embed" if role == "lm_head" and spec.tied_head else role]


def layer_weight_key(role: str, layer: int) -> str:
    """State-dict key of one layer's weight. Raises KeyError."""
    return LAYER_WEIGHT_KEYS[role].format(i=layer)


def model_weight_shapes(spec: DecoderSpec) -> dict[str, Shape]:
    """Role -> shape of the weights that exist once; a tied head is absent. Matrices are [N_out, K_in]."""
    shapes: dict[str, Shape] = {"embed": (spec.vocab, spec.hidden), "final_norm": (spec.hidden,)}
    if spec.norm_bias:
        shapes["final_norm_bias"] = (spec.hidden,)
    return shapes if spec.tied_head else {**shapes, "lm_head": (spec.vocab, spec.hidden)}


def check_spec(spec: DecoderSpec) -> None:
    """Raises UnsupportedModelError, naming the field and its bound, for dimensions that no decoder can have."""
    optional = (
        ("window", MAX_CONTEXT), ("rotary_dim", spec.head_dim), ("full_head_dim", MAX_DIM),
        ("full_kv_heads", MAX_HEADS),
    )  # fmt: skip
    bounds = (*_BOUNDS, *[each for each in optional if getattr(spec, each[0]) is not None])
    for field, largest in bounds:
        value: object = getattr(spec, field)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise UnsupportedModelError(f"{spec.name}: {field}={value!r} is not an integer from 1 to {largest}")
    _check_values(spec)
    _check_heads(spec)
    _check_layers(spec)
    if spec.full_head_dim is not None or spec.full_kv_heads is not None:
        if spec.rotary_dim is not None:
            raise UnsupportedModelError(f"{spec.name}: rotary_dim={spec.rotary_dim} of heads that differ by layer")
        for layer in range(spec.n_layers):
            spec.of_layer(layer)  # raises for heads that cannot be
        return
    for rope in (Rope(spec.rope_theta, spec.rope_scaling), spec.local_rope):
        if rope is not None and rope.scaling is not None:
            check_scaling(spec.name, rope.scaling, spec.rotary_dim or spec.head_dim)
            for context in (1, MAX_CONTEXT):
                rope_params(rope, spec.head_dim, spec.rotary_dim, context)  # raises where it has no frequencies


def _check_values(spec: DecoderSpec) -> None:
    for field in _FACTORS:
        factor: object = getattr(spec, field)
        if factor is None and field in _OPTIONAL_FACTORS:
            continue
        if not is_constant(factor):
            raise UnsupportedModelError(f"{spec.name}: {field}={factor!r} is not {FLOATS}")
    choices = {"norm": NORMS, "norms": NORM_PLACES, "activation": ACTIVATIONS, "norm_offset": (0.0, 1.0)}
    for field, known in (choices | dict.fromkeys(_FLAGS, (False, True))).items():
        if getattr(spec, field) not in known:
            raise UnsupportedModelError(f"{spec.name}: {field}={getattr(spec, field)!r} is not one of {known}")
    if spec.residual_scale != 1 and spec.norms in ("behind", "around"):
        raise UnsupportedModelError(f"{spec.name}: residual_scale={spec.residual_scale!r} with norms {spec.norms} it")


def _check_layers(spec: DecoderSpec) -> None:
    marks = spec.windowed
    if marks and (len(marks) != spec.n_layers or any(type(mark) is not bool for mark in marks)):
        raise UnsupportedModelError(f"{spec.name}: windowed is not true or false for each of {spec.n_layers} layers")
    if not isinstance(spec.turned, tuple) or any(type(mark) is not bool for mark in spec.turned):
        raise UnsupportedModelError(f"{spec.name}: turned={spec.turned!r} is not a tuple of true and false")
    if any(marks) and spec.window is None:
        raise UnsupportedModelError(f"{spec.name}: windowed names layers, and there is no window")
    if spec.rotary_dim is not None and spec.rotary_dim % 2:
        raise UnsupportedModelError(f"{spec.name}: rotary_dim={spec.rotary_dim} is odd; RoPE rotates pairs")
    theta: object = 1.0 if spec.local_rope is None else spec.local_rope.theta
    if not is_constant(theta):
        raise UnsupportedModelError(f"{spec.name}: local_rope.theta={theta!r} is not {FLOATS}")


def _check_heads(spec: DecoderSpec) -> None:
    if spec.n_heads % spec.n_kv_heads:
        raise UnsupportedModelError(
            f"{spec.name}: n_heads={spec.n_heads} is not a multiple of n_kv_heads={spec.n_kv_heads}"
        )
    if (in_all := spec.n_layers * spec.n_kv_heads) > MAX_LAYER_HEADS:
        raise UnsupportedModelError(
            f"{spec.name}: n_layers={spec.n_layers} of n_kv_heads={spec.n_kv_heads} are {in_all:,} KV heads in all, "
            f"more than {MAX_LAYER_HEADS:,}"
        )
    if spec.head_dim % 2:
        raise UnsupportedModelError(f"{spec.name}: head_dim={spec.head_dim} is odd; RoPE rotates pairs")
    if max(spec.q_width, spec.kv_width) > MAX_DIM:
        raise UnsupportedModelError(f"{spec.name}: n_heads * head_dim = {spec.q_width} is above {MAX_DIM}")
