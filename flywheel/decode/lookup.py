"""Prompt lookup decoding: drafts the next tokens of a text from an earlier occurrence of its last tokens.

Source: apoorvumang/prompt-lookup-decoding; Mirage MPK, `find_ngram_partial` and `target_verify_greedy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

LONGEST: Final = 3
"""Longest suffix of a text that is looked up; shorter ones, down to one token, are tried if it has not occurred
before."""


class Lookup:
    """A growing text, with the last place of each run of up to `LONGEST` of its tokens. The cost of adding a token does
    not depend on the length of the text."""

    def __init__(self, text: Sequence[int]) -> None:
        self._text: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}
        self.extend(text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        text = self._text
        for token in tokens:
            end = len(text)
            for size in range(1, min(LONGEST, end) + 1):
                self._behind[tuple(text[end - size :])] = end
            text.append(token)

    def propose(self, count: int) -> list[int]:
        """Draft `count` tokens: those that followed the latest earlier occurrence of the longest possible suffix of the
        text. If the text ends first, the draft repeats them. Empty if even the last token is new."""
        text = self._text
        for size in range(min(LONGEST, len(text)), 0, -1):
            start = self._behind.get(tuple(text[-size:]))
            if start is not None:
                period = len(text) - start
                return [text[start + place % period] for place in range(count)]
        return []


def accepted(proposed: Sequence[int], chosen: Sequence[int]) -> int:
    """The number of `chosen` tokens that continue the text: one, plus one for each correct draft token up to the first
    wrong one. Each chosen token is the model's choice after the draft tokens before it; `chosen` is one longer than
    `proposed`."""
    for place, (guess, choice) in enumerate(zip(proposed, chosen[:-1], strict=True)):
        if guess != choice:
            return place + 1
    return len(chosen)
