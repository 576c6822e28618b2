"""What the caches of rows hold, so that a prompt that begins alike need not be read again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from flywheel.decode.caches import Caches

LEAST: Final = 16
"""Tokens alike from which on copying is worth its while."""


class Prefixes:
    """The tokens of each row's sequence, alive or over, as long as the caches are this session's.

    A free row decodes at position 0 of its caches, so what was there is kept apart. Nothing else is: the memory is that
    of the rows.
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._tokens: dict[int, list[int]] = {}  # the one used last comes last
        self._first: dict[int, Tensor] = {}

    def pick(self, free: Sequence[int], prompt: Sequence[int]) -> int:
        """The free row for a prompt: one whose sequence the prompt continues, else one that holds nothing, else the one
        that was used longest ago."""
        source, length = self._longest(prompt)
        if source in free and length == len(self._tokens[source]) - 1:
            return source
        places = {row: place for place, row in enumerate(self._tokens)}
        return min(free, key=lambda row: (places.get(row, -1), row))

    def reuse(self, row: int, prompt: Sequence[int], wanted: bool) -> int:
        """Copy what another sequence, or the one before in this row, has of a prompt's beginning to a row's caches, and
        how many positions that is. No launch is under way. Raises CacheMemoryError."""
        source, length = self._longest(prompt) if wanted else (row, 0)
        there = length >= LEAST and self._caches.reaches(source, length)
        self._caches.hold(row, len(prompt), may_take=True)  # maybe by what the other one had
        self._tokens.pop(row, None)
        if not there or not self._caches.reaches(source, length):
            return 0
        self._caches.copy(source, row, length, self._first[source])
        return length

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        """The caches of a row hold all of a prompt but its last token."""
        if len(prompt) > LEAST:
            self._tokens[row] = list(prompt)
            self._first[row] = self._caches.first(row)

    def add(self, row: int, token: int) -> None:
        """A row has made a token, and so the caches hold the one before."""
        if row in self._tokens:
            self._tokens[row].append(token)

    def leave(self, row: int) -> None:
        """A row's sequence is over."""
        if row in self._tokens:
            self._tokens[row] = self._tokens.pop(row)

    def _longest(self, prompt: Sequence[int]) -> tuple[int, int]:
        """The row with most of a prompt's beginning, its last token excluded, and how many tokens."""
        lengths = {row: _alike(tokens[:-1], prompt[:-1]) for row, tokens in self._tokens.items()}
        row = max(lengths, key=lengths.__getitem__, default=-1)
        return row, lengths.get(row, 0)


def _alike(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that both have."""
    count = min(len(one), len(other))
    return next((place for place in range(count) if one[place] != other[place]), count)
