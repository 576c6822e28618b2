"""RoPE, the KV cache, attention over a window of the cache, and the merge of its partials. Layouts: docs/ir.md.

A partial is [n_heads, head_dim + 2]. Each head has `head_dim` outputs, already divided by l, then m, the largest scaled
score, then l, the sum of exp(score - m). An empty window gives 0, -inf, 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from flywheel.ir.operations import SCALED_ROPE
from flywheel.vm.reference.operands import Params, flat, split, store

PARTIAL_EXTRA: Final = 2


def rope(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """Rotate-half embedding of x [S, n_heads, head_dim], or of any view of it, at positions [S].

    With the four `rope_*` params, frequencies are scaled as in Llama 3.1; with `frequencies`, they are these. Cosines
    and sines of those above 0 are multiplied by `scale`, if there is one.
    """
    x, positions = inputs
    head_dim = params["head_dim"]
    if "frequencies" in params:
        frequencies = _table(params["frequencies"], x.device)
    else:
        given = tuple(float(params[name]) for name in SCALED_ROPE if name in params)
        frequencies = inverse_frequencies(head_dim, float(params["theta"]), given, x.device)
    angles = positions.reshape(-1, 1, 1).float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    if "scale" in params:
        gains = torch.where(frequencies > 0, params["scale"], 1.0)
        cos, sin = cos * gains, sin * gains
    low, high = x.reshape(positions.numel(), -1, head_dim).float().chunk(2, dim=-1)
    store(out, torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))


@lru_cache(maxsize=64)
def _table(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)


@lru_cache(maxsize=64)
def inverse_frequencies(head_dim: int, theta: float, scaling: tuple[float, ...], device: torch.device) -> Tensor:
    """Radians per position of each pair, [head_dim / 2] in fp32. `scaling` is empty or (factor, low, high, original).

    Source: the `default` and `llama3` RoPE types of transformers, with the same fp32 arithmetic.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / theta**exponents
    if not scaling:
        return plain.to(device)
    factor, low, high, original = scaling
    wavelengths = 2 * math.pi / plain
    blend = (original / wavelengths - low) / (high - low) if high != low else torch.zeros_like(plain)
    between = (1 - blend) * plain / factor + blend * plain
    scaled = torch.where(wavelengths > original / low, plain / factor, between)
    return torch.where(wavelengths < original / high, plain, scaled).to(device)


def kv_append(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """Append new rows [T, n_kv_heads, head_dim], or any view of them, from row `pos` of the cache on. The cache is
    `out`."""
    rows = split(inputs[0], out.numel() // out.shape[0])
    out.view(out.shape[0], -1)[params["pos"] : params["pos"] + rows.shape[0]].copy_(rows)


def attention_tile(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """Attention of q [n_heads, head_dim] to rows `kv_start`..`kv_start + kv_len` of the caches [max_seq, n_kv_heads,
    head_dim].

    With `cap`, scaled scores are capped. The optional fourth input is a mask [max_seq] or [n_heads, max_seq], indexed
    like the cache's rows and added to the scores. A head that sees no row, or only masked ones, gives 0. `out` is the
    whole attention or a partial, which its size tells.
    """
    n_heads, n_kv_heads, head_dim = params["n_heads"], params["n_kv_heads"], params["head_dim"]
    query = flat(inputs[0])
    keys, values = (_window(cache, params) for cache in inputs[1:3])  # [n_kv_heads, rows, head_dim]
    scores = capped(query.view(n_kv_heads, -1, head_dim) @ keys.transpose(1, 2) * params["scale"], params)
    if len(inputs) > 3:
        scores = scores + _mask(inputs[3], inputs[1].shape[0], params)
    highest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:2], 1), -math.inf)
    weights = torch.exp(scores - _finite(highest))
    total = weights.sum(-1, keepdim=True)
    _finish(out, _divide(weights @ values, total), highest, total, (n_heads, head_dim))


def capped(x: Tensor, params: Params) -> Tensor:
    """cap * tanh(x / cap); x itself where there is no `cap`."""
    return x if "cap" not in params else params["cap"] * torch.tanh(x / params["cap"])


def attention_combine(inputs: Sequence[Tensor], out: Tensor, params: Params) -> None:
    """Merge 2..8 partials into one. The size of `out` tells whether it is normalised or a partial again."""
    n_heads, head_dim = _heads(inputs[0].numel(), out.numel(), params)
    parts = torch.stack([_partial(part, n_heads, head_dim) for part in inputs])
    outputs, highs, totals = parts[..., :head_dim], parts[..., head_dim : head_dim + 1], parts[..., head_dim + 1 :]
    highest = highs.amax(0)
    weights = totals * torch.exp(highs - _finite(highest))
    total = weights.sum(0)
    _finish(out, _divide((weights * outputs).sum(0), total), highest, total, (n_heads, head_dim))


def _heads(part: int, out: int, params: Params) -> tuple[int, int]:
    known_heads, known_dim = params.get("n_heads"), params.get("head_dim")
    if known_heads is not None:
        return known_heads, known_dim or part // known_heads - PARTIAL_EXTRA
    if known_dim is not None:
        return part // (known_dim + PARTIAL_EXTRA), known_dim
    n_heads = (part - out) // PARTIAL_EXTRA
    return n_heads, out // n_heads


def _partial(part: Tensor, n_heads: int, head_dim: int) -> Tensor:
    return part.reshape(n_heads, head_dim + PARTIAL_EXTRA).float()


def _window(cache: Tensor, params: Params) -> Tensor:
    n_kv_heads, head_dim = params["n_kv_heads"], params["head_dim"]
    rows = cache.reshape(cache.shape[0], -1)[params["kv_start"] : params["kv_start"] + params["kv_len"]]
    return rows.reshape(-1, n_kv_heads, head_dim).transpose(0, 1).float()


def _mask(mask: Tensor, max_seq: int, params: Params) -> Tensor:
    """The mask as [n_kv_heads, group or 1, rows] or [1, 1, rows]."""
    rows = split(mask, max_seq)[:, params["kv_start"] : params["kv_start"] + params["kv_len"]].float()
    if rows.shape[0] == 1:
        return rows.unsqueeze(0)
    return rows.reshape(params["n_kv_heads"], params["n_heads"] // params["n_kv_heads"], params["kv_len"])


def _finite(highest: Tensor) -> Tensor:
    """The reference point of exponentials. It is 0 where no row was seen, so that exp(-inf) is taken and not
    exp(NaN)."""
    return highest.masked_fill(highest == -math.inf, 0.0)


def _divide(weighted: Tensor, total: Tensor) -> Tensor:
    return (weighted / total).masked_fill(total == 0, 0.0)


def _finish(out: Tensor, outputs: Tensor, highest: Tensor, total: Tensor, heads: tuple[int, int]) -> None:
    n_heads, head_dim = heads
    if out.numel() == n_heads * head_dim:
        store(out, outputs)
    else:
        store(out, torch.cat((outputs, highest, total), dim=-1))
