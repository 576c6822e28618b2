"""Tokens as text while they come, up to the words that end it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flywheel.errors import FlywheelError

_UNFINISHED: Final = "\ufffd"
"""What a tokenizer makes of bytes that are no whole character yet."""

DecodeEach = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""The text of each of some lists of token ids. Raises FlywheelError."""


class Streamer:
    """Text of tokens, in pieces that never change again. `stops` end the text and are no part of it; `stopped` says
    whether one has. `push_all` gives it tokens."""

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        self._stops = [stop for stop in ((stops,) if isinstance(stops, str) else stops) if stop]
        self._ids: list[int] = []
        self._from, self._shown = 0, 0  # tokens from which a piece is decoded, and up to which text is out
        self._behind = ""  # text of tokens behind those, as far as it is no whole character
        self._held = ""  # text that may be the beginning of a stop
        self.stopped = False

    def add(self, token_id: int) -> tuple[Sequence[int], Sequence[int]]:
        """The next token. `take` needs the texts of what this gives: tokens whose text is out, and these with those
        behind them."""
        self._ids.append(token_id)
        return self._ids[self._from : self._shown], self._ids[self._from :]

    def take(self, before: str, whole: str) -> str:
        """What is certain with the token that was added last; often nothing."""
        self._behind = whole[len(before) :]
        if whole.endswith(_UNFINISHED) or not self._behind:
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        certain, self._behind = self._behind, ""
        return self._released(certain)

    def end(self) -> str:
        """What was held back, when no token follows."""
        if self.stopped:
            return ""
        held = self._released(self._behind) + self._held
        self._behind = self._held = ""
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


def push_all(decode_each: DecodeEach, tokens: Sequence[tuple[Streamer, int]]) -> list[str | FlywheelError]:
    """The next token of each of some texts, and what is certain with it; what went wrong with a text ends it alone.
    All are decoded at once: asking a tokenizer takes longer than its answer."""
    if not tokens:
        return []
    parts = [streamer.add(token_id) for streamer, token_id in tokens]
    try:
        texts = decode_each([part for pair in parts for part in pair])
    except FlywheelError as error:
        if len(tokens) == 1:
            return [error]
        return [_alone(decode_each, streamer, pair) for (streamer, _), pair in zip(tokens, parts, strict=True)]
    return [
        streamer.take(before, whole)
        for (streamer, _), before, whole in zip(tokens, texts[::2], texts[1::2], strict=True)
    ]


def _alone(
    decode_each: DecodeEach, streamer: Streamer, parts: tuple[Sequence[int], Sequence[int]]
) -> str | FlywheelError:
    try:
        before, whole = decode_each(parts)
    except FlywheelError as error:
        return error
    return streamer.take(before, whole)


def _overlaps(text: str, stops: Sequence[str]) -> Iterator[int]:
    """For each stop, how much of the text's end is its beginning."""
    for stop in stops:
        yield next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
