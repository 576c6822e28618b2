"""KV caches whose heads are distributed over several GPUs: each GPU holds the heads that it attends to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.caches import KvCaches
from flywheel.decode.interface import Interface, agreed
from flywheel.ir import DType
from flywheel.models.oracle import LayerCache
from flywheel.models.sharding import kv_heads_of, local_spec
from flywheel.models.spec import DecoderSpec
from flywheel.vm.gpu.granules import Granules

_HEADS: Final = 3
"""The dimension of heads in [layers, 2, batch, heads, ...], and in what is saved."""


class SharedCaches:
    """Implements `Caches` for a model whose KV heads are distributed over the ranks of a program by `kv_heads_of`.

    `devices` and `granules` are in the order of ranks; without `granules`, all memory exists from the start. Tensors
    are passed and returned on the first device. A head that several ranks hold reads as NaN where they differ. Raises
    as KvCaches, and ConfigError if the heads cannot be distributed.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: DType,
        context: int,
        devices: Sequence[torch.device],
        batch: int = 1,
        granules: Sequence[Granules] = (),
    ) -> None:
        self._spec, ranks = spec, len(devices)
        self.device: Final = devices[0]
        self.lanes: Final = 1
        self._heads = [kv_heads_of(spec, rank, ranks) for rank in range(ranks)]
        own = local_spec(spec, ranks)
        self._parts: list[KvCaches] = []
        with ExitStack() as undo:
            undo.callback(self.close)  # the memory of the devices before one that has too little
            for rank, device in enumerate(devices):
                self._parts.append(
                    KvCaches(own, dtype, context, device, batch, granules[rank] if granules else None)
                )
            undo.pop_all()

    @property
    def held_bytes(self) -> int:
        """See `Caches.held_bytes`, on all devices."""
        return sum(part.held_bytes for part in self._parts)

    def by_name(self, interface: Interface, rank: int) -> dict[str, Tensor]:
        """See `KvCaches.by_name`, for the buffers NAME@RANK of one rank."""
        heads, n_kv_heads = self._heads[rank], self._spec.n_kv_heads

        def local(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple([f"{name}@{rank}" for place, name in enumerate(names) if place % n_kv_heads in heads])

        caches = tuple([(local(keys), local(values)) for keys, values in interface.caches])
        own = Interface(interface.context, interface.dtype, caches, interface.batch)
        return self._parts[rank].by_name(own)

    def reaches(self, row: int, positions: int) -> bool:
        """See `Caches.reaches`."""
        return all(part.reaches(row, positions) for part in self._parts)

    def hold(self, row: int, positions: int, *, may_take: bool = False) -> None:
        """See `Caches.hold`. If memory runs out on one device, devices before it keep the new positions."""
        for part in self._parts:
            part.hold(row, positions, may_take=may_take)

    def leave(self, row: int) -> None:
        """See `Caches.leave`."""
        for part in self._parts:
            part.leave(row)

    def give_back(self) -> None:
        """See `Caches.give_back`."""
        for part in self._parts:
            part.give_back()

    def close(self) -> None:
        """See `Caches.close`."""
        for part in self._parts:
            part.close()

    def clear(self) -> None:
        """See `Caches.clear`."""
        for part in self._parts:
            part.clear()

    def forget(self, row: int, start: int = 0) -> None:
        """See `Caches.forget`."""
        for part in self._parts:
            part.forget(row, start)

    def append(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """See `Caches.append`."""
        for part, heads in self._each():
            own = [self._to(part, side[:, heads.start : heads.stop]) for side in (keys, values)]
            part.append(layer, row, start, *own)

    def seen(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `Caches.seen`. Returns copies."""
        sides = zip(*[part.seen(layer, row, stop) for part in self._parts], strict=True)
        keys, values = (self._joined(list(parts), 0) for parts in sides)
        return keys, values

    def save(self, row: int, start: int, stop: int, layers: range | None = None) -> Tensor:
        """See `Caches.save`."""
        return self._joined([part.save(row, start, stop, layers) for part in self._parts], _HEADS)

    def load(self, row: int, start: int, saved: Tensor, first_layer: int = 0) -> None:
        """See `Caches.load`."""
        for part, heads in self._each():
            part.load(row, start, self._to(part, saved[..., heads.start : heads.stop, :]), first_layer)

    def write(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """See `Caches.write`. Raises UsageError as KvCaches."""
        for part, heads in self._each():
            own = [
                tuple([self._to(part, side[:, heads.start : heads.stop]) for side in sides]) for sides in layers
            ]
            part.write([(keys, values) for keys, values in own], row)

    def write_past(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> None:
        """See `Caches.write_past`."""
        for part, heads in self._each():
            part.write_past(self._past(part, past, heads), lengths, gains)

    def new_rows(self, positions: Sequence[int]) -> Tensor:
        """See `Caches.new_rows`."""
        return self._joined([part.new_rows(positions) for part in self._parts], _HEADS)

    def changed(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> Tensor:
        """See `Caches.changed`."""
        shape = (*past.shape[:_HEADS], self._spec.n_kv_heads)
        found = torch.zeros(shape, dtype=torch.bool, device=self.device)
        for part, heads in self._each():
            own = part.changed(self._past(part, past, heads), lengths, gains)
            found[..., heads.start : heads.stop] |= own.to(self.device)
        return found

    def _each(self) -> list[tuple[KvCaches, range]]:
        return list(zip(self._parts, self._heads, strict=True))

    def _past(self, part: KvCaches, past: Tensor, heads: range) -> Tensor:
        return self._to(part, past[:, :, :, heads.start : heads.stop])

    def _to(self, part: KvCaches, tensor: Tensor) -> Tensor:
        """The tensor on a part's device. The copy goes through torch's own memory, never through mapped memory."""
        return tensor.to(part.device)

    def _joined(self, parts: list[Tensor], dim: int) -> Tensor:
        """The heads of all ranks, joined on the first device."""
        there = [part if part.device == self.device else part.clone().to(self.device) for part in parts]
        same = len(there) * there[0].shape[dim] // self._spec.n_kv_heads  # ranks that hold the same heads
        return torch.cat([agreed(there[first : first + same]) for first in range(0, len(there), same)], dim)
