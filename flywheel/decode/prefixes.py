"""Prefix cache: records the tokens that each row's cache holds, so that a prompt with the same prefix reuses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from flywheel.decode.caches import Caches
from flywheel.tensors import all_finite

LEAST: Final = 16
"""Shortest shared prefix, in tokens, that is worth copying."""


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
