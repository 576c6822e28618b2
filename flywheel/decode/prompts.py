"""Prompts: torch reads one, in pieces, and writes the KV-cache rows that single steps would have written."""

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
from flywheel.tensors import compute_type, sent

CHUNK: Final = 2048
"""Tokens that pass through a layer at a time; limits the memory of activations, and the time of the shortest piece."""

PIECE: Final = 512
"""Tokens that attend at a time in a layer with a window; limits the rows that some of them do not see."""

_BACKENDS: Final = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention backends, without cuDNN, which plans for 60 ms for each new prompt length."""

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
        self._head_dims = [spec.of_layer(layer).head_dim for layer in range(spec.n_layers)]
        self._weights = weights
        self._coded = frozenset(key for keys in chain(*self._keys) for key in keys if codes_of(key) in weights)
        (self._embed,), self._table = calls_of(graph, graph.prologue, _JOINED), table
        self._dtype, self._device = table.dtype, table.device
        self._turning = {key: each.to(self._device) for key, each in turning_of(graph).items()}
        if table.is_cuda:
            _mask_of_last(1, 2)  # imports now what a prompt would wait for

    def __call__(self, token_ids: Sequence[int], caches: Caches, row: int = 0, start: int = 0) -> None:
        """Write positions `start` to len(token_ids) - 1 of sequence `row` at once. Positions before `start` must be
        cached; later ones are forgotten.

        The caller has checked the tokens and that they fit, and no launch is running. Raises CacheMemoryError.
        """
        caches.hold(row, len(token_ids) + 1, may_take=True)
        reading = self.begin(token_ids, caches, row, start)
        while not reading.is_done:
            reading.read(reading.layers)

    def begin(self, token_ids: Sequence[int], caches: Caches, row: int, start: int) -> Reading:
        """Begin what a call does at once. The row has its memory. The host waits for nothing."""
        return Reading(self, sent(token_ids, self._device), caches, row, start)

    @property
    def depth(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def enter(self, tokens: Tensor, start: int, caches: Caches, row: int) -> tuple[_Chunk, Tensor]:
        """What `through` takes for tokens [S] at positions from `start` on: the residual stream [S, hidden] is that
        before the first layer."""
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        turns = {key: rope_turns(positions, each) for key, each in self._turning.items()}
        return _Chunk(caches, row, start, turns), PLAIN[_K.EMBED](self._embed, [tokens], [self._table])

    def through(self, layer: int, x: Tensor, chunk: _Chunk) -> Tensor:
        """The residual stream [S, hidden] after a layer. All positions before the chunk are cached."""
        return self._run(layer, x, chunk).get("x_out", x)

    def _run(self, layer: int, x: Tensor, chunk: _Chunk) -> dict[str, Tensor]:
        """Run a layer on the residual stream x [S, hidden]."""
        calls, keys, dtype, head_dim = self._layers[layer], self._keys[layer], self._dtype, self._head_dims[layer]

        def compute(place: int, inputs: Sequence[Tensor]) -> Tensor | None:
            call, weights = calls[place], [self._weight(key) for key in keys[place]]
            match call.kind:
                case _K.GEMV_TILE:
                    return finished(call, linear(inputs[0], *weights))
                case _K.ROPE:
                    return rotate(torch.cat(tuple(inputs), -1), *chunk.turns[rope_key(call.params)]).to(dtype)
                case _K.KV_APPEND:
                    k, v = (as_heads(each, head_dim) for each in inputs)
                    chunk.caches.append(layer, chunk.row, chunk.start, k, v)
                    return None
                case _K.ATTENTION_TILE:
                    q = as_heads(inputs[0], head_dim)
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


class Reading:
    """A prompt on its way into the caches of a row: chunk after chunk of CHUNK tokens, each through layer after layer.

    A piece is some layers of a chunk. What is computed, bit for bit, does not depend on where pieces end. Launches
    between two pieces overwrite the row's first positions, so a copy of those is kept and put back.
    """

    def __init__(self, prefill: Prefill, tokens: Tensor, caches: Caches, row: int, start: int) -> None:
        """`tokens` [T] are the whole text, of which the caches hold the positions before `start`."""
        self._prefill, self._tokens, self._caches, self._row = prefill, tokens, caches, row
        self._next = start
        self._layer = 0  # the next one
        self._whole = 0  # layers of whole pieces
        self._chunk: tuple[_Chunk, Tensor] | None = None
        self._first: Tensor | None = None
        caches.forget(row, start)

    @property
    def held(self) -> int:
        """Tokens of the text that the caches hold, whole chunks of them."""
        return self._next

    @property
    def is_done(self) -> bool:
        """Whether the caches hold all of the text."""
        return self._next >= len(self._tokens)

    @property
    def layers(self) -> int:
        """Layers that the chunk has not passed."""
        return self._prefill.depth - self._layer

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return min(CHUNK, len(self._tokens) - self._next)

    @torch.no_grad()
    def read(self, layers: int) -> None:
        """Read a piece: so many layers of the chunk, or those that are left. No launch may run before it is done, nor
        between `Prefill.begin` and the first piece. Where an error ends it, a further call goes on."""
        caches, row, start = self._caches, self._row, self._next
        stop = min(self._layer + layers, self._prefill.depth)
        with sdpa_kernel(_BACKENDS):
            if self._chunk is None:
                tokens = self._tokens[start : start + self.length]
                self._chunk = self._prefill.enter(tokens, start, caches, row)
            if start and self._first is not None:
                caches.load(row, 0, self._first[:, self._layer : stop], self._layer)
            while self._layer < stop:
                chunk, x = self._chunk
                self._chunk = chunk, self._prefill.through(self._layer, x, chunk)
                self._layer += 1
        if start == 0 and self._first is not None:
            self._first[:, self._whole : stop] = caches.save(row, 0, caches.lanes, range(self._whole, stop))
        self._whole = stop
        if stop == self._prefill.depth:
            self._chunk, self._layer, self._whole, self._next = None, 0, 0, start + self.length
            if self._first is not None:
                caches.load(row, 0, self._first)
        if self._first is None and not self.is_done:
            self._first = caches.save(row, 0, caches.lanes)


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
