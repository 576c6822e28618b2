"""Tokens as text while they come, up to the words that end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

_UNFINISHED: Final = "�"
"""What a tokenizer makes of bytes that are no whole character yet."""

Decode = Callable[[Sequence[int]], str]


class Streamer:
    """Text of tokens, in pieces that never change again. `stops` end the text and are no part of it; `stopped` says
    whether one has."""

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, [stop for stop in stops if stop]
        self._ids: list[int] = []
        self._from, self._shown = 0, 0  # tokens from which a piece is decoded, and up to which text is out
        self._held = ""  # text that may be the beginning of a stop
        self.stopped = False

    def push(self, token_id: int) -> str:
        """What is certain with this token; often nothing."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._from : self._shown])
        whole = self._decode(self._ids[self._from :])
        if whole.endswith(_UNFINISHED) or len(whole) <= len(before):
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        return self._released(whole[len(before) :])

    def end(self) -> str:
        """What was held back, when no token follows."""
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._from : self._shown])
        rest = self._decode(self._ids[self._from :])[len(before) :]
        held = self._released(rest) + self._held
        self._held = ""
        return "" if self.stopped and not held else held

    def _released(self, text: str) -> str:
        self._held += text
        ends = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if ends:
            self.stopped = True
            released, self._held = self._held[: min(ends)], ""
            return released
        kept = max(_overlaps(self._held, self._stops), default=0)
        cut = len(self._held) - kept
        released, self._held = self._held[:cut], self._held[cut:]
        return released


def _overlaps(text: str, stops: Sequence[str]) -> Iterator[int]:
    """For each stop, how much of the text's end is its beginning."""
    for stop in stops:
        yield next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
