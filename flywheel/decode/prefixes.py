"""Beginnings of texts that were read: copies of their cache rows, in blocks, for later prompts that begin alike."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import prod
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.caches import Caches
from flywheel.decode.memory import is_exhausted
from flywheel.errors import CacheMemoryError
from flywheel.process import available_bytes

BLOCK: Final = 16
"""Tokens of a block, as in vLLM."""

RUN: Final = 16
"""Blocks that are copied together; limits the memory of copies, and their time."""

_SHARE: Final = 16
"""One part in so many of the device's memory is what blocks may take."""


class Prefixes:
    """Blocks of cache rows of live and ended sequences, on the caches' device. The least recently used ones go first.

    A block is found by all tokens up to its end. Source: vLLM, `v1/core/kv_cache_utils.py` (`hash_block_tokens`).
    """

    def __init__(self, caches: Caches, limit_bytes: int | None = None) -> None:
        """Blocks take at most `limit_bytes`, by default a share of the device's memory."""
        self._caches = caches
        limit = _memory_of(caches.device) // _SHARE if limit_bytes is None else limit_bytes
        none = caches.save(0, 0, 0)  # whose other dimensions are those of a position
        self._most = limit // (BLOCK * none.itemsize * prod(none.shape[1:]))
        self._blocks: OrderedDict[bytes, _KeptRows] = OrderedDict()

    def find(self, keys: Sequence[bytes], *, wait: bool) -> list[Tensor] | None:
        """The blocks with which a text of such keys begins. None if the device has not yet told whether one of them is
        finite; with `wait`, the host waits for that. Blocks that are not finite are dropped."""
        found = []
        for key in self._touch(keys):
            block = self._blocks.get(key)
            if block is None:
                break
            if not (wait or block.check.is_over):
                return None
            if not block.check.finite[block.place]:
                del self._blocks[key]
                break
            found.append(block.rows)
        return found

    def restore(self, row: int, first: int, blocks: Sequence[Tensor]) -> None:
        """Write up to RUN blocks to a row, from its block `first` on."""
        self._caches.load(row, first * BLOCK, torch.cat(list(blocks)))

    def save(self, row: int, all_keys: Sequence[bytes]) -> None:
        """Keep the blocks of a row whose first positions hold a text of such keys. Keeps nothing where memory is
        short."""
        keys = self._touch(all_keys[: self._most])
        new = [place for place, key in enumerate(keys) if key not in self._blocks]
        if not new or not self._caches.reaches(row, len(keys) * BLOCK):
            return
        while len(self._blocks) + len(new) > self._most:
            self._blocks.popitem(last=False)
        try:
            for first in range(new[0], len(keys), RUN):
                self._copy(row, first, keys[first : first + RUN])
        except RuntimeError as error:
            if not is_exhausted(error):
                raise
            self.clear()
        self._touch(keys)

    def clear(self) -> None:
        """Drop all blocks, so that others can have their memory."""
        self._blocks.clear()

    def hold(self, row: int, positions: int) -> None:
        """`Caches.hold` with `may_take`. Where memory is short, it takes that of the blocks, too. Raises
        CacheMemoryError."""
        try:
            self._caches.hold(row, positions, may_take=True)
        except CacheMemoryError:
            if not self._blocks:
                raise
            self.clear()
            self._caches.hold(row, positions, may_take=True)

    def _touch(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """The keys, whose blocks are now the most recently used: the first one most, as it serves most prompts."""
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)
        return keys

    def _copy(self, row: int, first: int, keys: Sequence[bytes]) -> None:
        """Copy blocks of a row, from the `first` on, where they are not kept yet. Each has memory of its own."""
        rows = self._caches.save(row, first * BLOCK, (first + len(keys)) * BLOCK)
        flat = rows.reshape(len(keys), -1)
        check = _Check(flat.amax(1).isfinite() & flat.amin(1).isfinite())  # NaN if one is NaN
        for place, key in enumerate(keys):
            if key not in self._blocks:
                own = rows[place * BLOCK : (place + 1) * BLOCK].clone()
                self._blocks[key] = _KeptRows(own, check, place)


class _Check:
    """Whether blocks are finite, bool [blocks], as the device tells it later."""

    def __init__(self, told: Tensor) -> None:
        self._over: torch.cuda.Event | None = None
        self._finite, self._known = told, list[bool]()
        if told.is_cuda:
            self._finite = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            self._finite.copy_(told, non_blocking=True)
            self._over = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._over.record()

    @property
    def is_over(self) -> bool:
        """Whether it is known."""
        return self._over is None or bool(self._over.query())  # type: ignore[no-untyped-call]

    @property
    def finite(self) -> list[bool]:
        """Waits until it is known."""
        if not self._known:
            if self._over is not None:
                self._over.synchronize()
            self._known = self._finite.tolist()
        return self._known


@dataclass(frozen=True, slots=True)
class _KeptRows:
    """Cache rows as `Caches.save` gives them, and the entry of `check` that is theirs."""

    rows: Tensor
    check: _Check
    place: int


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """A key for each whole block, of all tokens up to its end."""
    text, keys, numbers = blake2b(digest_size=16), [], array("q", tokens)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        text.update(numbers[start : start + BLOCK])
        keys.append(text.digest())
    return keys


def _memory_of(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return available_bytes() or 0
