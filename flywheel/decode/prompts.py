"""Prompts: torch reads a whole one at once and writes the KV-cache rows that single steps would have written; a prefix
that another row's cache holds is copied instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from flywheel.decode.caches import Caches
from flywheel.ir import InstructionKind
from flywheel.models.calls import Call, cached_by, calls_of
from flywheel.models.decoder import decode_step
from flywheel.models.forward import (
    PLAIN,
    RopeKey,
    as_heads,
    finished,
    rope_key,
    rope_turns,
    rotate,
    run_calls,
    turning_of,
)
from flywheel.models.graph import codes_of
from flywheel.models.quantise import matrix_of
from flywheel.models.spec import DecoderSpec, model_weight_key
from flywheel.tensors import all_finite, compute_type

CHUNK: Final = 4096
"""Tokens that are read at a time; limits the memory of activations."""

PIECE: Final = 512
"""Tokens that attend at a time in a layer with a window; limits the rows that some of them do not see."""

_BACKENDS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends, without cuDNN, which plans for 60 ms for each new prompt length."""

LEAST: Final = 16
"""Shortest shared prefix, in tokens, that is worth copying."""

_K = InstructionKind
_JOINED: Final = frozenset({_K.ROPE})


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Where tokens that are read together go: row `row` of the caches, from position `start` on. `turns` has the
    rotations of their positions by `rope_key`."""

    caches: Caches
    row: int
    start: int
    turns: Mapping[RopeKey, tuple[Tensor, Tensor]]


class Prefill:
    """A decoder of `context` tokens over `weights`, by checkpoint key, all of one float type and on one device. They
    are not copied. Quantised matrices are dequantised, rounded to that type, at each use.

    Products and attention are torch's own, which round sums to the weights' type. Norms and RoPE use float32 inside.
    Source: huggingface/transformers, `models/{llama,mistral,qwen2,qwen3}/modeling_*.py`.
    """

    def __init__(self, spec: DecoderSpec, weights: Mapping[str, Tensor], context: int) -> None:
        table = weights[model_weight_key(spec, "embed")]
        graph = decode_step(spec, context, compute_type(table.dtype))  # which says what to compute
        kinds = [calls_of(graph, block, _JOINED) for block in graph.kinds]
        layers = [kinds[kind] for kind in graph.order]
        self._layers = [*layers[:-1], cached_by(layers[-1])]
        self._keys = [[_keys(call, layer) for call in calls] for layer, calls in enumerate(self._layers)]
        self._head_dim = spec.head_dim
        self._weights = weights
        self._coded = frozenset(key for keys in chain(*self._keys) for key in keys if codes_of(key) in weights)
        (self._embed,), self._table = calls_of(graph, graph.prologue, _JOINED), table
        self._dtype, self._device = table.dtype, table.device
        self._turning = {key: each.to(self._device) for key, each in turning_of(graph).items()}
        if table.is_cuda:
            _mask_of_last(1, 2)  # imports now what a prompt would wait for

    @torch.no_grad()
    def __call__(self, token_ids: Sequence[int], caches: Caches, row: int = 0, start: int = 0) -> None:
        """Write positions `start` to len(token_ids) - 1 of sequence `row`. Positions before `start` must be cached;
        later ones are forgotten.

        The caller has checked the tokens and that they fit, and no launch is running. Raises CacheMemoryError.
        """
        caches.hold(row, len(token_ids) + 1, may_take=True)
        caches.forget(row, start)
        tokens = torch.tensor(token_ids, device=self._device)
        with sdpa_kernel(_BACKENDS):
            for first in range(start, len(tokens), CHUNK):
                self._forward(tokens[first : first + CHUNK], first, caches, row)

    def _forward(self, tokens: Tensor, start: int, caches: Caches, row: int) -> None:
        """Read tokens [S] at positions from `start` on. All earlier positions are cached."""
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        turns = {key: rope_turns(positions, each) for key, each in self._turning.items()}
        chunk = _Chunk(caches, row, start, turns)
        x = PLAIN[_K.EMBED](self._embed, [tokens], [self._table])
        for layer in range(len(self._layers)):
            x = self._run(layer, x, chunk).get("x_out", x)

    def _run(self, layer: int, x: Tensor, chunk: _Chunk) -> dict[str, Tensor]:
        """Run a layer on the residual stream x [S, hidden]."""
        calls, keys, dtype = self._layers[layer], self._keys[layer], self._dtype

        def compute(place: int, inputs: Sequence[Tensor]) -> Tensor | None:
            call, weights = calls[place], [self._weight(key) for key in keys[place]]
            match call.kind:
                case _K.GEMV_TILE:
                    return finished(call, linear(inputs[0], *weights))
                case _K.ROPE:
                    return rotate(torch.cat(tuple(inputs), -1), *chunk.turns[rope_key(call.params)]).to(dtype)
                case _K.KV_APPEND:
                    k, v = (as_heads(each, self._head_dim) for each in inputs)
                    chunk.caches.append(layer, chunk.row, chunk.start, k, v)
                    return None
                case _K.ATTENTION_TILE:
                    q = as_heads(inputs[0], self._head_dim)
                    return _attend(call, q, *chunk.caches.seen(layer, chunk.row, chunk.start + len(q)))
                case _:
                    return PLAIN[call.kind](call, inputs, weights)

        return run_calls(calls, {"x": x}, compute)

    def _weight(self, key: str) -> Tensor:
        if key not in self._coded:
            return self._weights[key]
        matrix = matrix_of(self._weights, key)
        assert matrix is not None
        return matrix.to(self._dtype)


def _keys(call: Call, layer: int) -> list[str]:
    return [key.format(i=layer) for (key,) in call.weights]


def _attend(call: Call, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """q [S, n_heads, head_dim] of the last S of T tokens; keys, values [n_kv_heads, T, head_dim]. Each token sees
    itself and those before, in a layer with a window the last of these -> [S, n_heads * head_dim]."""
    tokens, first = keys.shape[1], keys.shape[1] - len(q)
    window = call.params.get("window", tokens)
    step = len(q) if tokens <= window else PIECE
    parts = []
    for start in range(0, len(q), step):
        part = q[start : start + step]
        seen = slice(max(0, first + start + 1 - window), first + start + len(part))
        parts.append(_attend_piece(call, part, keys[:, seen], values[:, seen], window))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_piece(call: Call, q: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    if "cap" in call.params:
        return _attend_capped(call, q, keys, values, window)
    tokens, group, mask = keys.shape[1], q.shape[1] // keys.shape[0], None
    if tokens > window:  # torch's fast kernels do not take a mask for groups
        mask, group = _sight(len(q), tokens, window, q.device), 1
        keys, values = (side.repeat_interleave(q.shape[1] // len(side), 0) for side in (keys, values))
    elif tokens > len(q):
        mask = _mask_of_last(len(q), tokens)
    mixed = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=call.params["scale"],
        enable_gqa=group > 1,
    )
    return mixed[0].transpose(0, 1).reshape(len(q), -1)


def _attend_capped(call: Call, q: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """`_attend_piece` with capped scores, which torch's own attention has not."""
    grouped = q.view(len(q), len(keys), -1, q.shape[-1]).permute(1, 2, 0, 3)  # [n_kv_heads, group, S, head_dim]
    unseen = ~_sight(len(q), keys.shape[1], window, q.device)
    mixed = []
    for query, its_keys, its_values in zip(grouped, keys, values, strict=True):  # one at a time, for its memory
        scores = finished(call, (query @ its_keys.T).float()).masked_fill_(unseen, -torch.inf)
        mixed.append(scores.softmax(-1).to(q.dtype) @ its_values)
    return torch.stack(mixed).permute(2, 0, 1, 3).reshape(len(q), -1)


def _sight(queries: int, tokens: int, window: int, device: torch.device) -> Tensor:
    """Which of `tokens` tokens each of the last `queries` sees, [queries, tokens]: at most `window`."""
    everything = torch.ones((queries, tokens), dtype=torch.bool, device=device)
    return everything.tril(tokens - queries) & everything.triu(tokens - queries + 1 - window)


def _mask_of_last(queries: int, tokens: int) -> Tensor:
    """Of the last `queries` of `tokens` tokens: each sees itself and those before."""
    from torch.nn.attention.bias import causal_lower_right  # with torch._dynamo, which takes a second

    return causal_lower_right(queries, tokens)


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
