"""Tokens with their log-probabilities and texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.runtime.sequences import Made

Spelled = tuple[str, tuple[int, ...] | None]
"""A token's text within its context, and its bytes; None if they are not known."""

Spell = Callable[[Sequence[int]], list[Spelled]]

_KEPT: Final = 4096
"""The number of token texts that are cached. An answer rarely has more different likeliest tokens."""


@dataclass(frozen=True, slots=True)
class Likely:
    """A token with its log-probability. `text` is its own text, without neighbours; `raw` are its bytes, None if they
    are not known."""

    token_id: int
    text: str
    raw: tuple[int, ...] | None
    logprob: float


class Speller:
    """Texts of tokens, cached."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._known: dict[int, Spelled] = {}

    def likely(self, made: Made) -> tuple[Likely | None, tuple[Likely, ...]]:
        """(the chosen token, the likeliest tokens), with log-probabilities; (None, ()) if the request did not ask for
        them."""
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
