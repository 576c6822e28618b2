"""Prompt lookup: guesses of the next tokens of a text from where its end has stood before, and what becomes of them.

Source: apoorvumang/prompt-lookup-decoding; Mirage MPK, `find_ngram_partial` and `target_verify_greedy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LONGEST: Final = 3
"""Tokens at the end of a text that are looked up; fewer, down to one, where so many have not stood there before."""


class Lookup:
    """A text that grows, and where each run of up to `LONGEST` of its tokens stood last; a token costs as much,
    however long the text is."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these."""
        text = self._text
        for token in tokens:
            end = len(text)
            for size in range(1, min(LONGEST, end) + 1):
                self._behind[tuple(text[end - size :])] = end
            text.append(token)

    def propose(self, count: int) -> list[int]:
        """The `count` tokens that stood behind the longest end of the text that stood there before, where it stood
        last; where the text ends before them, it goes round. Empty where even the last token is new."""
        text = self._text
        for size in range(min(LONGEST, len(text)), 0, -1):
            start = self._behind.get(tuple(text[-size:]))
            if start is not None:
                period = len(text) - start
                return [text[start + place % period] for place in range(count)]
        return []


def accepted(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of the `chosen` tokens, each the model's choice behind the ones proposed before it, the text goes on
    with: one, and one more for each guess that was right, up to the first wrong one. `chosen` has one token more than
    `proposed`."""
    for place, (guess, choice) in enumerate(zip(proposed, chosen[:-1], strict=True)):
        if guess != choice:
            return place + 1
    return len(chosen)
