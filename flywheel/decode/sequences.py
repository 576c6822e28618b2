"""Sequences that decode together by single steps: each launch makes a token of every one, or several where it confirms
drafts. They start and leave between launches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch

from flywheel.decode.choices import Choices, most_asked, read_row, report
from flywheel.decode.pieces import Arrival, Arrivals
from flywheel.decode.prefixes import Prefixes, keys_of
from flywheel.decode.session import Step, Stepped
from flywheel.errors import CacheMemoryError, FlywheelError
from flywheel.ir import NO_TOKEN
from flywheel.runtime.sequences import Made, PromptRead, Sampling, check_join, not_finite

LONGEST: Final = 3
"""Longest suffix of a text that is looked up; shorter ones, down to one token, are tried if it has not occurred
before."""


class SteppedSequences:
    """Sequences of a session that waits for each launch.

    With several lanes, a launch decodes a sequence's last token and drafts of the tokens after it, and keeps the drafts
    that the program's own choices confirm. The next launch overwrites the cache rows of wrong drafts.
    """

    def __init__(self, session: Stepped, close: Callable[[], None] = lambda: None) -> None:
        """`close` frees the session's memory when this object is closed."""
        self.batch = session.batch
        self._session, self._close = session, close
        self._lanes, self._last = session.lanes, session.context - session.lanes
        self._rows: dict[int, _SequenceRow] = {}
        self._lost: dict[int, FlywheelError] = {}
        self._prefixes = Prefixes(session.caches)
        self._arrivals = Arrivals(session.caches, self._prefixes, session.reading, lambda: None)
        self._choices = Choices(session.batch, session.spec.vocab, torch.device("cpu"))

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> None:
        """See `Sequences.join`."""
        taken = self._rows if row in self._rows else self._arrivals
        check_join(self._session.spec, self._session.context, taken, row, prompt, positions)
        try:
            self._prefixes.hold(row, len(prompt))
        except CacheMemoryError:
            self._session.caches.leave(row)
            raise
        self._arrivals.add(Arrival(row, tuple(prompt), positions, sampling, reuse))

    def read_of(self, row: int) -> PromptRead:
        """See `Sequences.read_of`."""
        return self._arrivals.read_of(row)

    def begin(self, row: int, prompt: Sequence[int], positions: int, start: int, sampling: Sampling) -> None:
        """Start a sequence in a free row whose caches hold the prompt's positions before `start`."""
        guesses = self._lanes > 1 and sampling.lookup and sampling.is_argmax
        lookup = Lookup(prompt) if guesses else None
        self._rows[row] = _SequenceRow(list(prompt), start, positions, sampling, lookup)

    def leave(self, row: int) -> None:
        """See `Sequences.leave`."""
        self._arrivals.drop(row)
        left = self._rows.pop(row, None)
        if left is not None and self._lost.pop(row, None) is None:
            self._prefixes.save(row, keys_of(left.text[: left.position]))
        self._choices.free(row)
        self._session.caches.leave(row)

    def advance(self) -> list[Made]:
        """See `Sequences.advance`. With several lanes, a sequence can have several tokens, in order."""
        self._read()
        while live := self._live():
            asked = {row: each.ask(self._lanes, self._last) for row, each in live.items()}
            nobody = _AskedTokens(0, [0] * self._lanes, 0, [])  # a free row decodes position 0 of its own caches
            every = [asked.get(row, nobody) for row in range(self.batch)]
            tokens = [token for each in every for token in each.tokens]
            begun = perf_counter()
            steps = self._session.step_rows(tokens, [each.place for each in every], live)
            self._arrivals.pace.launch_took((perf_counter() - begun) * 1e6)
            made = self._take(live, asked, steps)
            if made:
                return made
            self._read()
        return []

    def _read(self) -> None:
        """Read the next piece of a prompt, and begin its sequence if that was the last."""
        begun = perf_counter()
        alone = not any(each.position < each.positions for each in self._rows.values())
        piece = self._arrivals.read(alone=alone)
        if piece is not None and piece.layers:
            if (device := self._session.caches.device).type == "cuda":
                torch.cuda.current_stream(device).synchronize()
            self._arrivals.pace.piece_took(piece, (perf_counter() - begun) * 1e6)
        if piece is not None and (joins := piece.joins) is not None:
            self.begin(joins.row, joins.prompt, joins.positions, len(joins.prompt) - 1, joins.sampling)

    def _live(self) -> dict[int, _SequenceRow]:
        return {row: each for row, each in self._rows.items() if each.position < each.positions and self._grows(row)}

    def _take(
        self, live: Mapping[int, _SequenceRow], asked: Mapping[int, _AskedTokens], steps: Sequence[Step]
    ) -> list[Made]:
        """The tokens that a launch made for each sequence whose last known token it decoded."""
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
            tokens = chosen[first : first + min(count, each.positions - each.position)]
            if NO_TOKEN in tokens:
                tokens = tokens[: tokens.index(NO_TOKEN)]
                self._lost[row] = not_finite([*each.text, *tokens], self._session.explain)
            each.extend(tokens)
            made += [(first + place, row) for place in range(len(tokens))]
        most = most_asked(each.sampling for each in speaking.values())
        if most is None or not made:
            return [Made(row, chosen[place]) for place, row in made]
        logits = torch.stack([steps[place].logits for place, _ in made]).cpu()
        found = report(logits, torch.tensor([chosen[place] for place, _ in made]), most).numpy()
        return [
            Made(row, chosen[place], read_row(words, live[row].sampling))
            for (place, row), words in zip(made, found, strict=True)
        ]

    def _spoken(self, row: int, asked: _AskedTokens) -> int:
        """The row of the launch whose logits choose a sequence's next token."""
        return row * self._lanes + asked.known - asked.place - 1

    def _draw(
        self, speaking: Mapping[int, _SequenceRow], asked: Mapping[int, _AskedTokens], chosen: list[int],
        steps: Sequence[Step],
    ) -> None:
        """Replace the program's own choices by sampled tokens where a sequence samples."""
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

    def lost(self) -> dict[int, FlywheelError]:
        """See `Sequences.lost`."""
        lost = dict(self._lost)
        for row in lost:
            self.leave(row)
        return lost | self._arrivals.lost()

    def _grows(self, row: int) -> bool:
        """Get memory for the next launch of a row; False if there is none, or the row has lost its sequence."""
        if row in self._lost:
            return False
        try:
            place = min(self._rows[row].position, self._last)
            self._prefixes.hold(row, place + self._lanes)
        except CacheMemoryError as error:
            self._lost[row] = error
            return False
        return True

    def close(self) -> None:
        """See `Sequences.close`."""
        self._prefixes.clear()
        self._rows.clear()
        for row in range(self.batch):
            self.leave(row)
        self._close()


def stream_by_lanes(
    sequences: SteppedSequences, prompt: Sequence[int], positions: int, start: int, sampling: Sampling
) -> Generator[int, None, None]:
    """`DecodeSession.stream` for the first row of a session with several lanes."""
    sequences.begin(0, prompt, positions, start, sampling)
    try:
        while made := sequences.advance():
            yield from [each.token for each in made]
        for error in sequences.lost().values():
            raise error
    finally:
        sequences.close()


@dataclass(frozen=True, slots=True)
class _AskedTokens:
    """The tokens of one sequence in a launch: `tokens`, one per lane, at positions from `place` on. The tokens
    before position `known` are the text's; if the text ends there, the drafts `guesses` follow."""

    place: int
    tokens: list[int]
    known: int
    guesses: list[int]


@dataclass(slots=True)
class _SequenceRow:
    """A sequence: its text, the first position that the caches do not hold, and its end. `speaks` is true once it makes
    tokens of its own."""

    text: list[int]
    position: int
    positions: int
    sampling: Sampling
    lookup: Lookup | None
    speaks: bool = False

    def ask(self, lanes: int, last: int) -> _AskedTokens:
        """The tokens for the next launch. At the end of the context it decodes some tokens again, since no launch may
        start after `last`."""
        place = min(self.position, last)
        tokens = self.text[place : place + lanes]
        known, room = place + len(tokens), lanes - len(tokens)
        guesses = self.lookup.propose(room) if room and self.lookup is not None else []
        return _AskedTokens(place, [*tokens, *guesses, *[0] * (room - len(guesses))], known, guesses)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self.text += tokens
        self.position = len(self.text) - 1
        if self.lookup is not None:
            self.lookup.extend(tokens)


class Lookup:
    """A growing text, which drafts its next tokens from an earlier occurrence of its last ones. It has the last place
    of each run of up to `LONGEST` tokens. The cost of adding a token does not depend on the length of the text.

    Source: apoorvumang/prompt-lookup-decoding; Mirage MPK, `find_ngram_partial` and `target_verify_greedy`.
    """

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
