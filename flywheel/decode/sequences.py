"""Sequences that decode together: each launch makes a token of every one, and between launches they come and go."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flywheel.decode.caches import Caches
from flywheel.decode.choices import Choices
from flywheel.decode.logprobs import most_asked, read_row, report
from flywheel.decode.made import Made
from flywheel.decode.prefixes import Prefixes
from flywheel.decode.sampling import Sampling
from flywheel.decode.step import Positions, Step, check_place, check_prompt
from flywheel.errors import CacheMemoryError, UsageError
from flywheel.models.spec import DecoderSpec


class Sequences(Protocol):
    """Rows 0 to `batch` - 1 of a session, each free or taken by a sequence. What a sequence gets does not depend on
    what the other rows hold."""

    @property
    def batch(self) -> int:
        """How many rows there are."""

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> int:
        """Take a free row for a sequence: read all of its prompt but the last token at once, and decode from there, to
        `positions` - 1. With `reuse`, what another sequence has of the prompt's beginning is copied and not read again;
        how many tokens that is. Raises UsageError for a token or position out of range, and for a row that is taken,
        and CacheMemoryError where memory for the prompt is others'."""

    def pick(self, free: Sequence[int], prompt: Sequence[int]) -> int:
        """The best of some free rows for a prompt."""

    def leave(self, row: int) -> None:
        """Make a row free. Nothing more comes of its sequence."""

    def advance(self) -> list[Made]:
        """The tokens of one launch, of each sequence that has not come to its end; empty where there is none left to
        come, or none yet."""

    def lost(self) -> dict[int, CacheMemoryError]:
        """Rows whose sequences ended since this was asked last, for want of memory for their caches, and why. They are
        free."""

    def close(self) -> None:
        """Make all rows free, and give memory back."""


class Stepped(Protocol):
    """What a BatchSession does for sequences that decode step by step."""

    @property
    def spec(self) -> DecoderSpec:
        """The model."""

    @property
    def context(self) -> int:
        """Positions that the caches hold."""

    @property
    def batch(self) -> int:
        """Sequences, rows 0 to batch - 1."""

    @property
    def caches(self) -> Caches:
        """Of all sequences."""

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """Decode a token of each sequence, of which only those `wanted` are cached."""

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """Begin the sequence of a row, whose positions before `start` are there."""


def check_join(session: Stepped, prompt: Sequence[int], positions: int) -> None:
    """Raises UsageError for no prompt, a token out of range, or positions that the prompt or the context rules out."""
    if not prompt:
        raise UsageError(f"{session.spec.name}: a sequence without a token")
    check_prompt(session.spec, session.context, prompt)
    check_place(session.spec, session.context, prompt[-1], positions - 1)
    if positions < len(prompt):
        raise UsageError(f"{session.spec.name}: {positions} positions for a prompt of {len(prompt)} tokens")


class SteppedSequences:
    """Sequences of a session that waits for each launch."""

    def __init__(self, session: Stepped) -> None:
        self.batch = session.batch
        self._session = session
        self._rows: dict[int, _Row] = {}
        self._lost: dict[int, CacheMemoryError] = {}
        self._prefixes = Prefixes(session.caches)
        self._choices = Choices(session.batch, session.spec.vocab, torch.device("cpu"))

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> int:
        """As Sequences says."""
        check_join(self._session, prompt, positions)
        if row in self._rows:
            raise UsageError(f"{self._session.spec.name}: row {row} is taken")
        try:
            start = self._prefixes.reuse(row, prompt, reuse)
            self._session.prefill(prompt[:-1], row, start)
        except CacheMemoryError:
            self._session.caches.leave(row)
            raise
        self._prefixes.begin(row, prompt)
        self._choices.begin(row, prompt, sampling)
        self._rows[row] = _Row(prompt[-1], len(prompt) - 1, positions, sampling)
        return start

    def pick(self, free: Sequence[int], prompt: Sequence[int]) -> int:
        """As Sequences says."""
        return self._prefixes.pick(free, prompt)

    def leave(self, row: int) -> None:
        """As Sequences says."""
        self._rows.pop(row, None)
        self._choices.free(row)
        self._prefixes.leave(row)
        self._session.caches.leave(row)

    def advance(self) -> list[Made]:
        """As Sequences says."""
        live = {row: each for row, each in self._rows.items() if each.position < each.positions and self._grows(row)}
        if not live:
            return []
        rows = range(self.batch)
        # A row that nobody has decodes token 0 at position 0 of its own caches.
        tokens = [live[row].token if row in live else 0 for row in rows]
        places = [live[row].position if row in live else 0 for row in rows]
        steps = self._session.step_rows(tokens, places, live)
        chosen = torch.tensor([step.token for step in steps])
        logits = torch.stack([step.logits for step in steps]).cpu()
        self._choices.replace(chosen, logits, {row: each.position for row, each in live.items()})
        for row, each in live.items():
            each.token = int(chosen[row])
            self._prefixes.add(row, each.token)
            each.position += 1
        most = most_asked(each.sampling for each in live.values())
        if most is None:
            return [Made(row, each.token) for row, each in live.items()]
        found = report(logits, chosen, most).numpy()
        return [Made(row, each.token, read_row(found[row], each.sampling)) for row, each in live.items()]

    def lost(self) -> dict[int, CacheMemoryError]:
        """As Sequences says."""
        for row in self._lost:
            self.leave(row)
        lost, self._lost = self._lost, {}
        return lost

    def _grows(self, row: int) -> bool:
        """Memory for the next launch of a row; False where there is none."""
        try:
            self._session.caches.hold(row, self._rows[row].position + 1, may_take=True)
        except CacheMemoryError as error:
            self._lost[row] = error
        return row not in self._lost

    def close(self) -> None:
        """As Sequences says."""
        for row in list(self._rows):
            self.leave(row)


@dataclass(slots=True)
class _Row:
    """A sequence: the token that it decodes next, and where."""

    token: int
    position: int
    positions: int
    sampling: Sampling
