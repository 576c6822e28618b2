"""The operations of a pre-norm layer: attention over a KV cache, and a gated MLP."""

from __future__ import annotations

from typing import Any, Final

from flywheel.ir import InstructionKind
from flywheel.models.graph import Op
from flywheel.models.spec import DecoderSpec

_K: Final = InstructionKind


def attention_ops(spec: DecoderSpec, context: int, lanes: int, rope: bool = True) -> list[Op]:
    """From the residual stream `x` to `x_mid`, with RoPE or without."""
    hidden, head_dim = spec.hidden, spec.head_dim
    per_head = {"eps": spec.norm_eps, "hidden": head_dim}
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
    q, k = ("q_normed", "k_normed") if spec.qk_norm else ("q", "k")
    norms = [
        Op("q_norm", _K.RMSNORM, ("q", "q_norm.w"), "q_normed", per_head),
        Op("k_norm", _K.RMSNORM, ("k", "k_norm.w"), "k_normed", per_head),
    ]
    ropes = [
        Op("q_rope", _K.ROPE, (q, "position"), "q_rot", turn),
        Op("k_rope", _K.ROPE, (k, "position"), "k_rot", turn),
    ]
    pos = {"pos": context - lanes}
    return [
        Op("attn_norm", _K.RMSNORM, ("x", "input_norm.w"), "attn_in", {"eps": spec.norm_eps, "hidden": hidden}),
        *(_projection(spec, f"{side}_proj", "attn_in", side, hidden, f"{side}_bias") for side in "qkv"),
        *(norms if spec.qk_norm else []),
        *(ropes if rope else []),
        Op("k_append", _K.KV_APPEND, (ropes[1].output if rope else k,), "k_cache", pos),
        Op("v_append", _K.KV_APPEND, ("v",), "v_cache", pos),
        Op("attention", _K.ATTENTION_TILE, (ropes[0].output if rope else q, "k_cache", "v_cache"), "attn", attend),
        _projection(spec, "o_proj", "attn", "attn_out", spec.q_width),
        Op("attn_add", _K.ADD, ("attn_out", "x"), "x_mid"),
    ]


def mlp_ops(spec: DecoderSpec) -> list[Op]:
    """From the residual stream `x_mid` to `x_out`."""
    norm = {"eps": spec.norm_eps, "hidden": spec.hidden}
    return [
        Op("mlp_norm", _K.RMSNORM, ("x_mid", "post_attention_norm.w"), "mlp_in", norm),
        _projection(spec, "gate_proj", "mlp_in", "gate", spec.hidden),
        _projection(spec, "up_proj", "mlp_in", "up", spec.hidden),
        Op("silu_mul", _K.SILU_MUL, ("gate", "up"), "act"),
        _projection(spec, "down_proj", "act", "mlp_out", spec.intermediate),
        Op("mlp_add", _K.ADD, ("mlp_out", "x_mid"), "x_out"),
    ]


def _projection(spec: DecoderSpec, name: str, x: str, out: str, depth: int, bias: str | None = None) -> Op:
    operands = (x, f"{name}.w", f"{bias}.w") if bias and spec.qkv_bias else (x, f"{name}.w")
    return Op(name, _K.GEMV_TILE, operands, out, {"K": depth})
