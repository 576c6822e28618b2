"""A decode step in plain torch that several processes share, one a GPU: what a user with several GPUs runs instead.

Each process has what `models.sharding` gives its rank: heads, rows of gate and up, columns of o and down, a part of the
vocabulary. torch.distributed adds what o and down make, in the decoder's dtype, and gathers the logits.

Source: meta-pytorch/gpt-fast, `tp.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch.distributed
from torch import Tensor
from torch.nn.functional import pad

from flywheel.decode.rivals import FusedWeights, TorchDecoder
from flywheel.ir import DType
from flywheel.models.eager import LayerCache
from flywheel.models.sharding import shared_step
from flywheel.models.spec import MODEL_WEIGHT_KEYS, DecoderSpec, model_weight_key


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a model. `spec` has the rank's heads and its rows of gate and up, and a head matrix of its own,
    tied or not. `parts`: state-dict key -> (axis, first, size) of what the rank has of a weight. `rows`: (first, stop)
    in the vocabulary, of every rank. `kv_heads`: the first of the rank's KV heads in the model, and the one behind the
    last."""

    whole: DecoderSpec
    spec: DecoderSpec
    rank: int
    parts: Mapping[str, tuple[int, int, int]]
    rows: tuple[tuple[int, int], ...]
    kv_heads: tuple[int, int]

    def keep(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        """What the rank has of a weight of the whole model, by the keys of `spec`'s weights: copies where it is less.

        All ranks' heads have as many rows as the largest part, as a gathering of equal parts wants it; those behind a
        smaller part are 0.
        """
        part = self.parts.get(key)
        kept = {key: tensor if part is None else tensor.narrow(*part).clone()}
        if key == model_weight_key(self.whole, "lm_head"):
            first, stop = self.rows[self.rank]
            most = max(stop - first for first, stop in self.rows)
            own = tensor[first:stop].clone()
            kept[MODEL_WEIGHT_KEYS["lm_head"]] = own if len(own) == most else pad(own, (0, 0, 0, most - len(own)))
        return kept


def shard_of(spec: DecoderSpec, rank: int, ranks: int) -> Shard:
    """What a rank has of a model with plain weights. Raises ConfigError as `shared_step` does."""
    whole = shared_step(spec, 1, DType.BF16, 1, ranks=ranks)
    graphs = whole.ranks or (whole,)
    own = graphs[rank]
    parts = {}
    for tensor in own.layer.tensors.values():
        if tensor.source is not None and tensor.part is not None:
            axis, first = tensor.part
            for layer in range(spec.n_layers):
                parts[tensor.source.format(i=layer)] = (axis, first, tensor.shape[axis])
    heads = [next(op for op in graph.epilogue.ops if op.name == "lm_head") for graph in graphs]
    local = replace(
        spec,
        n_heads=own.n_heads,
        n_kv_heads=own.n_kv_heads,
        intermediate=own.layer.tensors["gate"].width,
        tied_head=False,
    )
    return Shard(
        spec,
        local,
        rank,
        parts,
        tuple([head.rows or (0, spec.vocab) for head in heads]),
        (own.first_kv_head, own.first_kv_head + own.n_kv_heads),
    )


class ShardedDecoder(TorchDecoder):
    """A rank's TorchDecoder over the weights that its shard keeps, fused. Every rank of torch.distributed's default
    group takes every step; all get all logits, the same ones, and choose of them."""

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
        """As BatchSession says, of all KV heads of the model, of which the rank keeps its own."""
        heads = slice(*self._shard.kv_heads)
        super().write_cache([(keys[:, heads], values[:, heads]) for keys, values in layers], row)

    def _sum_of_ranks(self, summand: Tensor) -> Tensor:
        torch.distributed.all_reduce(summand)
        return summand

    def _logits_of_ranks(self, logits: Tensor) -> Tensor:
        batch, rows = len(logits), self._shard.rows
        gathered = logits.new_empty(len(rows) * batch, logits.shape[-1])
        torch.distributed.all_gather_into_tensor(gathered, logits)
        parts = gathered.view(len(rows), batch, -1)
        return torch.cat([part[:, : stop - first] for part, (first, stop) in zip(parts, rows, strict=True)], -1)
