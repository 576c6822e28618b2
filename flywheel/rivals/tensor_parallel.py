"""A tensor-parallel decode step in plain torch, one process per GPU: what a user with several GPUs would run without
flywheel.

Each process holds its rank's part by `models.sharding`: heads, rows of gate and up, columns of o and down, and a part
of the vocabulary. torch.distributed all-reduces the results of o and down, in the decoder's dtype, and gathers the
logits.

Source: meta-pytorch/gpt-fast, `tp.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed
from torch import Tensor
from torch.nn.functional import pad

from flywheel.decode.source import Weights
from flywheel.ir import DType
from flywheel.models.calls import Call
from flywheel.models.oracle import LayerCache
from flywheel.models.sharding import shared_step
from flywheel.models.spec import MODEL_WEIGHT_KEYS, DecoderSpec, model_weight_key
from flywheel.models.weights import WeightsOnRequest
from flywheel.rivals.torch_decoder import FusedWeights, TorchDecoder


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a model. `spec` has the rank's heads, its rows of gate and up, and an LM head of its own, tied
    or not. `parts`: state-dict key -> (axis, first, size) of the rank's part of a weight. `summed`: keys, with `{i}`
    for the layer, of the matrices of which it has some columns, so that ranks sum their products. `zeros`: keys of
    biases that another rank adds. `rows`: every rank's (first, stop) in the vocabulary. `kv_heads`: (first, stop) of
    the rank's KV heads in the model."""

    whole: DecoderSpec
    spec: DecoderSpec
    rank: int
    parts: Mapping[str, tuple[int, int, int]]
    summed: frozenset[str]
    zeros: frozenset[str]
    rows: tuple[tuple[int, int], ...]
    kv_heads: tuple[int, int]

    def of(self, weights: Weights) -> WeightsOnRequest:
        """The rank's parts of the whole model's `weights`, by the keys of `spec`'s, each made when it is asked for: a
        copy, or the whole where all ranks have that. If `weights` are made on request too, a whole matrix is there only
        while its part is made.

        The LM heads of all ranks have as many rows as the largest part, since gathering needs equal parts; surplus rows
        are 0.
        """
        head = MODEL_WEIGHT_KEYS["lm_head"]

        def make(key: str) -> Tensor:
            if key == head:
                return self._head_of(weights[model_weight_key(self.whole, "lm_head")])
            if key in self.zeros:
                return torch.zeros_like(weights[key])
            part = self.parts.get(key)
            return weights[key] if part is None else weights[key].narrow(*part).clone()

        return WeightsOnRequest([*weights, head], make)

    def _head_of(self, whole: Tensor) -> Tensor:
        first, stop = self.rows[self.rank]
        most = max(stop - first for first, stop in self.rows)
        own = whole[first:stop].clone()
        return own if len(own) == most else pad(own, (0, 0, 0, most - len(own)))


def shard_of(spec: DecoderSpec, rank: int, ranks: int) -> Shard:
    """A rank's part of a model with unquantised weights. Raises ConfigError as `shared_step` does."""
    whole = shared_step(spec, 1, DType.BF16, 1, ranks=ranks)
    graphs = whole.ranks or (whole,)
    own = graphs[rank]
    parts, summed, zeros = {}, set(), set()
    for layer, kind in enumerate(own.order):
        tensors = own.kinds[kind].tensors
        elsewhere = [tensor for name, tensor in whole.kinds[kind].tensors.items() if name not in tensors]
        zeros |= {tensor.source.format(i=layer) for tensor in elsewhere if tensor.source is not None}
        for tensor in tensors.values():
            if tensor.source is not None and tensor.part is not None:
                axis, first = tensor.part
                parts[tensor.source.format(i=layer)] = (axis, first, tensor.shape[axis])
                summed |= {tensor.source} if axis == 1 else set()
    heads = [next(op for op in graph.epilogue.ops if op.name == "lm_head") for graph in graphs]
    local = replace(
        spec,
        n_heads=own.n_heads,
        n_kv_heads=own.n_kv_heads,
        intermediate=own.kinds[0].tensors["up"].width,
        tied_head=False,
    )
    return Shard(
        spec,
        local,
        rank,
        parts,
        frozenset(summed),
        frozenset(zeros),
        tuple([head.rows or (0, spec.vocab) for head in heads]),
        (own.first_kv_head, own.first_kv_head + own.n_kv_heads),
    )


class ShardedDecoder(TorchDecoder):
    """A rank's TorchDecoder over the fused weights of its shard. Every rank of torch.distributed's default group takes
    part in every step; all ranks get the same logits and choose from them."""

    def __init__(
        self,
        shard: Shard,
        weights: FusedWeights,
        dtype: DType,
        context: int,
        inline_attention: bool = False,
        batch: int = 1,
    ) -> None:
        super().__init__(shard.spec, weights, dtype, context, inline_attention, batch)
        self._shard = shard

    def write_cache(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """See `DecodeSession.write_cache`, with all KV heads of the model; the rank keeps its own."""
        heads = slice(*self._shard.kv_heads)
        super().write_cache([(keys[:, heads], values[:, heads]) for keys, values in layers], row)

    def _across_ranks(self, call: Call, made: Tensor) -> Tensor:
        if call.output == "logits":
            return self._logits_of_ranks(made)
        return self._sum_of_ranks(made) if call.weights[0][0] in self._shard.summed else made

    def _sum_of_ranks(self, summand: Tensor) -> Tensor:
        torch.distributed.all_reduce(summand)
        return summand

    def _logits_of_ranks(self, logits: Tensor) -> Tensor:
        batch, rows = len(logits), self._shard.rows
        gathered = logits.new_empty(len(rows) * batch, logits.shape[-1])
        torch.distributed.all_gather_into_tensor(gathered, logits)
        parts = gathered.view(len(rows), batch, -1)
        return torch.cat([part[:, : stop - first] for part, (first, stop) in zip(parts, rows, strict=True)], -1)
