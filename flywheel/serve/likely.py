"""How likely tokens are, with their texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.decode.made import Made

Spelled = tuple[str, tuple[int, ...] | None]
"""A token's text within a text, and its bytes; None where they are not known."""

Spell = Callable[[Sequence[int]], list[Spelled]]

_KEPT: Final = 4096
"""Tokens whose texts are kept: more are the likeliest of one answer seldom."""


@dataclass(frozen=True, slots=True)
class Likely:
    """A token with the logarithm of its share. `text` is its own, without those around it; `raw` are its bytes, None
    where they are not known."""

    token_id: int
    text: str
    raw: tuple[int, ...] | None
    logprob: float


class Speller:
    """Texts of tokens, each asked for once."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._known: dict[int, Spelled] = {}

    def likely(self, made: Made) -> tuple[Likely | None, tuple[Likely, ...]]:
        """(the token that was made, the likeliest) with their logarithms; None and none where nobody asked."""
        if made.logprobs is None:
            return None, ()
        pairs = ((made.token, made.logprobs.chosen), *made.logprobs.top)
        missing = list(dict.fromkeys(token for token, _ in pairs if token not in self._known))
        if len(self._known) + len(missing) > _KEPT:
            self._known.clear()
            missing = list(dict.fromkeys(token for token, _ in pairs))
        if missing:
            self._known.update(zip(missing, self._spell(missing), strict=True))
        first, *rest = (Likely(token, *self._known[token], logprob) for token, logprob in pairs)
        return first, tuple(rest)
