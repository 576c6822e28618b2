"""What a runtime of a model is asked for and what it gives: requests, samplings, the tokens that launches make, and
sequences that decode together."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Final, NamedTuple, Protocol

from flywheel.errors import ContextError, FlywheelError, NonFiniteError, UsageError
from flywheel.models.spec import DecoderSpec

_COLDEST: Final = 1e-5

MOST_LIKELY: Final = 20
"""Maximum number of likeliest tokens that a request can ask for."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """A request's sampling parameters, applied in this order:

    - `repetition_penalty` changes the logits of tokens in the text: it divides positive ones and multiplies negative
      ones.
    - `temperature` divides all logits. 0 takes the largest and samples nothing.
    - `top_k` keeps the k largest logits, and any equal to the smallest of them. 0 keeps all.
    - `min_p` keeps tokens whose probability is at least this fraction of the largest probability.
    - `top_p` keeps the fewest tokens, likeliest first, whose probabilities add up to it.

    `seed` and a token's position alone decide the draw. `logprobs` changes no token: with a number n, each token comes
    with its log-probability before any of these steps, and with those of the n likeliest tokens; None costs nothing.
    `lookup` changes no token either: with false, a decoder drafts no tokens for the request; it never does for one that
    samples or penalises. Raises UsageError for a value of another type or out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None
    lookup: bool = True

    def __post_init__(self) -> None:
        logprobs = 0 if self.logprobs is None else self.logprobs
        for name, whole in (("top_k", self.top_k), ("seed", self.seed), ("logprobs", logprobs)):
            if isinstance(whole, bool) or not isinstance(whole, Integral):
                raise UsageError(f"{name}: {whole!r} is not a whole number")
        if not isinstance(self.lookup, bool):
            raise UsageError(f"lookup: {self.lookup!r} is neither True nor False")
        for name, value, low, high in (
            ("temperature", self.temperature, 0.0, 100.0),
            ("top_k", self.top_k, 0, 2**31 - 1),
            ("top_p", self.top_p, 1e-6, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("repetition_penalty", self.repetition_penalty, 1e-2, 100.0),
            ("seed", self.seed, -(2**63), 2**64 - 1),
            ("logprobs", logprobs, 0, MOST_LIKELY),
        ):
            if not low <= value <= high:
                raise UsageError(f"{name}: {value} is not in {low:g}..{high:g}")

    @property
    def is_argmax(self) -> bool:
        """Whether the request wants the largest logit, so that the program's own choice is the answer."""
        return self.is_greedy and self.repetition_penalty == 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is sampled: logits divided by a temperature below `_COLDEST` would overflow float32."""
        return self.temperature < _COLDEST


GREEDY: Final = Sampling()


@dataclass(frozen=True, slots=True)
class Request:
    """Continue `prompt`, token ids, until a token of `stop_ids`, which is kept, or for `max_tokens`."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()

    @property
    def positions(self) -> int:
        """The number of positions that it may need. The last token is generated but not decoded."""
        return len(self.prompt) + self.max_tokens - 1


def make_request(
    prompt: Sequence[int], max_tokens: int, stop_ids: frozenset[int], spec: DecoderSpec, context: int
) -> Request:
    """Make a request. Raises UsageError for an empty prompt, an unknown token or no tokens to generate, and
    ContextError for more than `context` positions."""
    request = Request(tuple(prompt), max_tokens, stop_ids)
    unknown = next((token for token in prompt if not 0 <= token < spec.vocab), None)
    if unknown is not None:
        raise UsageError(f"prompt: token {unknown} is not in 0..{spec.vocab - 1}, the model's vocabulary")
    if not prompt:
        raise UsageError("prompt: has no tokens; at least one is needed")
    if len(prompt) > context:
        raise ContextError(f"prompt: its {len(prompt)} tokens do not fit the context of {context}")
    check_turns(spec, context, len(prompt))
    if max_tokens < 1:
        raise UsageError(f"max tokens: {max_tokens} is not positive")
    if request.positions > context:
        raise ContextError(
            f"prompt: its {len(prompt)} tokens and {max_tokens} more need {request.positions} positions, "
            f"the context has {context}"
        )
    return request


Explain = Callable[[Sequence[int]], str]
"""What an error about a text says of the first tensor that is not finite; empty where nothing is known."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities from the unmodified logits, whatever the sampling: `chosen` is that of the token that
    was made, `top` are (token id, log-probability) of the likeliest tokens, likeliest first."""

    chosen: float
    top: tuple[tuple[int, float], ...]


class Made(NamedTuple):
    """A token that a launch made for the sequence of a row. `logprobs` is None unless its sampling asks for them."""

    row: int
    token: int
    logprobs: Logprobs | None = None


class PromptRead(NamedTuple):
    """How a prompt was read: `reused` of its tokens were copied from another sequence's caches, the others were read in
    `pieces`."""

    reused: int
    pieces: int


def not_finite(text: Sequence[int], explain: Explain | None, whose: str = "the") -> NonFiniteError:
    """The error that ends a sequence whose logits after `text` are not finite. `whose` logits they are."""
    told = "" if explain is None else explain(text)
    return NonFiniteError(f"position {len(text) - 1}: {whose} logits are not finite{told}")


class Sequences(Protocol):
    """Rows 0 to `batch` - 1 of a session; each is free or holds a sequence. A sequence's tokens do not depend on other
    rows."""

    @property
    def batch(self) -> int:
        """The number of rows."""

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> None:
        """Start a sequence in a free row. `advance` reads its prompt, except the last token, and decodes from there up
        to `positions` - 1. With `reuse`, the beginning that the prompt shares with another one that was read is copied
        instead of read.

        Raises UsageError for a token or position out of range and for a row in use, and CacheMemoryError if other
        sequences hold the memory that the prompt needs. `lost` has that error where it shows only later.
        """

    def read_of(self, row: int) -> PromptRead:
        """How the prompt of a row's sequence was read, so far."""

    def leave(self, row: int) -> None:
        """End a row's sequence and free the row. No more tokens of it come."""

    def advance(self) -> list[Made]:
        """The tokens of one launch, for each sequence whose prompt is read and that has not reached its end. Prompts
        are read in pieces between launches, one prompt after the other. Empty if no sequence is left, or if there are
        no tokens yet."""

    def lost(self) -> dict[int, FlywheelError]:
        """Rows that lost their sequence since the last call, with the error: CacheMemoryError if memory for the caches
        ran out, GpuMemoryError if that to read the prompt did, NonFiniteError if logits are not finite. They are
        free."""

    def close(self) -> None:
        """Free all rows and their memory."""


class Session(Protocol):
    """A model in memory that decodes sequences together."""

    @property
    def context(self) -> int:
        """Positions that the caches hold."""

    @property
    def batch(self) -> int:
        """Number of sequences: rows 0 to batch - 1."""

    def sequences(self) -> Sequences:
        """Rows for sequences that decode together, all free. Until it is closed, nothing else may use the session."""


def check_place(spec: DecoderSpec, context: int, token_id: int, position: int) -> None:
    """Raises UsageError for a token outside the vocabulary or a position outside the context."""
    if not 0 <= token_id < spec.vocab:
        raise UsageError(f"{spec.name}: token {token_id} is not in 0..{spec.vocab - 1}")
    if not 0 <= position < context:
        raise UsageError(f"{spec.name}: position {position} is not in 0..{context - 1}")


def check_prompt(spec: DecoderSpec, context: int, token_ids: Sequence[int]) -> None:
    """`check_place` for each token, at positions from 0 on."""
    for position, token_id in enumerate(token_ids):
        check_place(spec, context, token_id, position)


def check_turns(spec: DecoderSpec, context: int, length: int) -> None:
    """Raises UsageError for a prompt of so many tokens, all of which the model would turn by other frequencies than a
    program for `context` does."""
    limit = spec.turned_anew
    if limit is not None and length <= limit < context:
        raise UsageError(
            f"prompt: {length} tokens at context {context}; {spec.name} has other RoPE frequencies beyond {limit} "
            f"tokens: give it more than {limit}, or a context up to {limit}"
        )


def check_join(
    spec: DecoderSpec, context: int, taken: Container[int], row: int, prompt: Sequence[int], positions: int
) -> None:
    """Raises UsageError, as `Sequences.join` does, for a taken row, an empty prompt, a token out of range, or positions
    that exclude the prompt or exceed the context."""
    if row in taken:
        raise UsageError(f"{spec.name}: row {row} is taken")
    if not prompt:
        raise UsageError(f"{spec.name}: a sequence without a token")
    check_prompt(spec, context, prompt)
    check_place(spec, context, prompt[-1], positions - 1)
    check_turns(spec, context, len(prompt))
    if positions < len(prompt):
        raise UsageError(f"{spec.name}: {positions} positions for a prompt of {len(prompt)} tokens")
