"""Greedy generation through the decode step, token by token, the prompt too."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from torch import Tensor

from flywheel.decode.request import Request
from flywheel.decode.session import DecodeSession
from flywheel.decode.verify import is_tie
from flywheel.errors import MismatchError
from flywheel.ir import DType
from flywheel.models.eager import EagerDecoder

Finish = Literal["eos", "length"]


@dataclass(frozen=True, slots=True)
class Generation:
    """`token_ids` come after the prompt; a stop token that ended them is the last. `steps` launches, the prompt's
    included, took `seconds`. `ties` are the indices of tokens that were not the oracle's first choice, but within
    rounding of it; None where nothing was compared."""

    token_ids: tuple[int, ...]
    finish: Finish
    steps: int
    seconds: float
    ties: tuple[int, ...] | None

    @property
    def tokens_per_s(self) -> float:
        """Launches a second: a token of the prompt takes one, as a generated one does."""
        return self.steps / self.seconds


def generate(session: DecodeSession, request: Request, oracle: EagerDecoder | None = None) -> Generation:
    """Run a request that was made for the session's model and context.

    With an oracle of the session's dtype and context, each token is compared with the oracle's choice behind the same
    tokens. Raises MismatchError at the first that differs by more than rounding (`is_tie`).
    """
    tokens: list[int] = []
    ties: list[int] = []
    steps, seconds = 0, 0.0
    for position in range(request.positions):
        in_prompt = position < len(request.prompt)
        start = perf_counter()
        step = session.step(request.prompt[position] if in_prompt else tokens[-1], position)
        seconds += perf_counter() - start
        steps += 1
        if position < len(request.prompt) - 1:
            continue
        if oracle is not None and not _agrees(
            step.token, _expected(oracle, request, tokens), session.dtype, len(tokens)
        ):
            ties.append(len(tokens))
        tokens.append(step.token)
        if step.token in request.stop_ids:
            break
    finish: Finish = "eos" if tokens[-1] in request.stop_ids else "length"
    return Generation(tuple(tokens), finish, steps, seconds, None if oracle is None else tuple(ties))


def _expected(oracle: EagerDecoder, request: Request, tokens: list[int]) -> Tensor:
    """The oracle's logits behind the prompt and `tokens`, all but the last of which it has seen."""
    if tokens:
        return oracle.step(tokens[-1], oracle.length)
    oracle.reset()
    return oracle.prefill(request.prompt)


def _agrees(token: int, logits: Tensor, dtype: DType, index: int) -> bool:
    """Whether `token` is the first choice; False for a tie. Raises MismatchError for any other."""
    expected = int(logits.argmax())
    if token != expected and not is_tie(logits, token, dtype):
        raise MismatchError(f"token {index}: expected {expected}, got {token}")
    return token == expected
