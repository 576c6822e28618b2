"""The operations that layers are made of, attention over a KV cache and a gated MLP, and their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final, NamedTuple

from flywheel.errors import UnsupportedModelError
from flywheel.ir import InstructionKind
from flywheel.models.graph import Op
from flywheel.models.rope import rope_params
from flywheel.models.spec import LAYER_WEIGHT_KEYS, DecoderSpec, Shape

_K: Final = InstructionKind


class LayerWeight(NamedTuple):
    """A weight that every layer has. Matrices are [N_out, K_in]."""

    key: str
    """Its state-dict key, with `{i}` for the layer."""
    shape: Shape


def usual_weights(spec: DecoderSpec) -> dict[str, LayerWeight]:
    """Role -> the weight of the operations below, in the order of LAYER_WEIGHT_KEYS."""
    apart, behind = spec.norms != "shared", spec.norms in ("behind", "around")
    hidden, inner, q, kv = (spec.hidden,), (spec.intermediate,), (spec.q_width,), (spec.kv_width,)
    sides = [("q", q), ("k", kv), ("v", kv)][: len(projected(spec))]
    parts: list[tuple[bool, dict[str, Shape]]] = [
        (spec.norms != "behind", {"input_norm": hidden}),
        (spec.norm_bias, {"input_norm_bias": hidden}),
        (True, {f"{side}_proj": width + hidden for side, width in sides}),
        (spec.qkv_bias, {f"{side}_bias": width for side, width in sides}),
        (spec.qk_norm, {f"{side}_norm": (width,) for side, width in zip("qk", _qk_widths(spec), strict=True)}),
        (True, {"o_proj": hidden + q}),
        (spec.o_bias, {"o_bias": hidden}),
        (apart, {"post_attention_norm": hidden}),
        (apart and spec.norm_bias, {"post_attention_norm_bias": hidden}),
        (spec.norms == "around", {"pre_feedforward_norm": hidden}),
        (spec.gated, {"gate_proj": inner + hidden}),
        (spec.gated and spec.mlp_bias, {"gate_bias": inner}),
        (True, {"up_proj": inner + hidden}),
        (spec.mlp_bias, {"up_bias": inner}),
        (True, {"down_proj": hidden + inner}),
        (spec.mlp_bias, {"down_bias": hidden}),
        (behind, {"post_feedforward_norm": hidden}),
        (spec.layer_scalar, {"layer_scalar": (1,)}),
    ]
    shapes = {role: shape for there, part in parts if there for role, shape in part.items()}
    return {role: LayerWeight(LAYER_WEIGHT_KEYS[role], shape) for role, shape in shapes.items()}


def projected(spec: DecoderSpec) -> str:
    """The sides of an attention that have products of their own. Without one, values are the products of keys."""
    return "qk" if spec.full_k_is_v else "qkv"


def _qk_widths(spec: DecoderSpec) -> tuple[int, int]:
    """The widths of q_norm and k_norm."""
    return (spec.q_width, spec.kv_width) if spec.wide_qk_norm else (spec.head_dim, spec.head_dim)


def attention_ops(spec: DecoderSpec, context: int, lanes: int, layer: int = 0) -> list[Op]:
    """From the residual stream `x` to `x_mid`, as one layer does it, with its norms."""
    before = [] if spec.norms == "behind" else [norm_op(spec, "attn_norm", "x", "input_norm", "attn_in")]
    inner = attending_ops(spec, context, lanes, before[0].output if before else "x", layer)
    return [*before, *inner, *_added(spec, "attn", "post_attention_norm", "x", "x_mid")]


def mlp_ops(spec: DecoderSpec) -> list[Op]:
    """From the residual stream `x_mid` to `x_out`, with its norms. A norm that is shared is of `x`, once more. Where
    layers have a scalar, the last addition multiplies by it."""
    x, role = {
        "around": ("x_mid", "pre_feedforward_norm"), "shared": ("x", "input_norm"),
    }.get(spec.norms, ("x_mid", "post_attention_norm"))  # fmt: skip
    before = [] if spec.norms == "behind" else [norm_op(spec, "mlp_norm", x, role, "mlp_in")]
    inner = activated_ops(spec, before[0].output if before else "x_mid")
    *behind, add = _added(spec, "mlp", "post_feedforward_norm", "x_mid", "x_out")
    scalar = ("layer_scalar.w",) if spec.layer_scalar else ()
    return [*before, *inner, *behind, replace(add, inputs=add.inputs + scalar)]


def _added(spec: DecoderSpec, part: str, role: str, x: str, out: str) -> list[Op]:
    """From `PART_out` and the residual stream x to `out`, with a norm of the former where norms stand behind."""
    if spec.norms in ("before", "shared"):
        return [Op(f"{part}_add", _K.ADD, (f"{part}_out", x), out)]
    norm = norm_op(spec, f"{part}_post_norm", f"{part}_out", role, f"{part}_normed")
    return [norm, Op(f"{part}_add", _K.ADD, (norm.output, x), out)]


def in_order(spec: DecoderSpec, attention: Sequence[Op], mlp: Sequence[Op]) -> tuple[Op, ...]:
    """A layer's operations in the order of their execution. Where attention and MLP share a norm, the MLP does not wait
    for the attention, so that SMs without a head go on."""
    if spec.norms != "shared":
        return (*attention, *mlp)
    out, down = ([op.name for op in ops].index(name) for ops, name in ((attention, "o_proj"), (mlp, "down_proj")))
    return (*attention[:out], *mlp[:down], *attention[out:], *mlp[down:])


def norm_op(spec: DecoderSpec, name: str, x: str, role: str, out: str, width: int | None = None) -> Op:
    """A norm of each `width` columns of x; of a whole row of the residual stream where no width is given."""
    kind = _K.LAYERNORM if spec.norm == "layer" else _K.RMSNORM
    operands = (x, f"{role}.w", f"{role}_bias.w") if spec.norm_bias else (x, f"{role}.w")
    offset = {} if spec.norm_offset == 0 else {"w_offset": spec.norm_offset}
    return Op(name, kind, operands, out, {"eps": spec.norm_eps, "hidden": width or spec.hidden, **offset})


def attending_ops(spec: DecoderSpec, context: int, lanes: int, x: str, layer: int) -> list[Op]:
    """From x [hidden] to `attn_out`: a layer's attention over the caches, with its products. An attention with a window
    that is shorter than the context has the param `window`."""
    scale = spec.head_dim**-0.5 if spec.attention_scale is None else spec.attention_scale
    seen = min(context, spec.window_of(layer) or context)
    attend = {
        "head_dim": spec.head_dim, "kv_start": 0, "kv_len": seen, "scale": scale,
        "n_heads": spec.n_heads, "n_kv_heads": spec.n_kv_heads,
        **({} if seen == context else {"window": seen}),
        **({} if spec.attention_cap is None else {"cap": spec.attention_cap}),
    }  # fmt: skip
    made = {"q": "q", "k": "k", "v": projected(spec)[-1]}
    ops = [_projection(f"{side}_proj", x, side, spec.hidden, spec.qkv_bias) for side in projected(spec)]
    if spec.qk_norm:
        for side, width in zip("qk", _qk_widths(spec), strict=True):
            ops.append(norm_op(spec, f"{side}_norm", made[side], f"{side}_norm", f"{side}_normed", width))
            made[side] = f"{side}_normed"
    if spec.v_norm:
        of_heads = {"eps": spec.norm_eps, "hidden": spec.head_dim}
        ops.append(Op("v_norm", _K.RMSNORM, (made["v"],), "v_normed", of_heads))
        made["v"] = "v_normed"
    rope = spec.rope_of(layer)
    if rope is not None:
        turn = rope_params(rope, spec.head_dim, spec.rotary_dim, context)
        ops += [Op(f"{side}_rope", _K.ROPE, (made[side], "position"), f"{side}_rot", turn) for side in "qk"]
        made |= {"q": "q_rot", "k": "k_rot"}
    pos = {"pos": context - lanes}
    return [
        *ops,
        Op("k_append", _K.KV_APPEND, (made["k"],), "k_cache", pos),
        Op("v_append", _K.KV_APPEND, (made["v"],), "v_cache", pos),
        Op("attention", _K.ATTENTION_TILE, (made["q"], "k_cache", "v_cache"), "attn", attend),
        _projection("o_proj", "attn", "attn_out", spec.q_width, spec.o_bias, spec.residual_scale),
    ]


GATES: Final[Mapping[str, Op]] = MappingProxyType(
    {
        "silu": Op("silu_mul", _K.SILU_MUL, ("gate", "up"), "act"),
        "gelu_tanh": Op("gelu_mul", _K.GELU_MUL, ("gate", "up"), "act"),
    }
)
"""Activation -> the operation that multiplies it by up."""

_ALONE: Final = "gelu_tanh"
"""The activation that needs no gate."""


def activated_ops(spec: DecoderSpec, x: str) -> list[Op]:
    """From x [hidden] to `mlp_out`: between its products the activation, of gate times up or, without a gate, of up.
    Raises UnsupportedModelError for an activation that has no such operation."""
    up = _projection("up_proj", x, "up", spec.hidden, spec.mlp_bias)
    down = _projection("down_proj", "act", "mlp_out", spec.intermediate, spec.mlp_bias, spec.residual_scale)
    known = tuple(GATES) if spec.gated else (_ALONE,)
    if spec.activation not in known:
        where = "of a gate" if spec.gated else "without a gate"
        raise UnsupportedModelError(f"{spec.name}: activation {spec.activation} {where}; supported: {', '.join(known)}")
    if not spec.gated:
        return [up, replace(GATES[_ALONE], inputs=("up",)), down]
    gate = _projection("gate_proj", x, "gate", spec.hidden, spec.mlp_bias)
    return [gate, up, GATES[spec.activation], down]


def _projection(name: str, x: str, out: str, depth: int, biased: bool, scale: float = 1.0) -> Op:
    operands = (x, f"{name}.w", f"{name.removesuffix('proj')}bias.w") if biased else (x, f"{name}.w")
    return Op(name, _K.GEMV_TILE, operands, out, {"K": depth, **({} if scale == 1 else {"scale": scale})})
