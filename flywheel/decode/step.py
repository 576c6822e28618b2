"""One launch: its inputs and outputs for each sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from flywheel.errors import UsageError
from flywheel.models.spec import DecoderSpec

Positions = int | Sequence[int]
"""One position for all sequences, or one of each."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one launch for a sequence: `logits`, float32 [vocab], and the token that the program chose. That is
    NO_TOKEN if the largest logit is not finite."""

    logits: Tensor
    token: int


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


def check_rows(
    spec: DecoderSpec, context: int, batch: int, token_ids: Sequence[int], position: Positions, lanes: int = 1
) -> None:
    """`check_place` for `lanes` tokens of each of `batch` sequences. Raises UsageError also for a wrong number of
    tokens or positions."""
    places = positions_of(position, batch)
    for what, given, wanted in (("tokens", token_ids, batch * lanes), ("positions", places, batch)):
        if len(given) != wanted:
            raise UsageError(f"{spec.name}: {len(given)} {what} for a program of batch {batch}")
    for token_id, place in zip(token_ids, lane_places(places, lanes), strict=True):
        check_place(spec, context, token_id, place)


def lane_places(places: Sequence[int], lanes: int) -> list[int]:
    """The positions of all tokens of sequences whose first tokens are at `places`."""
    return [place + lane for place in places for lane in range(lanes)]


def positions_of(position: Positions, batch: int) -> Sequence[int]:
    """The position of each of `batch` sequences."""
    return [position] * batch if isinstance(position, int) else position
