"""Incremental detokenisation: turns tokens into text as they come, up to stop words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from flywheel.errors import FlywheelError

_UNFINISHED: Final = "\ufffd"
"""The character that a tokenizer returns for bytes of an incomplete character."""

DecodeEach = Callable[[Sequence[Sequence[int]]], Sequence[str]]
"""The texts of several lists of token ids. Raises FlywheelError."""


class Streamer:
    """Text of tokens in pieces that never change again. `stops` end the text and are not part of it; `stopped` says
    whether one has ended it. `push_all` adds tokens."""

    def __init__(self, stops: str | Sequence[str] = ()) -> None:
        self._stops = [stop for stop in ((stops,) if isinstance(stops, str) else stops) if stop]
        self._ids: list[int] = []
        self._from, self._shown = 0, 0  # start of the tokens to decode; end of those whose text is out
        self._behind = ""  # text of later tokens that is not yet a whole character
        self._held = ""  # text that may begin a stop word
        self.stopped = False

    def add(self, token_id: int) -> tuple[Sequence[int], Sequence[int]]:
        """Add a token. Returns two lists of tokens: those whose text is out, and these with the tokens after them.
        `take` needs the texts of both."""
        self._ids.append(token_id)
        return self._ids[self._from : self._shown], self._ids[self._from :]

    def take(self, before: str, whole: str) -> str:
        """The text that has become certain with the last token; often empty."""
        self._behind = whole[len(before) :]
        if whole.endswith(_UNFINISHED) or not self._behind:
            return ""
        self._from, self._shown = self._shown, len(self._ids)
        certain, self._behind = self._behind, ""
        return self._released(certain)

    def end(self) -> str:
        """The text that was held back, when no more tokens follow."""
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
    """Add one token to each text, and return the text that has become certain, or the error of a text, which ends only
    that text. Decodes all at once, since a call to the tokenizer takes longer than its work."""
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
    """For each stop word, how many of its first characters end the text."""
    for stop in stops:
        yield next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
