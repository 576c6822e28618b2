"""Generation: the prompt at once, then the decode step token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from torch import Tensor

from flywheel.decode.session import DecodeSession
from flywheel.errors import MismatchError, NonFiniteError
from flywheel.ir import DType
from flywheel.measure.verdict import FREE_RUNNING
from flywheel.models.oracle import EagerDecoder
from flywheel.runtime.sequences import GREEDY, Request, Sampling, not_finite
from flywheel.tensors import all_finite

Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated text. `token_ids` come after the prompt; if a stop token ended the text, it is the last one.
    `first_s` is the time of the first token, prompt included, and `seconds` that of all. `ties` are the indices of
    tokens that are not the oracle's first choice, but within rounding of it; None if nothing was compared."""

    token_ids: tuple[int, ...]
    finish: Finish
    first_s: float
    seconds: float
    ties: tuple[int, ...] | None

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token; None if there is only one."""
        later = len(self.token_ids) - 1
        return later / (self.seconds - self.first_s) if later else None


def generate(
    session: DecodeSession,
    request: Request,
    oracle: EagerDecoder | None = None,
    on_token: Callable[[int], None] | None = None,
    sampling: Sampling = GREEDY,
) -> Generation:
    """Run a request that was made for the session's model and context. `on_token` gets each token as it is made.

    With an oracle of the session's dtype and context, each token is afterwards compared with the oracle's choice after
    the same tokens. Raises MismatchError at the first one that differs by more than rounding (`is_tie`), and
    NonFiniteError where logits, the program's or the oracle's, are not finite.
    """
    tokens: list[int] = []
    last = len(request.prompt) - 1
    start = perf_counter()
    first_s = seconds = 0.0
    session.prefill(request.prompt[:last])
    with closing(session.stream(request.prompt, request.positions, last, sampling)) as stream:
        for token in stream:
            tokens.append(token)
            seconds = perf_counter() - start
            first_s = first_s or seconds
            if on_token is not None:
                on_token(token)
            if token in request.stop_ids:
                break
    finish: Finish = "eos" if tokens[-1] in request.stop_ids else "length"
    ties = None if oracle is None else tuple(_ties(oracle, request, tokens, session))
    return Generation(tuple(tokens), finish, first_s, seconds, ties)


def _ties(
    oracle: EagerDecoder, request: Request, tokens: Sequence[int], session: DecodeSession
) -> Iterator[int]:
    """Indices of tokens that are not the oracle's first choice, but within rounding of it."""
    for index, token in enumerate(tokens):
        logits = _expected(oracle, request, tokens[:index])
        if not all_finite([logits]):
            raise not_finite([*request.prompt, *tokens[:index]], session.explain, "the oracle's")
        if not _agrees(token, logits, session.dtype, index):
            yield index


def _expected(oracle: EagerDecoder, request: Request, tokens: Sequence[int]) -> Tensor:
    """The oracle's logits after the prompt and `tokens`; it has already seen all but the last one."""
    if tokens:
        return oracle.step(tokens[-1], oracle.length)
    oracle.reset()
    return oracle.prefill(request.prompt)


def _agrees(token: int, logits: Tensor, dtype: DType, index: int) -> bool:
    """Whether `token` is the first choice; False for a tie. Raises MismatchError for any other token."""
    expected = int(logits.argmax())
    if token != expected and not is_tie(logits, token, dtype):
        raise MismatchError(f"token {index}: expected {expected}, got {token}")
    return token == expected


def is_tie(logits: Tensor, token: int, dtype: DType) -> bool:
    """Whether rounding alone may explain that a program chose `token` over the first choice of the oracle's `logits`:
    in half types, if their logits differ by no more than the error allowed for a whole step. False for an id outside
    the vocabulary. Raises NonFiniteError for logits that are not finite, which nothing is within rounding of."""
    if not all_finite([logits]):
        raise NonFiniteError("a tie: the oracle's logits are not finite")
    if dtype is DType.F32 or not 0 <= token < len(logits):
        return False
    return float(logits.max() - logits[token]) <= FREE_RUNNING[dtype.name] * float(logits.abs().max())
