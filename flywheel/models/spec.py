"""Decoder dimensions as data, and the state-dict keys and shapes that they imply."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from flywheel.errors import ConfigError, FlywheelError, UnsupportedModelError

Shape = tuple[int, ...]

MAX_DIM: Final = 2**20
"""Largest dimension. The widest published decoders have under 2^17. The cost of a program and its search grows with
it."""

MAX_HEADS: Final = 4096
"""Most heads; a program has tasks and buffers for each."""

MAX_VOCAB: Final = 2**22
"""Largest vocabulary. The largest published have under 2^19."""

MAX_CONTEXT: Final = 2**31 - 1
"""Longest context: a program's params are int32."""

MAX_LAYERS: Final = 1024
"""Largest n_layers. The deepest published dense decoders have under 200; a program grows with each layer."""

MAX_LAYER_HEADS: Final = 2**14
"""Most KV heads of all layers together: each has caches and tasks of its own. The published dense decoders with the
most have under 10,000."""

MAX_FLOAT: Final = 1e308
"""Largest RoPE or norm constant: finite, whatever it is converted from."""

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


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3 frequency scaling: wavelengths beyond `original_max_position / low_freq_factor` are stretched by
    `factor`, those below `original_max_position / high_freq_factor` are kept, the ones between are interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A pre-norm decoder with SwiGLU, grouped-query attention and rotate-half RoPE over the whole head.

    `intermediate` is the width of one of gate and up, `max_position` the longest context in tokens. `qkv_bias` adds a
    bias to q, k and v only; `qk_norm` normalises each query and key head before RoPE. With `tied_head` the output head
    is the embedding table. `window` is the number of last positions to which some layer attends, itself included; None
    for all. Attention here is to all positions, so no longer context is supported. One layer in `nope_every` has no
    RoPE, the last of them; None where all have it.

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
    rope_scaling: RopeScaling | None = None
    window: int | None = None
    nope_every: int | None = None

    def __post_init__(self) -> None:
        check_spec(self)

    @property
    def reach(self) -> int:
        """The longest supported context."""
        return self.max_position if self.window is None else min(self.max_position, self.window)

    def check_context(self, context: int, raises: type[FlywheelError] = ConfigError) -> None:
        """Raises ConfigError, or `raises`, for a context that is not in 1..reach."""
        if 1 <= context <= self.reach:
            return
        if self.window is not None and self.window < context <= self.max_position:
            raise raises(f"{self.name}: context {context} exceeds sliding_window {self.window}; supported: up to that")
        raise raises(f"{self.name}: context {context} is not in 1..{self.max_position}")

    def has_rope(self, layer: int) -> bool:
        """Whether a layer turns its queries and keys by RoPE."""
        return self.nope_every is None or (layer + 1) % self.nope_every != 0

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


MODEL_WEIGHT_KEYS: Final = MappingProxyType(
    {
        "embed": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "lm_head": "lm_head.weight",
    }
)
"""Role of a weight that exists once -> its Hugging Face state-dict key."""

LAYER_WEIGHT_KEYS: Final = MappingProxyType(
    {
        "input_norm": "model.layers.{i}.input_layernorm.weight",
        "q_proj": "model.layers.{i}.self_attn.q_proj.weight",
        "k_proj": "model.layers.{i}.self_attn.k_proj.weight",
        "v_proj": "model.layers.{i}.self_attn.v_proj.weight",
        "q_bias": "model.layers.{i}.self_attn.q_proj.bias",
        "k_bias": "model.layers.{i}.self_attn.k_proj.bias",
        "v_bias": "model.layers.{i}.self_attn.v_proj.bias",
        "q_norm": "model.layers.{i}.self_attn.q_norm.weight",
        "k_norm": "model.layers.{i}.self_attn.k_norm.weight",
        "o_proj": "model.layers.{i}.self_attn.o_proj.weight",
        "post_attention_norm": "model.layers.{i}.post_attention_layernorm.weight",
        "gate_proj": "model.layers.{i}.mlp.gate_proj.weight",
        "up_proj": "model.layers.{i}.mlp.up_proj.weight",
        "down_proj": "model.layers.{i}.mlp.down_proj.weight",
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
    return shapes if spec.tied_head else {**shapes, "lm_head": (spec.vocab, spec.hidden)}


def check_spec(spec: DecoderSpec) -> None:
    """Raises UnsupportedModelError, naming the field and its bound, for dimensions that no decoder can have."""
    optional = (("window", MAX_CONTEXT), ("nope_every", MAX_LAYERS))
    bounds = (*_BOUNDS, *[each for each in optional if getattr(spec, each[0]) is not None])
    for field, largest in bounds:
        value: object = getattr(spec, field)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise UnsupportedModelError(f"{spec.name}: {field}={value!r} is not an integer from 1 to {largest}")
    for field in ("rope_theta", "norm_eps"):
        if not 0 < getattr(spec, field) <= MAX_FLOAT:
            raise UnsupportedModelError(f"{spec.name}: {field}={getattr(spec, field)!r} is not positive and finite")
    _check_heads(spec)
    if spec.rope_scaling is not None:
        _check_rope_scaling(spec.name, spec.rope_scaling)


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


def _check_rope_scaling(name: str, scaling: RopeScaling) -> None:
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if not 0 < scaling.factor <= MAX_FLOAT:
        raise UnsupportedModelError(f"{name}: rope_scaling.factor={scaling.factor!r} is not positive and finite")
    if not 0 < low < high <= MAX_FLOAT:
        raise UnsupportedModelError(
            f"{name}: rope_scaling.low_freq_factor={low!r} is not between 0 and high_freq_factor={high!r}"
        )
    if not 1 <= scaling.original_max_position <= MAX_CONTEXT:
        raise UnsupportedModelError(
            f"{name}: rope_scaling.original_max_position={scaling.original_max_position!r} is not from 1 to "
            f"{MAX_CONTEXT}"
        )
