"""KV caches of one sequence or some on a device, as a decode step's buffers see them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from math import prod
from typing import Final, Protocol

import torch
from torch import Tensor

from flywheel.decode.growing import GrowingMemory
from flywheel.decode.interface import Interface
from flywheel.decode.views import view
from flywheel.errors import CacheMemoryError, UsageError
from flywheel.ir import DType
from flywheel.models.eager import LayerCache
from flywheel.models.spec import DecoderSpec
from flywheel.process import check_memory
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.granules import Granules

_COMPARED: Final = 2**28  # elements at a time, for the memory that it takes
_WORDS: Final = {2: torch.int16, 4: torch.int32}
"""Integers of the size of a float."""


class Caches(Protocol):
    """Keys and values of every layer and KV head of some sequences. Positions that no token has written hold NaN."""

    @property
    def device(self) -> torch.device:
        """Where they are."""

    @property
    def held_bytes(self) -> int:
        """Memory that the sequences have."""

    def reaches(self, row: int, positions: int) -> bool:
        """Whether a sequence has memory for so many positions."""

    def hold(self, row: int, positions: int, *, may_take: bool = False) -> None:
        """Let a sequence have memory for its first `positions`, those of launches that are to come among them.

        With `may_take`, sequences that left give theirs, and their rows begin anew; no launch is under way then. Raises
        CacheMemoryError, and gives nothing, where memory does not last.
        """

    def leave(self, row: int) -> None:
        """Nobody has a sequence any more. Its memory is kept for the next one, or for who needs it more."""

    def give_back(self) -> None:
        """Let others than caches have the memory of sequences that left; no launch is under way."""

    def close(self) -> None:
        """Give memory back; nobody uses a sequence any more."""

    def clear(self) -> None:
        """Forget every position of every sequence."""

    def forget(self, row: int, start: int = 0) -> None:
        """Forget every position of one sequence from `start` on."""

    def append(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write positions from `start` on of one layer of a sequence: keys, values [S, n_kv_heads, head_dim]."""

    def seen(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions before `stop` of one layer of a sequence, views [n_kv_heads, stop, head_dim]."""

    def copy(self, source: int, row: int, length: int, first: Tensor) -> None:
        """Replace the first positions of a sequence by those of another, or keep them, but those that `first` has."""

    def first(self, row: int) -> Tensor:
        """A copy of a sequence's positions that a launch writes where nobody has the row."""

    def write(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """Replace all of sequence `row` by copies of `layers`; positions after theirs hold nothing.

        Raises UsageError for another number of layers, or more positions than there are.
        """

    def write_past(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> None:
        """Replace each sequence by its first positions of `past` [layers, 2, batch, heads, positions, head_dim]: so
        many as its entry of `lengths` says, keys multiplied by that of `gains`; positions after them hold nothing."""

    def new_rows(self, positions: Sequence[int]) -> Tensor:
        """Copies of the row of each sequence at its entry of `positions`, [layers, 2, batch, heads, head_dim]."""

    def changed(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> Tensor:
        """Whether any row of a sequence but that at its length is not what `write_past` left, bit by bit, [layers, 2,
        batch, heads]."""


class KvCaches:
    """Keys and values of every layer and KV head of `batch` sequences, `dtype [context, 1, head_dim]` each.

    Positions that no token has written hold NaN, so that reading them shows. With `granules`, a sequence has memory for
    the positions that it was given by `hold`, and no other one may be touched; without, all of it is there at once. A
    row without a sequence decodes `lanes` tokens from position 0 on.
    Raises GpuMemoryError where there is none.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: DType,
        context: int,
        device: torch.device | str,
        batch: int = 1,
        granules: Granules | None = None,
        lanes: int = 1,
    ) -> None:
        self._spec, self._context, self._batch, self._lanes = spec, context, batch, lanes
        self._device = torch.device(device)
        row = (spec.n_layers, 2, spec.n_kv_heads, context, 1, spec.head_dim)
        self._growing: GrowingMemory | None = None
        if granules is None:
            shape = (*row[:2], batch, *row[2:])
            check_memory(f"{spec.name}: caches of {context} positions", dtype.nbytes(prod(shape)), device)
            self._rows = torch.full(shape, torch.nan, dtype=TORCH_DTYPES[dtype], device=device)
            return
        growing = GrowingMemory(granules, batch, prod(row[:3]), context, dtype.nbytes(spec.head_dim), lanes)
        self._growing = growing
        self._bytes = view(growing.address, (batch * growing.stride,), torch.uint8, self._device)
        rows = self._bytes.view(batch, growing.stride)[:, : dtype.nbytes(prod(row))].view(TORCH_DTYPES[dtype])
        self._rows = rows.reshape(batch, *row).permute(1, 2, 0, 3, 4, 5, 6)

    @property
    def device(self) -> torch.device:
        """As Caches says."""
        return self._rows.device

    @property
    def held_bytes(self) -> int:
        """As Caches says."""
        return self._rows.nbytes if self._growing is None else self._growing.held_bytes

    def reaches(self, row: int, positions: int) -> bool:
        """As Caches says."""
        return self._growing is None or positions <= self._growing.reach[row]

    def hold(self, row: int, positions: int, *, may_take: bool = False) -> None:
        """As Caches says."""
        if self._growing is None:
            return
        try:
            new = self._growing.hold(row, positions, may_take=may_take)
        except CacheMemoryError:
            if self._device.type != "cuda" or not may_take:
                raise
            torch.cuda.empty_cache()  # what torch keeps for itself
            new = self._growing.hold(row, positions, may_take=True)
        for start in new:
            self._bytes[start : start + self._growing.granule_bytes].view(self._rows.dtype).fill_(torch.nan)

    def leave(self, row: int) -> None:
        """As Caches says."""
        if self._growing is not None:
            self._growing.leave(row)

    def give_back(self) -> None:
        """As Caches says."""
        if self._growing is not None:
            self._growing.give_back()

    def close(self) -> None:
        """As Caches says."""
        if self._growing is not None:
            self._growing.close()

    def by_name(self, interface: Interface) -> dict[str, Tensor]:
        """Cache buffer -> its rows, which are contiguous, of a program of the same model, type, context and batch."""
        return {
            name: self._rows[layer, side][divmod(head, self._spec.n_kv_heads)]
            for layer, sides in enumerate(interface.caches)
            for side, names in enumerate(sides)
            for head, name in enumerate(names)
        }

    def clear(self) -> None:
        """As Caches says."""
        for row in range(self._batch):
            self.forget(row)

    def forget(self, row: int, start: int = 0) -> None:
        """As Caches says."""
        stop = self._context if self._growing is None else self._growing.reach[row]
        self._rows[:, :, row, :, start:stop].fill_(torch.nan)

    def append(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """As Caches says."""
        for side, new in enumerate((keys, values)):
            self._rows[layer, side, row, :, start : start + len(new), 0] = new.transpose(0, 1)

    def seen(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """As Caches says."""
        keys, values = self._rows[layer, :, row, :, :stop, 0]
        return keys, values

    def copy(self, source: int, row: int, length: int, first: Tensor) -> None:
        """As Caches says."""
        if source != row:
            self._rows[:, :, row, :, :length].copy_(self._rows[:, :, source, :, :length])
        self._rows[:, :, row, :, : self._lanes].copy_(first)

    def first(self, row: int) -> Tensor:
        """As Caches says."""
        return self._rows[:, :, row, :, : self._lanes].clone()

    def write(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """As Caches says."""
        length = len(layers[0][0]) if layers else 0
        if len(layers) != self._spec.n_layers or length > self._context:
            raise UsageError(
                f"{self._spec.name}: a cache of {len(layers)} layers and {length} positions; supported: "
                f"{self._spec.n_layers} layers, up to {self._context} positions"
            )
        self.hold(row, max(length, 1), may_take=True)
        self.forget(row)
        rows = self._rows[:, :, row]
        for own, sides in zip(rows, layers, strict=True):
            for heads, side in zip(own, sides, strict=True):
                heads[:, :length, 0].copy_(side.transpose(0, 1))

    def write_past(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> None:
        """As Caches says."""
        for row in range(self._batch):
            self.hold(row, self._context)
        self._rows.fill_(torch.nan)
        for rows, length, gain in _alike(lengths, gains):
            written = self._rows[:, :, rows, :, :length, 0, :]
            written.copy_(past[:, :, rows, :, :length, :])
            written[:, 0].mul_(gain)

    def new_rows(self, positions: Sequence[int]) -> Tensor:
        """As Caches says."""
        rows = [self._rows[:, :, rows, :, position, 0, :] for rows, position, _ in _alike(positions)]
        return rows[0].clone() if len(rows) == 1 else torch.cat(rows, 2)

    def changed(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> Tensor:
        """As Caches says."""
        found = [self._changed(past[:, :, rows], rows, length, gain) for rows, length, gain in _alike(lengths, gains)]
        return found[0] if len(found) == 1 else torch.cat(found, 2)

    def _changed(self, past: Tensor, rows: slice, length: int, gain: float) -> Tensor:
        word = torch.int64 if past.shape[-1] * past.itemsize % torch.int64.itemsize == 0 else _WORDS[past.itemsize]
        nothing = torch.full((past.shape[-1],), torch.nan, dtype=past.dtype, device=past.device)
        own = self._rows[:, :, rows, :, :, 0]
        behind, before = own[..., length + 1 :, :], own[..., :length, :]
        changed = (behind.view(word) != nothing.view(word)).flatten(-2).any(-1)
        step = max(1, _COMPARED // max(1, past[0].numel()))
        for some in (slice(start, start + step) for start in range(0, len(past), step)):
            for side, factor in enumerate((gain, 1.0)):
                wanted = past[some, side, ..., :length, :]
                if factor != 1.0:
                    wanted = wanted * factor
                changed[some, side] |= (before[some, side].view(word) != wanted.view(word)).flatten(-2).any(-1)
        return changed


def _alike(lengths: Sequence[int], gains: Sequence[float] = ()) -> Iterator[tuple[slice, int, float]]:
    """Neighbouring sequences of one length and gain: (which, length, gain)."""
    each = list(zip(lengths, gains or [1.0] * len(lengths), strict=True))
    start = 0
    for (length, gain), some in groupby(each):
        stop = start + len(list(some))
        yield slice(start, stop), length, gain
        start = stop
