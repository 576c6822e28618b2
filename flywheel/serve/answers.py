"""Answers that are decoded together: they wait for a free row, join between two launches, and leave with their end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol
from weakref import ref

from flywheel.decode.made import Made
from flywheel.decode.request import Request
from flywheel.decode.sampling import Sampling
from flywheel.errors import CacheMemoryError, FlywheelError, GpuFaultError, LaunchTimeoutError, UsageError
from flywheel.serve.likely import Likely, Speller
from flywheel.serve.text import DecodeEach, Streamer, push_all

if TYPE_CHECKING:
    from flywheel.decode.sequences import Sequences

Finish = Literal["stop", "length"]


class Session(Protocol):
    """A model in memory that decodes sequences together."""

    @property
    def context(self) -> int:
        """Positions that the caches hold."""

    @property
    def batch(self) -> int:
        """Sequences, rows 0 to batch - 1."""

    def sequences(self) -> Sequences:
        """Sequences that decode together, of which none is there yet. Nothing else uses the session until they are
        closed."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A token that was made, and the text that is certain with it. The text may be empty.

    A last piece that holds only text has no `token_id`. Where the sampling asks for logarithms, `likely` is the token
    with its own, and `top` are the likeliest tokens. `ends` marks the token that ends a text and is no part of it."""

    token_id: int | None
    text: str
    likely: Likely | None = None
    top: tuple[Likely, ...] = ()
    ends: bool = False


class Answer(Iterator[Piece]):
    """The pieces of an answer as they come.

    Asking for a piece decodes all answers that have begun. The pieces of the others wait until somebody asks for them.
    `close` ends the answer early; an answer that nobody holds a reference to ends, too. `reused_tokens` of its prompt
    were not read again."""

    def __init__(
        self, batch: Batch, request: Request, sampling: Sampling, text: Streamer, speller: Speller,
        reuse: bool = True,
    ) -> None:  # fmt: skip
        """With `reuse`, a beginning that another answer's prompt shares is copied and not read again."""
        self.prompt_tokens: Final = len(request.prompt)
        self.request: Final = request
        self.sampling: Final = sampling
        self.reuse: Final = reuse
        self.reused_tokens = 0
        self.text: Final = text
        self._batch, self._speller = batch, speller
        self._pieces: deque[Piece] = deque()
        self._left = request.max_tokens
        self._finish: Finish | None = None
        self._begun = self._closed = False
        self._error: FlywheelError | None = None

    def __next__(self) -> Piece:
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopIteration
            self.begin()
            self._batch.advance()
        return self._pieces.popleft()

    @property
    def finish(self) -> Finish | None:
        """Why the answer is over; None before its last piece is out."""
        return self._finish if not self._pieces else None

    @property
    def is_over(self) -> bool:
        """Whether no more tokens are made."""
        return self._finish is not None or self._closed or self._error is not None

    def begin(self) -> None:
        """Wait for a row from now on. Raises UsageError where the decoder is closed."""
        if not self._begun and not self._closed:
            self._batch.add(self)
            self._begun = True

    def ready(self) -> list[Piece]:
        """The pieces that nobody has taken; does not decode. Behind the last one, raises what ended the answer."""
        found = list(self._pieces)
        self._pieces.clear()
        if self._error is not None and not found:
            raise self._error
        return found

    def close(self) -> None:
        """Make no more tokens."""
        self._closed = True
        self._pieces.clear()
        self._batch.remove(self)

    def take(self, made: Made, shown: str) -> None:
        """Its next token, and the text that is certain with it."""
        self._left -= 1
        ended = self.ends(made.token)
        likely, top = self._speller.likely(made)
        self._pieces.append(Piece(made.token, shown, likely, top, ended))
        if ended or self.text.stopped or self._left == 0:
            rest = self.text.end()
            self._finish = "stop" if ended or self.text.stopped else "length"
            if rest:
                self._pieces.append(Piece(None, rest))

    def ends(self, token_id: int) -> bool:
        """Whether a token ends the text, and is no part of it."""
        return token_id in self.request.stop_ids

    def fail(self, error: FlywheelError) -> None:
        """End the answer with an error."""
        self._error = error


class Batch:
    """The answers over the rows of a session: some decode, others wait for a row in their order.

    A batch holds no references to answers: an answer that nobody else holds leaves before the next launch.
    `decode_each` makes texts of tokens.
    """

    def __init__(self, session: Session, decode_each: DecodeEach) -> None:
        self._session, self._decode_each = session, decode_each
        self._sequences: Sequences | None = None
        self._rows: dict[int, ref[Answer]] = {}
        self._waiting: deque[ref[Answer]] = deque()
        self._is_short = False  # of memory for who waits first
        self._closed = False

    def close(self) -> None:
        """Give the rows back. No answer makes more."""
        for answer in [*self._decoding().values(), *_held(self._waiting)]:
            answer.close()
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        """Give the rows back."""
        self._rows.clear()
        self._is_short = False
        sequences, self._sequences = self._sequences, None
        if sequences is not None:
            with suppress(FlywheelError):  # a launch that failed; the session is left anyway
                sequences.close()

    def add(self, answer: Answer) -> None:
        """Let an answer wait for a row. Raises UsageError behind `close`."""
        if self._closed:
            raise UsageError("decoder: is closed, and begins no answer")
        self._waiting.append(ref(answer))

    def remove(self, answer: Answer) -> None:
        """Make an answer's row free, or its place among those who wait."""
        with suppress(ValueError):
            self._waiting.remove(ref(answer))
            self._is_short = False
        for row in [row for row, held in self._decoding().items() if held is answer]:
            self._free(row)

    def advance(self) -> None:
        """Let the first answer that waits join, where a row is free, and hand out the tokens of one launch.

        A launch that fails ends every answer that was decoding. Where no sequences can begin, those that wait end,
        too. Raises GpuFaultError: nothing on the GPU works in this process any more.
        """
        try:
            sequences = self._begun()
            for row in [row for row, held in self._rows.items() if held() is None]:
                self._free(row)
            self._admit(sequences)
            for some in _one_a_row(sequences.advance()):
                self._take(some)
            for row, lost in sequences.lost().items():
                self._lose(row, lost)
        except FlywheelError as error:
            for answer in self._decoding().values():
                answer.fail(error)
            self._leave()
            if isinstance(error, GpuFaultError):
                raise

    def _begun(self) -> Sequences:
        if self._sequences is None:
            try:
                self._sequences = self._session.sequences()
            except FlywheelError as error:
                for answer in _held(self._waiting):
                    answer.fail(error)
                self._waiting.clear()
                raise
        return self._sequences

    def _take(self, all_made: Sequence[Made]) -> None:
        """A token of each of some rows. A text that cannot be made of its tokens ends its answer alone."""
        decoding = self._decoding()
        heard = [(made, decoding[made.row]) for made in all_made if made.row in decoding]
        spoken = [(answer.text, made.token) for made, answer in heard if not answer.ends(made.token)]
        shown = iter(push_all(self._decode_each, spoken))
        for made, answer in heard:
            text = "" if answer.ends(made.token) else next(shown)
            try:
                if isinstance(text, FlywheelError):
                    raise text
                answer.take(made, text)
            except FlywheelError as error:
                answer.fail(error)
            if answer.is_over:
                self._free(made.row)

    def _lose(self, row: int, error: CacheMemoryError) -> None:
        """End the answer of a row that is free already."""
        answer = self._decoding().get(row)
        if answer is not None:
            answer.fail(error)
        self._rows.pop(row, None)
        self._is_short = False

    def _admit(self, sequences: Sequences) -> None:
        """Let one answer join: the others stand still while its prompt is read. Where there is no memory for its caches
        beside theirs, it waits until one of them leaves."""
        free = [row for row in range(sequences.batch) if row not in self._rows]
        waiting = _held(self._waiting)
        if not free or not waiting or self._is_short:
            return
        answer = waiting[0]
        self._waiting = deque(map(ref, waiting[1:]))
        prompt = answer.request.prompt
        row = sequences.pick(free, prompt)
        try:
            answer.reused_tokens = sequences.join(
                row, prompt, answer.request.positions, answer.sampling, answer.reuse
            )
        except (GpuFaultError, LaunchTimeoutError) as error:  # of the launches of those who decode
            answer.fail(error)
            raise
        except CacheMemoryError as error:
            if not self._rows:
                answer.fail(error)
                return
            self._waiting.appendleft(ref(answer))
            self._is_short = True
        except FlywheelError as error:
            answer.fail(error)
        else:
            self._rows[row] = ref(answer)

    def _free(self, row: int) -> None:
        del self._rows[row]
        self._is_short = False
        if self._sequences is not None:
            self._sequences.leave(row)

    def _decoding(self) -> dict[int, Answer]:
        """By row, those that somebody holds."""
        return {row: answer for row, each in self._rows.items() if (answer := each()) is not None}


def _one_a_row(all_made: Iterable[Made]) -> Iterator[list[Made]]:
    """Tokens in their order, in lists in which a row is once."""
    left = list(all_made)
    while left:
        first = {made.row: made for made in reversed(left)}
        yield [made for made in left if first[made.row] is made]
        left = [made for made in left if first[made.row] is not made]


def _held(answers: Iterable[ref[Answer]]) -> list[Answer]:
    """Those that somebody holds."""
    return [answer for each in answers if (answer := each()) is not None]
