"""Answers that decode together: each waits for a free row, joins between two launches, and leaves when it ends.
Their tokens may come with log-probabilities."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal
from weakref import ref

from flywheel.errors import CacheMemoryError, FlywheelError, GpuFaultError, LaunchTimeoutError, UsageError
from flywheel.runtime.sequences import Made, PromptRead, Request, Sampling, Sequences, Session
from flywheel.serve.text import DecodeEach, Streamer, push_all

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


Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A token, and the text that has become certain with it. The text may be empty.

    A last piece with only text has no `token_id`. If the sampling asks for log-probabilities, `likely` is the token
    with its own, and `top` are the likeliest tokens. `ends` marks a token that ends the text and is not part of it.
    """

    token_id: int | None
    text: str
    likely: Likely | None = None
    top: tuple[Likely, ...] = ()
    ends: bool = False


class Answer(Iterator[Piece]):
    """The pieces of an answer, as they are made.

    Asking for a piece decodes all answers that have begun. Their pieces are kept until somebody asks for them. `close`
    ends the answer early; so does dropping the last reference to it. `prompt_read` says how the prompt was read, once
    there is a piece.
    """

    def __init__(
        self, batch: Batch, request: Request, sampling: Sampling, text: Streamer, speller: Speller,
        reuse: bool = True,
    ) -> None:  # fmt: skip
        """With `reuse`, the beginning that the prompt shares with another one is copied instead of read again."""
        self.prompt_tokens: Final = len(request.prompt)
        self.request: Final = request
        self.sampling: Final = sampling
        self.reuse: Final = reuse
        self.prompt_read = PromptRead(0, 0)
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
        """Why the answer ended; None before its last piece was taken."""
        return self._finish if not self._pieces else None

    @property
    def is_over(self) -> bool:
        """Whether no more tokens will be made."""
        return self._finish is not None or self._closed or self._error is not None

    @property
    def is_new(self) -> bool:
        """Whether no token of it was made."""
        return self._left == self.request.max_tokens

    def begin(self) -> None:
        """Start waiting for a row. Raises UsageError if the decoder is closed."""
        if not self._begun and not self._closed:
            self._batch.add(self)
            self._begun = True

    def ready(self) -> list[Piece]:
        """The pieces that nobody has taken; does not decode. After the last one, raises the error that ended the
        answer."""
        found = list(self._pieces)
        self._pieces.clear()
        if self._error is not None and not found:
            raise self._error
        return found

    def close(self) -> None:
        """End the answer; no more tokens are made."""
        self._closed = True
        self._pieces.clear()
        self._batch.remove(self)

    def take(self, made: Made, shown: str) -> None:
        """Add a token, and the text that has become certain with it."""
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
        """Whether a token ends the text and is not part of it."""
        return token_id in self.request.stop_ids

    def fail(self, error: FlywheelError) -> None:
        """End the answer with an error."""
        self._error = error


class Batch:
    """The answers on the rows of a session: some decode, others wait for a row in order of arrival.

    A batch keeps only weak references to answers: an answer without other references leaves before the next launch.
    `decode_each` turns tokens into text.
    """

    def __init__(self, session: Session, decode_each: DecodeEach) -> None:
        self._session, self._decode_each = session, decode_each
        self._sequences: Sequences | None = None
        self._rows: dict[int, ref[Answer]] = {}
        self._waiting: deque[ref[Answer]] = deque()
        self._is_short = False  # of memory for the first waiting answer
        self._closed = False

    def close(self) -> None:
        """Free the rows. No answer makes more tokens."""
        for answer in [*self._decoding().values(), *_held(self._waiting)]:
            answer.close()
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        """Free the rows."""
        self._rows.clear()
        self._is_short = False
        sequences, self._sequences = self._sequences, None
        if sequences is not None:
            with suppress(FlywheelError):  # a launch has failed; the session is closed anyway
                sequences.close()

    def add(self, answer: Answer) -> None:
        """Put an answer into the queue for a row. Raises UsageError after `close`."""
        if self._closed:
            raise UsageError("decoder: is closed, and begins no answer")
        self._waiting.append(ref(answer))

    def remove(self, answer: Answer) -> None:
        """Free an answer's row, or remove it from the queue."""
        with suppress(ValueError):
            self._waiting.remove(ref(answer))
            self._is_short = False
        for row in [row for row, held in self._decoding().items() if held is answer]:
            self._free(row)

    def advance(self) -> None:
        """Let the first waiting answer join, if a row is free, and distribute the tokens of one launch. A piece of a
        prompt may be read before it.

        A launch that fails ends every answer that was decoding. If sequences cannot start, the waiting answers end,
        too. Raises GpuFaultError, after which nothing on the GPU works in this process.
        """
        try:
            sequences = self._begun()
            for row in [row for row, held in self._rows.items() if held() is None]:
                self._free(row)
            self._admit(sequences)
            for some in _one_a_row(sequences.advance()):
                self._take(sequences, some)
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

    def _take(self, sequences: Sequences, all_made: Sequence[Made]) -> None:
        """Give each row's answer its token. If tokens cannot be turned into text, only the affected answer ends."""
        decoding = self._decoding()
        heard = [(made, decoding[made.row]) for made in all_made if made.row in decoding]
        for made, answer in heard:
            answer.prompt_read = sequences.read_of(made.row)
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

    def _lose(self, row: int, error: FlywheelError) -> None:
        """End the answer of a row that is already free. One that has not begun waits for memory of others."""
        answer = self._decoding().get(row)
        self._rows.pop(row, None)
        self._is_short = False
        if answer is not None:
            self._refuse(answer, error)

    def _refuse(self, answer: Answer, error: FlywheelError) -> None:
        """Let an answer that finds no memory beside others wait until one of them leaves; end any other one."""
        if isinstance(error, CacheMemoryError) and answer.is_new and self._rows:
            self._waiting.appendleft(ref(answer))
            self._is_short = True
        else:
            answer.fail(error)

    def _admit(self, sequences: Sequences) -> None:
        """Let one answer join."""
        free = [row for row in range(sequences.batch) if row not in self._rows]
        waiting = _held(self._waiting)
        if not free or not waiting or self._is_short:
            return
        answer = waiting[0]
        self._waiting = deque(map(ref, waiting[1:]))
        request, row = answer.request, free[0]
        try:
            sequences.join(row, request.prompt, request.positions, answer.sampling, answer.reuse)
        except (GpuFaultError, LaunchTimeoutError) as error:  # from launches of the decoding answers
            answer.fail(error)
            raise
        except FlywheelError as error:
            self._refuse(answer, error)
        else:
            self._rows[row] = ref(answer)

    def _free(self, row: int) -> None:
        del self._rows[row]
        self._is_short = False
        if self._sequences is not None:
            self._sequences.leave(row)

    def _decoding(self) -> dict[int, Answer]:
        """Row -> answer, for answers that somebody holds."""
        return {row: answer for row, each in self._rows.items() if (answer := each()) is not None}


def _one_a_row(all_made: Iterable[Made]) -> Iterator[list[Made]]:
    """Split tokens, in order, into lists in which each row occurs once."""
    left = list(all_made)
    while left:
        first = {made.row: made for made in reversed(left)}
        yield [made for made in left if first[made.row] is made]
        left = [made for made in left if first[made.row] is not made]


def _held(answers: Iterable[ref[Answer]]) -> list[Answer]:
    """The answers that somebody holds."""
    return [answer for each in answers if (answer := each()) is not None]
