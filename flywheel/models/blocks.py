"""The operations that layers are made of, attention over a KV cache and a gated MLP, and their weights."""

from __future__ import annotations

from typing import Final, NamedTuple

from flywheel.ir import InstructionKind
from flywheel.models.graph import Op
from flywheel.models.rope import Rope, rope_params
from flywheel.models.spec import LAYER_WEIGHT_KEYS, DecoderSpec, Shape

_K: Final = InstructionKind

_GELUS: Final = {"gelu": _K.GELU}
"""Activation of an MLP without a gate -> its operation."""


class LayerWeight(NamedTuple):
    """A weight that every layer has. Matrices are [N_out, K_in]."""

    key: str
    """Its state-dict key, with `{i}` for the layer."""
    shape: Shape


def usual_weights(spec: DecoderSpec) -> dict[str, LayerWeight]:
    """Role -> the weight of the operations below, in the order of LAYER_WEIGHT_KEYS."""
    apart = spec.norms != "shared"
    hidden, inner, q, kv = (spec.hidden,), (spec.intermediate,), (spec.q_width,), (spec.kv_width,)
    parts: list[tuple[bool, dict[str, Shape]]] = [
        (True, {"input_norm": hidden}),
        (spec.norm_bias, {"input_norm_bias": hidden}),
        (True, {"q_proj": q + hidden, "k_proj": kv + hidden, "v_proj": kv + hidden}),
        (spec.qkv_bias, {"q_bias": q, "k_bias": kv, "v_bias": kv}),
        (spec.qk_norm, {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}),
        (True, {"o_proj": hidden + q}),
        (spec.o_bias, {"o_bias": hidden}),
        (apart, {"post_attention_norm": hidden}),
        (apart and spec.norm_bias, {"post_attention_norm_bias": hidden}),
        (spec.gated, {"gate_proj": inner + hidden}),
        (spec.gated and spec.mlp_bias, {"gate_bias": inner}),
        (True, {"up_proj": inner + hidden}),
        (spec.mlp_bias, {"up_bias": inner}),
        (True, {"down_proj": hidden + inner}),
        (spec.mlp_bias, {"down_bias": hidden}),
    ]
    shapes = {role: shape for there, part in parts if there for role, shape in part.items()}
    return {role: LayerWeight(LAYER_WEIGHT_KEYS[role], shape) for role, shape in shapes.items()}


def attention_ops(spec: DecoderSpec, context: int, lanes: int, rope: bool = True) -> list[Op]:
    """From the residual stream `x` to `x_mid`, with a norm before, with RoPE or without."""
    return [
        norm_op(spec, "attn_norm", "x", "input_norm", "attn_in"),
        *attending_ops(spec, context, lanes, "attn_in", rope),
        Op("attn_add", _K.ADD, ("attn_out", "x"), "x_mid"),
    ]


def mlp_ops(spec: DecoderSpec) -> list[Op]:
    """From the residual stream `x_mid` to `x_out`, with a norm before."""
    return [
        norm_op(spec, "mlp_norm", "x_mid", "post_attention_norm", "mlp_in"),
        *activated_ops(spec, "mlp_in"),
        Op("mlp_add", _K.ADD, ("mlp_out", "x_mid"), "x_out"),
    ]


def norm_op(spec: DecoderSpec, name: str, x: str, role: str, out: str, width: int | None = None) -> Op:
    """A norm of each `width` columns of x; of a whole row of the residual stream where no width is given."""
    kind = _K.LAYERNORM if spec.norm == "layer" else _K.RMSNORM
    operands = (x, f"{role}.w", f"{role}_bias.w") if spec.norm_bias else (x, f"{role}.w")
    return Op(name, kind, operands, out, {"eps": spec.norm_eps, "hidden": width or spec.hidden})


def attending_ops(
    spec: DecoderSpec, context: int, lanes: int, x: str, rope: bool = True, norm_widths: tuple[int, int] | None = None
) -> list[Op]:
    """From x [hidden] to `attn_out`: attention over the caches, with its products. With `qk_norm`, `norm_widths` are of
    q_norm and k_norm; by default these are norms of each head."""
    head_dim = spec.head_dim
    turn = rope_params(Rope(spec.rope_theta, spec.rope_scaling), head_dim, spec.rotary_dim, context)
    attend = {
        "head_dim": head_dim, "kv_start": 0, "kv_len": context, "scale": head_dim**-0.5,
        "n_heads": spec.n_heads, "n_kv_heads": spec.n_kv_heads,
    }  # fmt: skip
    made = {"q": "q", "k": "k"}
    ops = [_projection(f"{side}_proj", x, side, spec.hidden, spec.qkv_bias) for side in "qkv"]
    if spec.qk_norm:
        for side, width in zip("qk", norm_widths or (head_dim, head_dim), strict=True):
            ops.append(norm_op(spec, f"{side}_norm", made[side], f"{side}_norm", f"{side}_normed", width))
            made[side] = f"{side}_normed"
    if rope:
        ops += [Op(f"{side}_rope", _K.ROPE, (made[side], "position"), f"{side}_rot", turn) for side in "qk"]
        made = {"q": "q_rot", "k": "k_rot"}
    pos = {"pos": context - lanes}
    return [
        *ops,
        Op("k_append", _K.KV_APPEND, (made["k"],), "k_cache", pos),
        Op("v_append", _K.KV_APPEND, ("v",), "v_cache", pos),
        Op("attention", _K.ATTENTION_TILE, (made["q"], "k_cache", "v_cache"), "attn", attend),
        _projection("o_proj", "attn", "attn_out", spec.q_width, spec.o_bias),
    ]


def activated_ops(spec: DecoderSpec, x: str) -> list[Op]:
    """From x [hidden] to `mlp_out`: between its products the activation, of gate times up or, without a gate, of up."""
    up = _projection("up_proj", x, "up", spec.hidden, spec.mlp_bias)
    down = _projection("down_proj", "act", "mlp_out", spec.intermediate, spec.mlp_bias)
    if not spec.gated:
        return [up, Op("gelu", _GELUS[spec.activation], ("up",), "act"), down]
    gate = _projection("gate_proj", x, "gate", spec.hidden, spec.mlp_bias)
    return [gate, up, Op("silu_mul", _K.SILU_MUL, ("gate", "up"), "act"), down]


def _projection(name: str, x: str, out: str, depth: int, biased: bool) -> Op:
    operands = (x, f"{name}.w", f"{name.removesuffix('proj')}bias.w") if biased else (x, f"{name}.w")
    return Op(name, _K.GEMV_TILE, operands, out, {"K": depth})
