"""Sequences that decode together: each launch makes a token of every one, and between launches they come and go."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flywheel.decode.caches import Caches
from flywheel.decode.choices import Choices
from flywheel.decode.logprobs import most_asked, read_row, report
from flywheel.decode.lookup import Lookup, accepted
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
    def lanes(self) -> int:
        """Consecutive tokens of each sequence in a launch."""

    @property
    def caches(self) -> Caches:
        """Of all sequences."""

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """Decode a token of each sequence, or one a lane, of which only those `wanted` are cached."""

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """Begin the sequence of a row, whose positions before `start` are there."""


class Closing(Protocol):
    """What holds memory of its own."""

    def close(self) -> None:
        """Give it back."""


def check_join(session: Stepped, prompt: Sequence[int], positions: int) -> None:
    """Raises UsageError for no prompt, a token out of range, or positions that the prompt or the context rules out."""
    if not prompt:
        raise UsageError(f"{session.spec.name}: a sequence without a token")
    check_prompt(session.spec, session.context, prompt)
    check_place(session.spec, session.context, prompt[-1], positions - 1)
    if positions < len(prompt):
        raise UsageError(f"{session.spec.name}: {positions} positions for a prompt of {len(prompt)} tokens")


class SteppedSequences:
    """Sequences of a session that waits for each launch.

    With several lanes, a launch decodes a sequence's last token and guesses of those behind it, and goes on with as
    many as the program's own choices confirm. What it has cached of wrong guesses, the next launch writes again.
    """

    def __init__(self, session: Stepped, owned: Closing | None = None) -> None:
        """`owned` is closed with it."""
        self.batch = session.batch
        self._session, self._owned = session, owned
        self._lanes, self._last = session.lanes, session.context - session.lanes
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
        self.begin(row, prompt, positions, len(prompt) - 1, sampling)
        return start

    def begin(self, row: int, prompt: Sequence[int], positions: int, start: int, sampling: Sampling) -> None:
        """Take a free row, whose caches hold the prompt's positions before `start`."""
        guesses = self._lanes > 1 and sampling.lookup and sampling.is_argmax
        lookup = Lookup(prompt) if guesses else None
        self._rows[row] = _Row(list(prompt), start, positions, sampling, lookup)

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
        """As Sequences says; of each sequence one token, or with several lanes some, in their order."""
        while live := self._live():
            asked = {row: each.ask(self._lanes, self._last) for row, each in live.items()}
            nobody = _Asked(0, [0] * self._lanes, 0, [])  # a row that nobody has decodes position 0 of its own caches
            every = [asked.get(row, nobody) for row in range(self.batch)]
            tokens = [token for each in every for token in each.tokens]
            steps = self._session.step_rows(tokens, [each.place for each in every], live)
            made = self._take(live, asked, steps)
            if made:
                return made
        return []

    def _live(self) -> dict[int, _Row]:
        return {row: each for row, each in self._rows.items() if each.position < each.positions and self._grows(row)}

    def _take(self, live: Mapping[int, _Row], asked: Mapping[int, _Asked], steps: Sequence[Step]) -> list[Made]:
        """What a launch makes of the sequences whose last tokens it decoded."""
        chosen = [step.token for step in steps]
        speaking = {row: each for row, each in live.items() if asked[row].known == len(each.text)}
        self._draw(speaking, asked, chosen, steps)
        made: list[tuple[int, int]] = []  # row of the launch, sequence
        for row, each in live.items():
            if row not in speaking:
                each.position = asked[row].known
                continue
            first, guesses = self._spoken(row, asked[row]), asked[row].guesses
            count = accepted(guesses, chosen[first : first + 1 + len(guesses)])
            count = min(count, each.positions - each.position)
            each.extend(chosen[first : first + count])
            made += [(first + place, row) for place in range(count)]
            for token in chosen[first : first + count]:
                self._prefixes.add(row, token)
        most = most_asked(each.sampling for each in speaking.values())
        if most is None:
            return [Made(row, chosen[place]) for place, row in made]
        logits = torch.stack([steps[place].logits for place, _ in made]).cpu()
        found = report(logits, torch.tensor([chosen[place] for place, _ in made]), most).numpy()
        return [
            Made(row, chosen[place], read_row(words, live[row].sampling))
            for (place, row), words in zip(made, found, strict=True)
        ]

    def _spoken(self, row: int, asked: _Asked) -> int:
        """The row of the launch behind which a sequence's next token stands."""
        return row * self._lanes + asked.known - asked.place - 1

    def _draw(
        self, speaking: Mapping[int, _Row], asked: Mapping[int, _Asked], chosen: list[int], steps: Sequence[Step]
    ) -> None:
        """Put what sequences draw into the place of the program's own choice."""
        for row, each in speaking.items():
            each.position = len(each.text) - 1
            if not each.speaks:
                self._choices.begin(row, each.text, each.sampling)
                each.speaks = True
        if all(each.sampling.is_argmax for each in speaking.values()):
            return
        places = [self._spoken(row, asked[row]) if row in speaking else row * self._lanes for row in range(self.batch)]
        tokens = torch.tensor([chosen[place] for place in places])
        logits = torch.stack([steps[place].logits for place in places]).cpu()
        self._choices.replace(tokens, logits, {row: each.position for row, each in speaking.items()})
        for row in speaking:
            chosen[places[row]] = int(tokens[row])

    def lost(self) -> dict[int, CacheMemoryError]:
        """As Sequences says."""
        for row in self._lost:
            self.leave(row)
        lost, self._lost = self._lost, {}
        return lost

    def _grows(self, row: int) -> bool:
        """Memory for the next launch of a row; False where there is none."""
        try:
            place = min(self._rows[row].position, self._last)
            self._session.caches.hold(row, place + self._lanes, may_take=True)
        except CacheMemoryError as error:
            self._lost[row] = error
        return row not in self._lost

    def close(self) -> None:
        """As Sequences says."""
        for row in list(self._rows):
            self.leave(row)
        if self._owned is not None:
            self._owned.close()


def stream_by_lanes(
    sequences: SteppedSequences, prompt: Sequence[int], positions: int, start: int, sampling: Sampling
) -> Generator[int, None, None]:
    """As `DecodeSession.stream`, of the first row of a session of several lanes."""
    sequences.begin(0, prompt, positions, start, sampling)
    try:
        while made := sequences.advance():
            yield from [each.token for each in made]
        for error in sequences.lost().values():
            raise error
    finally:
        sequences.close()


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a launch decodes of a sequence: `tokens`, a lane each, from `place` on. Of these the text ends with, or goes
    on behind, the one before `known`; `guesses` follow where it ends."""

    place: int
    tokens: list[int]
    known: int
    guesses: list[int]


@dataclass(slots=True)
class _Row:
    """A sequence: its text, the first position that the caches do not hold, and where it ends. `speaks` once it makes
    tokens of its own."""

    text: list[int]
    position: int
    positions: int
    sampling: Sampling
    lookup: Lookup | None
    speaks: bool = False

    def ask(self, lanes: int, last: int) -> _Asked:
        """The next launch. Where the context ends, it decodes some tokens again: no launch begins behind `last`."""
        place = min(self.position, last)
        tokens = self.text[place : place + lanes]
        known, room = place + len(tokens), lanes - len(tokens)
        guesses = self.lookup.propose(room) if room and self.lookup is not None else []
        return _Asked(place, [*tokens, *guesses, *[0] * (room - len(guesses))], known, guesses)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        self.text += tokens
        self.position = len(self.text) - 1
        if self.lookup is not None:
            self.lookup.extend(tokens)
