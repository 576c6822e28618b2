"""The decode step operation by operation, each fed with what a program made of the one before it.

So rounding does not pile up over layers, and a wrong operation shows where it is, in its full size. What a program's
tensor differs by is what the program rounded: nothing is rounded here but what RoPE makes, in which every program must
round what it multiplies with keys of that dtype, and which sharp attention makes much of. This shares the weights of
`eager` and no code with the VM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from flywheel.models.eager import OracleWeights, rms_norm, rotate, swiglu, turns

_WIDENED: Final = 2**26  # elements of a weight, widened at a time


@dataclass(frozen=True, slots=True)
class Past:
    """What a layer's caches hold before each of the positions: so many of the rows of `keys` and `values`
    [batch, n_kv_heads, rows, head_dim], the rotated keys multiplied by the position's entry of `gains` [positions]."""

    keys: Tensor
    values: Tensor
    gains: Tensor


class Hand(Protocol):
    """Who decides what each operation is fed with."""

    def take(self, name: str, made: Tensor, parts: int) -> Tensor:
        """What stands for the tensor `name`, [rows, width], of which the oracle makes `made`; of its type.

        `parts` of equal width make up a row: its heads, or 1.
        """

    def past(self, layer: int, q: Tensor, v: Tensor) -> Past:
        """The layer's caches; `q` [rows, n_heads, head_dim] is rotated, `v` is [rows, n_kv_heads, head_dim]."""


def run_forced(own: OracleWeights, tokens: Tensor, positions: Sequence[int], hand: Hand) -> None:
    """Every operation in order. A row is one of `batch` sequences at one of the positions, position after position;
    `tokens` [positions, batch] stand there."""
    with torch.no_grad():
        at = torch.tensor(positions, device=own.device)
        turn = turns(own, at.repeat_interleave(tokens.shape[1]))
        x = hand.take("x_out", own.embed[tokens.flatten()].to(own.wide), 1)
        for layer, weights in enumerate(own.layers):
            attn = _attention(own, layer, x, at, turn, hand)
            x = _add(layer, "attn_out", "x_mid", _product(attn, weights["o_proj"]), x, hand)
            normed = hand.take(f"L{layer}.mlp_in", _norm(own, x, weights["post_attention_norm"]), 1)
            gate = hand.take(f"L{layer}.gate", _product(normed, weights["gate_proj"]), 1)
            up = hand.take(f"L{layer}.up", _product(normed, weights["up_proj"]), 1)
            act = hand.take(f"L{layer}.act", swiglu(gate, up, own.wide), 1)
            x = _add(layer, "mlp_out", "x_out", _product(act, weights["down_proj"]), x, hand)
        final = hand.take("final_in", _norm(own, x, own.final_norm), 1)
        hand.take("logits", _product(final, own.head), 1)


def _add(layer: int, added: str, out: str, made: Tensor, x: Tensor, hand: Hand) -> Tensor:
    return hand.take(f"L{layer}.{out}", x + hand.take(f"L{layer}.{added}", made, 1), 1)


def _attention(own: OracleWeights, layer: int, x: Tensor, at: Tensor, turn: Tensor, hand: Hand) -> Tensor:
    """`attn` of x [rows, hidden]."""
    spec, weights = own.spec, own.layers[layer]
    heads = {"q": spec.n_heads, "k": spec.n_kv_heads, "v": spec.n_kv_heads}
    normed = hand.take(f"L{layer}.attn_in", _norm(own, x, weights["input_norm"]), 1)
    made = {}
    for side, count in heads.items():
        flat = _product(normed, weights[f"{side}_proj"])
        if spec.qkv_bias:
            flat = flat + weights[f"{side}_bias"].to(own.wide)
        made[side] = hand.take(f"L{layer}.{side}", flat, count).view(-1, count, spec.head_dim)
    for side in "qk":
        if spec.qk_norm:
            flat = _rounded(own, _norm(own, made[side], weights[f"{side}_norm"]).flatten(1))
            made[side] = hand.take(f"L{layer}.{side}_normed", flat, heads[side]).view_as(made[side])
        flat = _rounded(own, rotate(made[side], turn, own.wide).flatten(1))
        made[side] = hand.take(f"L{layer}.{side}_rot", flat, heads[side]).view_as(made[side])
    for side in "kv":
        made[side] = hand.take(f"L{layer}.{side}_cache", made[side].flatten(1), heads[side]).view_as(made[side])
    past = hand.past(layer, made["q"], made["v"])
    mixed = attend(made["q"], past, made["k"], made["v"], at)
    return hand.take(f"L{layer}.attn", mixed.flatten(1), spec.n_heads)


def _norm(own: OracleWeights, x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, own.spec.norm_eps, own.wide)


def _rounded(own: OracleWeights, x: Tensor) -> Tensor:
    return x.to(own.dtype).to(x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [rows, K] times weight [N, K], in the type of x.

    On a GPU, a weight of a half type is read as it is: x is the sum of two of that type, and products sum in float32.
    """
    if weight.dtype == x.dtype:
        return linear(x, weight)
    if weight.is_cuda:
        high = x.to(weight.dtype)
        both = torch.mm(torch.cat((high, (x - high).to(weight.dtype))), weight.T, out_dtype=x.dtype)
        return both[: len(x)] + both[len(x) :]
    step = max(1, _WIDENED // weight.shape[1])
    parts = [linear(x, weight[start : start + step].to(x.dtype)) for start in range(0, len(weight), step)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def attend(q: Tensor, past: Past, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """Attention of all rows, [rows, n_heads, head_dim]: of q over the caches' rows before the positions `at`
    [positions] and over the new rows k and v [rows, n_kv_heads, head_dim]."""
    batch, n_kv_heads, length, head_dim = past.keys.shape
    places, group = len(at), q.shape[1] // n_kv_heads
    # Query head h = g * group + j reads KV head g.
    query = q.view(places, batch, n_kv_heads, group, head_dim).permute(1, 2, 0, 3, 4)  # [B, G, P, J, D]
    new_k, new_v = (side.view(places, batch, n_kv_heads, 1, head_dim).permute(1, 2, 0, 3, 4) for side in (k, v))
    old = query.flatten(2, 3) @ past.keys.to(q.dtype).transpose(2, 3)
    old = old.view(batch, n_kv_heads, places, group, length) * past.gains.to(q.dtype)[:, None, None]
    unseen = torch.arange(length, device=q.device) >= at[:, None, None]
    old = old.masked_fill(unseen, -torch.inf)
    new = (query * new_k).sum(-1, keepdim=True)
    shares = (torch.cat((old, new), -1) * head_dim**-0.5).softmax(-1)
    mixed: Tensor = (shares[..., :-1].flatten(2, 3) @ past.values.to(q.dtype)).view(query.shape) + shares[
        ..., -1:
    ] * new_v
    return mixed.permute(2, 0, 1, 3, 4).reshape(q.shape)
