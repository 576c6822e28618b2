"""A forward pass in torch, call by call: what prefill and the rivals compute, each with products, attention and caches
of its own. Source: huggingface/transformers, `modeling_rope_utils.py` (`llama3`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, rms_norm, silu

from flywheel.ir import InstructionKind
from flywheel.models.calls import Call, ColumnsOf
from flywheel.models.graph import Graph

_K = InstructionKind

RopeKey: TypeAlias = tuple[tuple[str, Any], ...]
Plain: TypeAlias = Callable[[Call, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""Computes a call of its inputs and weights."""


def run_calls(
    calls: Sequence[Call], values: dict[str, Tensor], compute: Callable[[int, Sequence[Tensor]], Tensor | None]
) -> dict[str, Tensor]:
    """Run a block's calls. `values` [rows, width] are what it reads, by name; returns those that nothing in it reads.

    `compute` takes the place of a call in `calls` and the call's inputs.
    """
    for place, call in enumerate(calls):
        made = compute(place, [_read(values, columns) for columns in call.inputs])
        for name in call.done:
            del values[name]
        if made is not None:
            values[call.output] = made
    return values


def _read(values: Mapping[str, Tensor], columns: ColumnsOf) -> Tensor:
    whole = values[columns.name]
    own = columns.stop - columns.start
    return whole if own == columns.width else whole.narrow(-1, columns.start, own)


def _norm(call: Call, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    width, eps = call.params["hidden"], call.params["eps"]
    x = inputs[0] if width == inputs[0].shape[-1] else as_heads(inputs[0], width)
    if not weights:
        made = rms_norm(x, (width,), None, eps)
    elif "w_offset" in call.params:  # a weight that is added to stays unrounded
        made = rms_norm(x.float(), (width,), weights[0].float() + call.params["w_offset"], eps).to(x.dtype)
    else:
        made = rms_norm(x, (width,), weights[0], eps)
    return made if x is inputs[0] else made.flatten(-2)


def _embed(call: Call, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    made = embedding(inputs[0], weights[0])
    return made * call.params["scale"] if "scale" in call.params else made


def _gelu_mul(_: Call, inputs: Sequence[Tensor], __: Sequence[Tensor]) -> Tensor:
    made = gelu(inputs[0], approximate="tanh")
    return made * inputs[1] if len(inputs) > 1 else made


def _times(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    return x * factors[0] if factors else x


def finished(call: Call, made: Tensor) -> Tensor:
    """A call's product or scores, times its `scale`, and capped where it has a cap."""
    made = made * call.params["scale"] if "scale" in call.params else made
    return capped(made, call.params.get("cap"))


def capped(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap); x itself where there is no cap."""
    return x if cap is None else torch.tanh(x / cap) * cap


PLAIN: Final[Mapping[InstructionKind, Plain]] = {
    _K.EMBED: _embed,
    _K.RMSNORM: _norm,
    _K.LAYERNORM: lambda call, inputs, weights: layer_norm(
        inputs[0], (call.params["hidden"],), weights[0], weights[1] if len(weights) > 1 else None, call.params["eps"]
    ),
    _K.GELU_MUL: _gelu_mul,
    _K.SILU_MUL: lambda _, inputs, __: silu(inputs[0]) * inputs[1],
    _K.ADD: lambda _, inputs, weights: _times(inputs[1] + inputs[0], weights),
    _K.SAMPLE_ARGMAX: lambda _, inputs, __: inputs[0].argmax(-1),
}
"""What everyone computes alike, of a call, its inputs and its weights. Products, rotations, attention and appends are
everyone's own. Norms use float32 inside."""


def rope_key(params: Mapping[str, Any]) -> RopeKey:
    """A rotation's params as a key."""
    return tuple(sorted(params.items()))


def turning_of(graph: Graph) -> dict[RopeKey, Tensor]:
    """Of each kind of rotation, the radians per position and the gains of cosines and sines: [2, head_dim / 2],
    float32, on the CPU."""
    ropes = [op.params for block in graph.kinds for op in block.ops if op.kind is _K.ROPE]
    return {rope_key(params): _turning(params) for params in ropes}


def _turning(params: Mapping[str, Any]) -> Tensor:
    frequencies = _frequencies(params)
    return torch.stack((frequencies, torch.where(frequencies > 0, params.get("scale", 1.0), 1.0)))


def _frequencies(params: Mapping[str, Any]) -> Tensor:
    if "frequencies" in params:
        return torch.tensor(params["frequencies"])
    frequencies: Tensor = 1.0 / params["theta"] ** (torch.arange(0, params["head_dim"], 2).float() / params["head_dim"])
    if "rope_factor" not in params:
        return frequencies
    turns = params["rope_original_max_position"] / (2 * pi / frequencies)  # within the original context
    low, high = params["rope_low_freq_factor"], params["rope_high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    scaled: Tensor = (1 - kept) * frequencies / params["rope_factor"] + kept * frequencies
    return scaled


def rope_turns(positions: Tensor, turning: Tensor) -> tuple[Tensor, Tensor]:
    """(cosines, signed sines) [positions, 1, head_dim], float32, of rotate-half RoPE by `turning_of`. The sines of
    lower halves are negated."""
    angles = positions[:, None].float() * turning[0]
    cosine, sine = angles.cos() * turning[1], angles.sin() * turning[1]
    return torch.cat((cosine, cosine), -1)[:, None], torch.cat((-sine, sine), -1)[:, None]


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """RoPE of x [rows, heads * head_dim] by `rope_turns` [rows or 1, 1, head_dim] -> the same shape, float32."""
    heads = as_heads(x, cosine.shape[-1])
    halves = heads.view(*heads.shape[:-1], 2, -1).flip(-2).flatten(-2)
    return torch.addcmul(heads * cosine, halves, sine).flatten(-2)


def as_heads(x: Tensor, head_dim: int) -> Tensor:
    """A view of x [rows, heads * head_dim] as [rows, heads, head_dim]."""
    return x.view(len(x), -1, head_dim)
