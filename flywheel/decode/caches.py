"""KV caches of one or more sequences on a device, as a decode step's buffers see them, and memory as tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from math import prod
from types import SimpleNamespace
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from flywheel.decode.growing import GrowingMemory
from flywheel.decode.interface import Interface
from flywheel.errors import CacheMemoryError, GpuFaultError, UsageError
from flywheel.ir import DType
from flywheel.models.oracle import LayerCache
from flywheel.models.spec import DecoderSpec
from flywheel.process import check_memory
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.granules import Granules

_SIDES: Final = 2
"""Keys and values."""
_COMPARED: Final = 2**28  # elements compared at a time, to limit memory
_WORDS: Final = {2: torch.int16, 4: torch.int32}
"""Size of a float in bytes -> an integer type of that size."""

_KINDS: Final = {torch.int32: "<i4", torch.float32: "<f4", torch.uint8: "|u1"}
"""Types of views, as an array interface names them."""


class Caches(Protocol):
    """Keys and values of every layer and KV head of some sequences. Positions that no token has written hold NaN.

    Tensors of all layers together have `DecoderSpec.most_cached` heads and elements. What a layer lacks of them is 0 in
    those that are returned, and counts nothing in those that are given.
    """

    @property
    def device(self) -> torch.device:
        """The device that holds them."""

    @property
    def lanes(self) -> int:
        """Positions of a row without a sequence that each launch overwrites, from 0 on."""

    @property
    def held_bytes(self) -> int:
        """Memory of all sequences."""

    def reaches(self, row: int, positions: int) -> bool:
        """Whether a sequence has memory for `positions` positions."""

    def hold(self, row: int, positions: int, *, may_take: bool = False) -> None:
        """Get memory for a sequence's first `positions`, which include those that upcoming launches write.

        With `may_take`, memory of ended sequences may be reused, whose rows then start empty; no launch may be running,
        and torch's operations on its current stream are waited for. Raises CacheMemoryError, and changes nothing, if
        there is not enough memory.
        """

    def leave(self, row: int) -> None:
        """End a sequence. Its memory stays for the row's next sequence, or for another one that needs it."""

    def give_back(self) -> None:
        """Free the memory of ended sequences for other uses than caches. No launch may be running, and torch's
        operations on its current stream are waited for."""

    def close(self) -> None:
        """Free all memory. No sequence may be in use."""

    def clear(self) -> None:
        """Forget every position of every sequence."""

    def forget(self, row: int, start: int = 0) -> None:
        """Forget every position of one sequence from `start` on."""

    def append(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write positions from `start` on of one layer of a sequence. Keys and values are [S, n_kv_heads, head_dim]."""

    def seen(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values before position `stop` of one layer of a sequence: views [n_kv_heads, stop, head_dim]."""

    def save(self, row: int, start: int, stop: int, layers: range | None = None) -> Tensor:
        """Copies of positions `start` to `stop` - 1 of a sequence, of some layers or all, on `device`: [positions,
        layers, 2, n_kv_heads, head_dim]."""

    def load(self, row: int, start: int, saved: Tensor, first_layer: int = 0) -> None:
        """Write what `save` gave to positions from `start` on, and to layers from `first_layer` on."""

    def write(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """Replace all of sequence `row` by copies of `layers`. Positions after them hold nothing.

        Raises UsageError for a wrong number of layers, or for more positions than the caches hold.
        """

    def write_past(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> None:
        """Replace each sequence by its first positions of `past` [layers, 2, batch, heads, positions, head_dim]:
        `lengths` says how many, and `gains` the factor of its keys. Positions after them hold nothing."""

    def new_rows(self, positions: Sequence[int]) -> Tensor:
        """Copies of the row of each sequence at its entry of `positions`, [layers, 2, batch, heads, head_dim]."""

    def changed(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> Tensor:
        """Whether any row of a sequence, except the one at its length, differs from what `write_past` left, bit by bit:
        [layers, 2, batch, heads]."""


class KvCaches:
    """Keys and values of every layer and KV head of `batch` sequences, each `dtype [context, 1, head_dim]`. Implements
    `Caches`.

    Positions that no token has written hold NaN, so that reading them shows. With `granules`, a sequence has memory
    only for the positions that `hold` gave it, and no other position may be touched. Without, all memory exists from
    the start. A row without a sequence decodes `lanes` tokens from position 0 on.

    Raises GpuMemoryError.
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
        self._spec, self._context, self._batch = spec, context, batch
        self.lanes: Final = lanes
        self._device = torch.device(device)
        self._growing: GrowingMemory | None = None
        layers = [spec.of_layer(layer) for layer in range(spec.n_layers)]
        placed: dict[DecoderSpec, list[int]] = {own: [] for own in spec.layer_kinds}
        for layer, own in enumerate(layers):
            placed[own].append(layer)
        # [layers, 2, heads, context, 1, head_dim] of those that have heads alike
        shapes = [(len(its), 2, own.n_kv_heads, context, 1, own.head_dim) for own, its in placed.items()]
        if granules is None:
            nbytes = dtype.nbytes(batch * sum(map(prod, shapes)))
            check_memory(f"{spec.name}: caches of {context} positions", nbytes, device)
            wholes = [(*shape[:2], batch, *shape[2:]) for shape in shapes]
            made = [torch.full(whole, torch.nan, dtype=TORCH_DTYPES[dtype], device=device) for whole in wholes]
        else:
            streams = [dtype.nbytes(shape[-1]) for shape in shapes for _ in range(prod(shape[:3]))]
            growing = GrowingMemory(granules, batch, streams, context, lanes)
            self._growing = growing
            self._bytes = view(growing.address, (batch * growing.stride,), torch.uint8, self._device)
            made, first = [], 0
            for shape in shapes:
                stop = first + dtype.nbytes(prod(shape))
                rows = self._bytes.view(batch, growing.stride)[:, first:stop].view(TORCH_DTYPES[dtype])
                made.append(rows.reshape(batch, *shape).permute(1, 2, 0, 3, 4, 5, 6))
                first = stop
        alike = len(placed) == 1
        self._kinds = [
            _AlikeCaches(slice(None) if alike else its, rows) for its, rows in zip(placed.values(), made, strict=True)
        ]
        of_kind = dict(zip(placed, made, strict=True))
        self._layers = [of_kind[own][placed[own].index(layer)] for layer, own in enumerate(layers)]
        """Of each layer: [2, batch, heads, context, 1, head_dim]."""

    @property
    def device(self) -> torch.device:
        """See `Caches.device`."""
        return self._layers[0].device

    @property
    def held_bytes(self) -> int:
        """See `Caches.held_bytes`."""
        return sum(kind.rows.nbytes for kind in self._kinds) if self._growing is None else self._growing.held_bytes

    def reaches(self, row: int, positions: int) -> bool:
        """See `Caches.reaches`."""
        return self._growing is None or positions <= self._growing.reach[row]

    def hold(self, row: int, positions: int, *, may_take: bool = False) -> None:
        """See `Caches.hold`."""
        if self._growing is None:
            return
        if may_take and not self.reaches(row, positions):
            self._finish_torch()
        try:
            new = self._growing.hold(row, positions, may_take=may_take)
        except CacheMemoryError:
            if self._device.type != "cuda" or not may_take:
                raise
            torch.cuda.empty_cache()  # memory that torch keeps in its cache
            new = self._growing.hold(row, positions, may_take=True)
        for start in new:
            self._bytes[start : start + self._growing.granule_bytes].view(self._layers[0].dtype).fill_(torch.nan)

    def leave(self, row: int) -> None:
        """See `Caches.leave`."""
        if self._growing is not None:
            self._growing.leave(row)

    def give_back(self) -> None:
        """See `Caches.give_back`."""
        if self._growing is not None:
            self._finish_torch()
            self._growing.give_back()

    def _finish_torch(self) -> None:
        """Wait for operations that may use the memory of rows: copies of what an ended sequence left, and pieces of a
        prompt whose sequence has left."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """See `Caches.close`."""
        if self._growing is not None:
            self._growing.close()

    def by_name(self, interface: Interface) -> dict[str, Tensor]:
        """Cache buffer name -> its contiguous rows, for a program of the same model, type, context and batch."""
        return {
            name: rows[side][divmod(head, rows.shape[2])]
            for rows, sides in zip(self._layers, interface.caches, strict=True)
            for side, names in enumerate(sides)
            for head, name in enumerate(names)
        }

    def clear(self) -> None:
        """See `Caches.clear`."""
        for row in range(self._batch):
            self.forget(row)

    def forget(self, row: int, start: int = 0) -> None:
        """See `Caches.forget`."""
        stop = self._context if self._growing is None else self._growing.reach[row]
        for kind in self._kinds:
            kind.rows[:, :, row, :, start:stop].fill_(torch.nan)

    def rows(self, layer: int, side: int, row: int) -> Tensor:
        """A view of the keys (side 0) or values (1) of one layer of a sequence, [context, n_kv_heads, head_dim]. Its
        strides are the layout's."""
        return self._layers[layer][side, row, :, :, 0].transpose(0, 1)

    def append(self, layer: int, row: int, start: int, keys: Tensor, values: Tensor) -> None:
        """See `Caches.append`."""
        for side, new in enumerate((keys, values)):
            self.rows(layer, side, row)[start : start + len(new)] = new

    def seen(self, layer: int, row: int, stop: int) -> tuple[Tensor, Tensor]:
        """See `Caches.seen`."""
        keys, values = (self.rows(layer, side, row)[:stop].transpose(0, 1) for side in range(_SIDES))
        return keys, values

    def save(self, row: int, start: int, stop: int, layers: range | None = None) -> Tensor:
        """See `Caches.save`."""
        some = range(self._spec.n_layers) if layers is None else layers
        shape, like = (stop - start, len(some), _SIDES, *self._spec.most_cached), self._layers[0]
        saved = like.new_empty(shape) if len(self._kinds) == 1 else like.new_zeros(shape)
        for place, layer in enumerate(some):
            for side in range(_SIDES):
                own = self.rows(layer, side, row)[start:stop]
                saved[:, place, side, : own.shape[1], : own.shape[2]] = own
        return saved

    def load(self, row: int, start: int, saved: Tensor, first_layer: int = 0) -> None:
        """See `Caches.load`."""
        for place in range(saved.shape[1]):
            for side in range(_SIDES):
                own = self.rows(first_layer + place, side, row)[start : start + len(saved)]
                own.copy_(saved[:, place, side, : own.shape[1], : own.shape[2]])

    def write(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """See `Caches.write`."""
        length = len(layers[0][0]) if layers else 0
        if len(layers) != self._spec.n_layers or length > self._context:
            raise UsageError(
                f"{self._spec.name}: a cache of {len(layers)} layers and {length} positions; supported: "
                f"{self._spec.n_layers} layers, up to {self._context} positions"
            )
        self.hold(row, max(length, 1), may_take=True)
        self.forget(row)
        for own, sides in zip(self._layers, layers, strict=True):
            for heads, side in zip(own[:, row], sides, strict=True):
                heads[:, :length, 0].copy_(side.transpose(0, 1))

    def write_past(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> None:
        """See `Caches.write_past`."""
        for row in range(self._batch):
            self.hold(row, self._context)
        for kind in self._kinds:
            kind.rows.fill_(torch.nan)
            own = kind.of_past(past)
            for rows, length, gain in _alike(lengths, gains):
                written = kind.rows[:, :, rows, :, :length, 0, :]
                written.copy_(own[:, :, rows, :, :length, :])
                written[:, 0].mul_(gain)

    def new_rows(self, positions: Sequence[int]) -> Tensor:
        """See `Caches.new_rows`."""
        found = []
        for kind in self._kinds:
            rows = [kind.rows[:, :, rows, :, position, 0, :] for rows, position, _ in _alike(positions)]
            found.append(rows[0].clone() if len(rows) == 1 else torch.cat(rows, 2))
        return self._together(found)

    def changed(self, past: Tensor, lengths: Sequence[int], gains: Sequence[float]) -> Tensor:
        """See `Caches.changed`."""
        found = []
        for kind in self._kinds:
            own = kind.of_past(past)
            parts = [
                _changed(kind.rows[:, :, rows, :, :, 0], own[:, :, rows], length, gain)
                for rows, length, gain in _alike(lengths, gains)
            ]
            found.append(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
        return self._together(found)

    def _together(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors [layers, ...] of each kind as one of all layers. What some layers lack is 0."""
        if len(parts) == 1:
            return parts[0]
        sizes = [max(each) for each in zip(*[part.shape[1:] for part in parts], strict=True)]
        whole = parts[0].new_zeros((self._spec.n_layers, *sizes))
        for kind, part in zip(self._kinds, parts, strict=True):
            whole[kind.layers, *map(slice, part.shape[1:])] = part
        return whole


class _AlikeCaches(NamedTuple):
    """The caches of the layers that have heads alike."""

    layers: slice | list[int]
    rows: Tensor
    """[layers, 2, batch, heads, context, 1, head_dim]"""

    def of_past(self, past: Tensor) -> Tensor:
        """Its part of [layers, 2, batch, heads, positions, head_dim] of all layers."""
        return past[self.layers, :, :, : self.rows.shape[3], :, : self.rows.shape[-1]]


def _changed(own: Tensor, past: Tensor, length: int, gain: float) -> Tensor:
    """`Caches.changed` of caches [layers, 2, batch, heads, context, head_dim] whose sequences have that length."""
    word = torch.int64 if past.shape[-1] * past.itemsize % torch.int64.itemsize == 0 else _WORDS[past.itemsize]
    nothing = torch.full((past.shape[-1],), torch.nan, dtype=past.dtype, device=past.device)
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
    """Groups of neighbouring sequences with equal length and gain: (rows, length, gain)."""
    each = list(zip(lengths, gains or [1.0] * len(lengths), strict=True))
    start = 0
    for (length, gain), some in groupby(each):
        stop = start + len(list(some))
        yield slice(start, stop), length, gain
        start = stop


def view(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor over memory that somebody else holds. Raises GpuFaultError where the address is not on the device."""
    kind = np.dtype(_KINDS[dtype])
    if device.type == "cpu":
        held = (ctypes.c_byte * (prod(shape) * kind.itemsize)).from_address(address)
        return torch.from_numpy(np.ctypeslib.as_array(held).view(kind).reshape(shape))
    interface = {"data": (address, False), "shape": shape, "typestr": kind.str, "version": 3}
    made = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
    if made.data_ptr() != address:  # torch copies what it takes for memory of another GPU
        raise GpuFaultError(f"memory at {address:#x}: torch does not see it on {device}")
    return made


def hold_rows(caches: Caches, places: Sequence[int], wanted: Collection[int] | None, lanes: int = 1) -> None:
    """Get cache memory for a launch of `lanes` tokens of each sequence at `places`; only `wanted` rows are cached. No
    launch may be running. Raises CacheMemoryError."""
    for row, place in enumerate(places):
        if wanted is None or row in wanted:
            caches.hold(row, place + lanes, may_take=True)
