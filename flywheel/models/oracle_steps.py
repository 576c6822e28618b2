"""The decode step operation by operation, each with the program's result of the operation before it as input.

So rounding does not accumulate over layers, and a wrong operation shows at its place with its full error. A program's
tensor differs only by the program's own rounding, since this code rounds nothing, with one exception. It rounds RoPE's
results as every program must, which multiplies them with keys of that dtype; sharp attention amplifies that rounding.
This shares the weights of `oracle`, and no code with the VM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from flywheel.models.oracle import (
    OracleWeights,
    Turning,
    activate,
    embedded,
    norm,
    norm_roles,
    plain_norm,
    rotate,
    scaled_logits,
    scaled_scores,
    turning_of,
    turns,
)
from flywheel.models.spec import DecoderSpec

_WIDENED: Final = 2**26
"""Elements of a weight or of caches that are widened at a time."""


@dataclass(frozen=True, slots=True)
class Past:
    """The cached rows of some layers before each of the positions.

    They are `keys` and `values` [layers, batch, n_kv_heads, rows, head_dim], of which the rows before the position
    count. Rotated keys are multiplied by the position's entry of `gains` [positions].
    """

    keys: Tensor
    values: Tensor
    gains: Tensor


class Hand(Protocol):
    """Decides the input of each operation."""

    def groups(self, n_layers: int) -> Iterable[range]:
        """The layers in order, in groups of equal heads that are computed together. In a group, all but the first layer
        read `given`."""

    def given(self, layers: range) -> Tensor:
        """The residual stream [layers - 1, rows, hidden] behind all but the last layer of a group."""

    def take(self, names: tuple[str, ...], made: Tensor, parts: int) -> Tensor:
        """The tensors `names`, [names, rows, width], that later operations read. The oracle makes `made`, which has the
        same type.

        A row has `parts` of equal width: its heads, or 1.
        """

    def past(self, layers: range, q: Tensor, v: Tensor) -> Past:
        """The layers' caches. `q` [layers, rows, n_heads, head_dim] is rotated, and `v` [layers, rows, n_kv_heads,
        head_dim] is not."""


class LayerByLayer:
    """The part of a `Hand` that computes each layer alone, after the one before it."""

    __slots__ = ()

    def groups(self, n_layers: int) -> Iterable[range]:
        return (range(layer, layer + 1) for layer in range(n_layers))

    def given(self, layers: range) -> Tensor:
        raise AssertionError("no layer goes with another")


def run_forced(own: OracleWeights, tokens: Tensor, at: Tensor, context: int, hand: Hand) -> None:
    """Run every operation, for all layers of a group at once, as in a context of so many tokens.

    A row is one of `batch` sequences at one of the positions `at` [positions], position by position. `tokens`
    [positions, batch] are the tokens there. Both are on the weights' device, and nothing waits for it.
    """
    with torch.no_grad():
        turn = turns(own, at.repeat_interleave(tokens.shape[1]), context)
        x = hand.take(("x_out",), embedded(own, tokens.flatten())[None], 1)
        for layers in hand.groups(own.spec.n_layers):
            if len(layers) > 1:
                x = torch.cat((x, hand.given(layers).to(x.dtype)))
            x = _LayerStack(own, layers, hand).made_of(x, at, turn)[-1:]
        normed = norm(own.spec, x, own.final_norm, own.final_norm_bias, own.wide)
        final = hand.take(("final_in",), normed, 1)
        hand.take(("logits",), scaled_logits(own.spec, _product(final, [own.head])), 1)


def named(layers: range, tensor: str) -> tuple[str, ...]:
    """A tensor's names in the layers."""
    return tuple(f"L{layer}.{tensor}" for layer in layers)


@dataclass(frozen=True, slots=True)
class _LayerStack:
    """Layers that are computed together. Their tensors are [layers, rows, ...]."""

    own: OracleWeights
    layers: range
    hand: Hand

    def made_of(self, x: Tensor, at: Tensor, turn: Mapping[Turning, Tensor]) -> Tensor:
        """The residual stream after each layer, from that before it."""
        spec, given = self.own.spec, x
        before, behind, before_mlp, behind_mlp = norm_roles(spec)
        first = x if before is None else self._take("attn_in", self._norm(x, before))
        attended = self._product(self._attention(first, at, turn), "o_proj", spec.o_bias) * spec.residual_scale
        x = self._add("attn", "x_mid", attended, behind, x)
        shared = self._norm(given, "input_norm") if spec.norms == "shared" else None
        gate, normed = None, x
        if shared is not None:
            normed = self._take("mlp_in", shared)
        elif before_mlp is not None:
            normed = self._take("mlp_in", self._norm(x, before_mlp))
        if spec.gated:
            gate = self._take("gate", self._product(normed, "gate_proj", spec.mlp_bias))
        up = self._take("up", self._product(normed, "up_proj", spec.mlp_bias))
        act = self._take("act", activate(spec, gate, up, self.own.wide))
        made = self._product(act, "down_proj", spec.mlp_bias) * spec.residual_scale
        return self._add("mlp", "x_out", made, behind_mlp, x)

    def _attention(self, normed: Tensor, at: Tensor, turn: Mapping[Turning, Tensor]) -> Tensor:
        own, spec = self.own, self.own.spec.of_layer(self.layers[0])
        heads = {"q": spec.n_heads, "k": spec.n_kv_heads, "v": spec.n_kv_heads}
        made: dict[str, Tensor] = {}
        # Of tensors that are on the device: a CUDA graph cannot capture a copy of what the host has.
        own_turn = torch.stack([turn[turning_of(own.spec, layer)] for layer in self.layers])
        for side, count in heads.items():
            if side == "v" and spec.full_k_is_v:
                made[side] = made["k"]
                continue
            taken = self._take(side, self._product(normed, f"{side}_proj", spec.qkv_bias), count)
            made[side] = taken.view(*taken.shape[:2], count, spec.head_dim)
        if spec.v_norm:
            flat = _rounded(own, plain_norm(spec, made["v"], own.wide).flatten(2))
            made["v"] = self._take("v_normed", flat, heads["v"]).view_as(made["v"])
        for side in "qk":
            if spec.qk_norm:
                raw = made[side].flatten(2) if spec.wide_qk_norm else made[side]
                flat = _rounded(own, self._norm(raw, f"{side}_norm").flatten(2))
                made[side] = self._take(f"{side}_normed", flat, heads[side]).view_as(made[side])
            flat = _rounded(own, rotate(made[side], own_turn, own.wide).flatten(2))
            made[side] = self._take(f"{side}_rot", flat, heads[side]).view_as(made[side])
        for side in "kv":
            made[side] = self._take(f"{side}_cache", made[side].flatten(2), heads[side]).view_as(made[side])
        past = self.hand.past(self.layers, made["q"], made["v"])
        windows = [own.spec.window_of(layer) for layer in self.layers]
        mixed = attend(spec, made["q"], past, made["k"], made["v"], at, windows)
        return self._take("attn", mixed.flatten(2), spec.n_heads)

    def _add(self, part: str, out: str, made: Tensor, role: str | None, x: Tensor) -> Tensor:
        added = self._take(f"{part}_out", made)
        if role is not None:
            added = self._take(f"{part}_normed", self._norm(added, role))
        scaled = out == "x_out" and self.own.spec.layer_scalar
        return self._take(out, (x + added) * self._each("layer_scalar") if scaled else x + added)

    def _take(self, tensor: str, made: Tensor, parts: int = 1) -> Tensor:
        return self.hand.take(named(self.layers, tensor), made, parts)

    def _norm(self, x: Tensor, role: str) -> Tensor:
        weight, spec = self._each(role), self.own.spec
        bias = self._each(f"{role}_bias") if spec.norm_bias else None
        return norm(spec, x, weight if x.ndim == 3 else weight[:, None], bias, self.own.wide)

    def _each(self, role: str) -> Tensor:
        """A vector of each layer, [layers, 1, width]."""
        return torch.stack([self.own.layers[layer][role] for layer in self.layers])[:, None]

    def _product(self, x: Tensor, role: str, biased: bool) -> Tensor:
        made = self._unbiased(x, role)
        return made + self._each(f"{role.removesuffix('proj')}bias").to(made.dtype) if biased else made

    def _unbiased(self, x: Tensor, role: str) -> Tensor:
        if self.own.layers[self.layers[0]].makes(role):  # one layer at a time, for its memory
            return torch.cat([_product(x[place, None], [self.own.layers[layer][role]])
                              for place, layer in enumerate(self.layers)])  # fmt: skip
        return _product(x, [self.own.layers[layer][role] for layer in self.layers])


def _rounded(own: OracleWeights, x: Tensor) -> Tensor:
    return x.to(own.dtype).to(x.dtype)


def _product(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """x [weights, rows, K] times each weight [N, K], in the type of x.

    On a GPU, a weight of a half type is read as it is: x is the sum of two of that type, and products sum in float32.
    """
    halves = weights[0].dtype
    if halves == x.dtype:
        return torch.stack([linear(each, weight) for each, weight in zip(x, weights, strict=True)])
    if x.is_cuda:
        high = x.to(halves)
        both = torch.cat((high, (x - high).to(halves)), 1)
        found = x.new_empty((*both.shape[:2], len(weights[0])))
        for each, weight, place in zip(both, weights, found, strict=True):
            torch.mm(each, weight.T, out_dtype=x.dtype, out=place)
        return found[:, : x.shape[1]] + found[:, x.shape[1] :]
    step = max(1, _WIDENED // x.shape[-1])
    wide = [
        torch.cat([linear(each, part.to(x.dtype)) for part in torch.split(weight, step)], -1)
        for each, weight in zip(x, weights, strict=True)
    ]
    return torch.stack(wide)


def attend(
    spec: DecoderSpec, q: Tensor, past: Past, k: Tensor, v: Tensor, at: Tensor, windows: Sequence[int | None]
) -> Tensor:
    """Attention of all rows, [layers, rows, n_heads, head_dim]: of q over the caches' rows before the positions `at`
    [positions] and over the new rows k and v [layers, rows, n_kv_heads, head_dim].

    A layer with a window of W sees the last W of these rows, the new one included.
    """
    step = max(1, _WIDENED // max(1, past.keys[0].numel()))
    parts = [
        _attend(
            spec, q[some], Past(past.keys[some], past.values[some], past.gains), k[some], v[some], at, windows[some]
        )
        for some in (slice(start, start + step) for start in range(0, len(q), step))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend(
    spec: DecoderSpec, q: Tensor, past: Past, k: Tensor, v: Tensor, at: Tensor, windows: Sequence[int | None]
) -> Tensor:
    layers, batch, n_kv_heads, length, head_dim = past.keys.shape
    places, group = len(at), q.shape[2] // n_kv_heads
    order = (0, 2, 3, 1, 4, 5)
    # Query head h = g * group + j reads KV head g.
    query = q.view(layers, places, batch, n_kv_heads, group, head_dim).permute(order)  # [L, B, G, P, J, D]
    new_k, new_v = (side.view(layers, places, batch, n_kv_heads, 1, head_dim).permute(order) for side in (k, v))
    old = query.flatten(3, 4) @ past.keys.to(q.dtype).transpose(3, 4)
    old = old.view(layers, batch, n_kv_heads, places, group, length) * past.gains.to(q.dtype)[:, None, None]
    rows, its_place = torch.arange(length, device=q.device), at[:, None, None]
    later = rows >= its_place
    unseen = torch.stack([later if each is None else later | (rows <= its_place - each) for each in windows])
    old = scaled_scores(spec, old).masked_fill(unseen[:, None, None], -torch.inf)
    new = scaled_scores(spec, (query * new_k).sum(-1, keepdim=True))
    shares = torch.cat((old, new), -1).softmax(-1)
    mixed: Tensor = (shares[..., :-1].flatten(3, 4) @ past.values.to(q.dtype)).view(query.shape) + shares[
        ..., -1:
    ] * new_v
    return mixed.permute(0, 3, 1, 2, 4, 5).reshape(q.shape)
