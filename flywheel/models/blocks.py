"""The operations that layers are made of, attention over a KV cache and a gated MLP, and their weights."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from flywheel.ir import InstructionKind
from flywheel.models.graph import Op
from flywheel.models.spec import LAYER_WEIGHT_KEYS, DecoderSpec, Shape

_K: Final = InstructionKind


class LayerWeight(NamedTuple):
    """A weight that every layer has. Matrices are [N_out, K_in]."""

    key: str
    """Its state-dict key, with `{i}` for the layer."""
    shape: Shape


def usual_weights(spec: DecoderSpec) -> dict[str, LayerWeight]:
    """Role -> the weight of the operations below, in the order of LAYER_WEIGHT_KEYS."""
    biases: dict[str, Shape] = {"q_bias": (spec.q_width,), "k_bias": (spec.kv_width,), "v_bias": (spec.kv_width,)}
    norms: dict[str, Shape] = {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    shapes: dict[str, Shape] = {
        "input_norm": (spec.hidden,),
        "q_proj": (spec.q_width, spec.hidden),
        "k_proj": (spec.kv_width, spec.hidden),
        "v_proj": (spec.kv_width, spec.hidden),
        **(biases if spec.qkv_bias else {}),
        **(norms if spec.qk_norm else {}),
        "o_proj": (spec.hidden, spec.q_width),
        "post_attention_norm": (spec.hidden,),
        "gate_proj": (spec.intermediate, spec.hidden),
        "up_proj": (spec.intermediate, spec.hidden),
        "down_proj": (spec.hidden, spec.intermediate),
    }
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
        *gated_ops(spec, "mlp_in"),
        Op("mlp_add", _K.ADD, ("mlp_out", "x_mid"), "x_out"),
    ]


def norm_op(spec: DecoderSpec, name: str, x: str, role: str, out: str, width: int | None = None) -> Op:
    """A norm of each `width` columns of x; of a whole row of the residual stream where no width is given."""
    return Op(name, _K.RMSNORM, (x, f"{role}.w"), out, {"eps": spec.norm_eps, "hidden": width or spec.hidden})


def attending_ops(
    spec: DecoderSpec, context: int, lanes: int, x: str, rope: bool = True, norm_widths: tuple[int, int] | None = None
) -> list[Op]:
    """From x [hidden] to `attn_out`: attention over the caches, with its products. With `qk_norm`, `norm_widths` are of
    q_norm and k_norm; by default these are norms of each head."""
    head_dim = spec.head_dim
    turn: dict[str, Any] = {"head_dim": head_dim, "theta": spec.rope_theta}
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling
        turn |= {
            "rope_factor": scaling.factor,
            "rope_low_freq_factor": scaling.low_freq_factor,
            "rope_high_freq_factor": scaling.high_freq_factor,
            "rope_original_max_position": scaling.original_max_position,
        }
    attend = {
        "head_dim": head_dim, "kv_start": 0, "kv_len": context, "scale": head_dim**-0.5,
        "n_heads": spec.n_heads, "n_kv_heads": spec.n_kv_heads,
    }  # fmt: skip
    made = {"q": "q", "k": "k"}
    ops = [_projection(spec, f"{side}_proj", x, side, spec.hidden, f"{side}_bias") for side in "qkv"]
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
        _projection(spec, "o_proj", "attn", "attn_out", spec.q_width),
    ]


def gated_ops(spec: DecoderSpec, x: str) -> list[Op]:
    """From x [hidden] to `mlp_out`: SwiGLU between its products."""
    return [
        _projection(spec, "gate_proj", x, "gate", spec.hidden),
        _projection(spec, "up_proj", x, "up", spec.hidden),
        Op("silu_mul", _K.SILU_MUL, ("gate", "up"), "act"),
        _projection(spec, "down_proj", "act", "mlp_out", spec.intermediate),
    ]


def _projection(spec: DecoderSpec, name: str, x: str, out: str, depth: int, bias: str | None = None) -> Op:
    operands = (x, f"{name}.w", f"{bias}.w") if bias and spec.qkv_bias else (x, f"{name}.w")
    return Op(name, _K.GEMV_TILE, operands, out, {"K": depth})
