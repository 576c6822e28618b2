"""Long texts of numbers, written by compiled code: that of a step of llama3-8b has 90,000."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.compiled import compiled

Ints = npt.NDArray[np.int64]

NONE: Final = -(1 << 63)
"""In place of a number: a token that is its word alone."""

_DIGITS: Final = 20
"""Most that a number of 64 bits has, with its sign."""


class Words:
    """Numbers of distinct words."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {}

    def __call__(self, word: str) -> int:
        return self._codes.setdefault(word, len(self._codes))

    def written(self, codes: Ints, numbers: Ints) -> bytes:
        """Each token's word and behind it its number."""
        words = [word.encode("utf-8", "backslashreplace") for word in self._codes]
        ends = np.cumsum([0, *map(len, words)])
        size = int(np.diff(ends)[codes].sum()) + _DIGITS * len(codes)
        text = np.empty(size, np.uint8)
        end = _write(codes, numbers, np.frombuffer(b"".join(words), np.uint8), ends, text)
        return text[:end].tobytes()


class Tokens:
    """A text as tokens, a word and a number each; `kinds` say what the numbers mean to whoever writes the text."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._word = ""
        self._rows: list[tuple[int, int, int]] = []
        self._parts: list[Ints] = []

    def text(self, text: str) -> None:
        """Go on with a text."""
        self._word += text

    def number(self, number: int, kind: int = 0) -> None:
        """Go on with a number."""
        self._rows.append((self._words(self._word), number, kind))
        self._word = ""

    def series(self, numbers: Sequence[int] | Ints, between: str, kind: int = 0) -> None:
        """Go on with numbers, and a text between any two."""
        if len(numbers) < _FEW:
            for place, number in enumerate(numbers):
                self.text(between if place else "")
                self.number(int(number), kind)
            return
        part = np.empty((len(numbers), 3), np.int64)
        part[0, 0], part[1:, 0] = self._words(self._word), self._words(between)
        part[:, 1], part[:, 2] = numbers, kind
        self._flush()
        self._parts.append(part)
        self._word = ""

    def all(self) -> Ints:
        """[token, 3] of words, numbers and kinds."""
        if self._word:
            self.number(NONE)
        self._flush()
        return np.concatenate([np.zeros((0, 3), np.int64), *self._parts])

    def _flush(self) -> None:
        if self._rows:
            self._parts.append(np.array(self._rows, np.int64))
            self._rows = []


_FEW: Final = 12
"""Numbers that are not worth an array."""


@compiled
def _write(codes: Ints, numbers: Ints, words: npt.NDArray[np.uint8], ends: Ints, text: npt.NDArray[np.uint8]) -> int:
    """Fill `text`; how much of it."""
    place = 0
    digits = np.empty(20, np.uint8)
    for token in range(len(codes)):
        code, number = codes[token], numbers[token]
        for letter in range(ends[code], ends[code + 1]):
            text[place] = words[letter]
            place += 1
        if number == -(1 << 63):
            continue
        if number < 0:
            text[place] = 45
            place += 1
            number = -number
        count = 0
        while True:
            digits[count] = 48 + number % 10
            count += 1
            number //= 10
            if number == 0:
                break
        while count:
            count -= 1
            text[place] = digits[count]
            place += 1
    return place
