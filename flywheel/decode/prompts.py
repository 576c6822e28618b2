"""Prompts: torch reads a whole one at once and writes the KV-cache rows that single steps would have written; a prefix
that another row's cache holds is copied instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from flywheel.decode.caches import Caches
from flywheel.models.eager import rope_frequencies
from flywheel.models.quantise import matrix_of
from flywheel.models.spec import DecoderSpec, layer_weight_key, model_weight_key
from flywheel.tensors import all_finite

CHUNK: Final = 4096
"""Tokens that are read at a time; limits the memory of activations."""

_BACKENDS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends, without cuDNN, which plans for 60 ms for each new prompt length."""

LEAST: Final = 16
"""Shortest shared prefix, in tokens, that is worth copying."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights by role. A quantised matrix is dequantised, in `dtype`, at each access."""

    weights: Mapping[str, Tensor]
    index: int
    dtype: torch.dtype

    def __getitem__(self, role: str) -> Tensor:
        key = layer_weight_key(role, self.index)
        matrix = matrix_of(self.weights, key)
        return self.weights[key] if matrix is None else matrix.to(self.dtype)

    def get(self, role: str) -> Tensor | None:
        """A weight; None if the model has none of this role."""
        return self.weights.get(layer_weight_key(role, self.index))


class Prefill:
    """A decoder over `weights`, by checkpoint key, all of one float type and on one device. They are not copied.
    Quantised matrices are dequantised, rounded to that type.

    Products and attention are torch's own, which round sums to the weights' type. Norms and RoPE use float32 inside.
    Source: huggingface/transformers, `models/{llama,mistral,qwen2,qwen3}/modeling_*.py`.
    """

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor]) -> None:
        self._spec = spec
        self._embed = weights[model_weight_key(spec, "embed")]
        self._layers = [_Layer(weights, layer, self._embed.dtype) for layer in range(spec.n_layers)]
        self._frequencies = rope_frequencies(spec).to(self._embed.device)
        if self._embed.is_cuda:
            _mask_of_last(1, 2)  # imports now what a prompt would wait for

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int], caches: Caches, row: int = 0, start: int = 0) -> None:
        """Write positions `start` to len(token_ids) - 1 of sequence `row`. Positions before `start` must be cached;
        later ones are forgotten.

        The caller has checked the tokens and that they fit, and no launch is running. Raises CacheMemoryError.
        """
        caches.hold(row, len(token_ids) + 1, may_take=True)
        caches.forget(row, start)
        tokens = torch.tensor(token_ids, device=self._embed.device)
        with sdpa_kernel(_BACKENDS):
            for first in range(start, len(tokens), CHUNK):
                self._forward(tokens[first : first + CHUNK], first, caches, row)

    def _forward(self, tokens: Tensor, start: int, caches: Caches, row: int) -> None:
        """Read tokens [S] at positions from `start` on. All earlier positions are cached."""
        eps, width = self._spec.norm_eps, (self._spec.hidden,)
        stop = start + len(tokens)
        angles = torch.arange(start, stop, device=tokens.device)[:, None].float() * self._frequencies
        cosine, sine = angles.cos(), angles.sin()
        turn = torch.cat((cosine, cosine), -1)[:, None], torch.cat((-sine, sine), -1)[:, None]  # [S, 1, head_dim]
        x = self._embed[tokens]
        for index, layer in enumerate(self._layers):
            normed = rms_norm(x, width, layer["input_norm"], eps)
            q, keys, values = self._heads(normed, layer, turn if self._spec.has_rope(index) else None)
            caches.append(index, row, start, keys, values)
            if index == len(self._layers) - 1:
                return
            x = x + linear(_attend(q, *caches.seen(index, row, stop)), layer["o_proj"])
            normed = rms_norm(x, width, layer["post_attention_norm"], eps)
            gate, up = linear(normed, layer["gate_proj"]), linear(normed, layer["up_proj"])
            x = x + linear(silu(gate) * up, layer["down_proj"])

    def _heads(
        self, x: Tensor, layer: _Layer, turn: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x [S, hidden], normalised -> queries [S, n_heads, head_dim], keys and values [S, n_kv_heads, head_dim]."""
        spec = self._spec
        heads = (len(x), -1, spec.head_dim)
        q, k, v = (linear(x, layer[f"{name}_proj"], layer.get(f"{name}_bias")).view(heads) for name in "qkv")
        if spec.qk_norm:
            q = rms_norm(q, (spec.head_dim,), layer["q_norm"], spec.norm_eps)
            k = rms_norm(k, (spec.head_dim,), layer["k_norm"], spec.norm_eps)
        if turn is None:
            return q, k, v
        turned = _rotate(torch.cat((q, k), 1), turn)
        return turned[:, : spec.n_heads], turned[:, spec.n_heads :], v


def _attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [S, n_heads, head_dim] of the last S of T tokens; keys, values [n_kv_heads, T, head_dim]. Each token sees
    itself and those before -> [S, n_heads * head_dim]."""
    whole = len(q) == keys.shape[1]
    mixed = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=None if whole else _mask_of_last(len(q), keys.shape[1]),
        is_causal=whole,
        enable_gqa=q.shape[1] > keys.shape[0],
    )
    return mixed[0].transpose(0, 1).reshape(len(q), -1)


def _mask_of_last(queries: int, tokens: int) -> Tensor:
    """Of the last `queries` of `tokens` tokens: each sees itself and those before."""
    from torch.nn.attention.bias import causal_lower_right  # with torch._dynamo, which takes a second

    return causal_lower_right(queries, tokens)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE of x [S, heads, head_dim] with rotated halves, computed in float32. `turn` is (cosine, sine) of each
    element's angle; the sine of the first half is negated."""
    cosine, sine = turn
    return torch.addcmul(x * cosine, x.roll(x.shape[-1] // 2, -1), sine).to(x.dtype)


class Prefixes:
    """The tokens in each row's cache, of a running or an ended sequence.

    A launch overwrites the first positions of a free row, so a copy of them is kept. All other entries stay in the
    row's own memory.
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._tokens: dict[int, list[int]] = {}  # in order of use, latest last
        self._first: dict[int, Tensor] = {}

    def pick(self, free: Sequence[int], prompt: Sequence[int]) -> int:
        """The best free row for a prompt: a row whose sequence the prompt continues, else an empty row, else the least
        recently used row."""
        source, length = self._longest(prompt)
        if source in free and length == len(self._tokens[source]) - 1:
            return source
        places = {row: place for place, row in enumerate(self._tokens)}
        return min(free, key=lambda row: (places.get(row, -1), row))

    def reuse(self, row: int, prompt: Sequence[int], wanted: bool) -> int:
        """Copy the longest cached prefix of a prompt, from any row, into the caches of `row`; with `wanted` false,
        reuse nothing. Returns its number of positions, 0 if some are not finite. No launch may be running. Raises
        CacheMemoryError."""
        source, length = self._longest(prompt) if wanted else (row, 0)
        there = length >= LEAST and self._caches.reaches(source, length)
        self._caches.hold(row, len(prompt), may_take=True)  # this may take the other row's memory
        self._tokens.pop(row, None)
        if not there or not self._caches.reaches(source, length):
            return 0
        first = self._first[source]
        self._caches.copy(source, row, length, first)
        sides = (side for layer in range(len(first)) for side in self._caches.seen(layer, row, length))
        if all_finite(sides):
            return length
        self._tokens.pop(source, None)
        return 0

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """Record that the caches of a row hold a prompt without its last token."""
        if len(prompt) > LEAST:
            self._tokens[row] = list(prompt)
            self._first[row] = self._caches.first(row)

    def add(self, row: int, token: int) -> None:
        """Record that a row has made a token. Its caches now hold the token before."""
        if row in self._tokens:
            self._tokens[row].append(token)

    def leave(self, row: int) -> None:
        """Record that a row's sequence has ended."""
        if row in self._tokens:
            self._tokens[row] = self._tokens.pop(row)

    def _longest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """(the row that shares the longest prefix with a prompt without its last token, the length of the prefix)."""
        lengths = {row: _alike(tokens[:-1], prompt[:-1]) for row, tokens in self._tokens.items()}
        row = max(lengths, key=lengths.__getitem__, default=-1)
        return row, lengths.get(row, 0)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two token lists."""
    count = min(len(one), len(other))
    return next((place for place in range(count) if one[place] != other[place]), count)
