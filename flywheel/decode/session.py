"""Sequences on one device: the interface of a loaded program whose caches persist between launches, and what a launch
takes and gives."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from flywheel.decode.caches import Caches
from flywheel.decode.interface import Launched, Taps
from flywheel.decode.prompts import Reading
from flywheel.errors import UsageError
from flywheel.ir import DType
from flywheel.models.oracle import LayerCache
from flywheel.models.spec import DecoderSpec
from flywheel.runtime.sequences import GREEDY, Sampling, Session, check_place, check_prompt, check_turns

TokenStream = Generator[int, None, None]
"""Tokens as they are made. Close it to stop early."""

Positions = int | Sequence[int]
"""One position for all sequences, or one of each."""


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one launch for a sequence: `logits`, float32 [vocab], and the token that the program chose. That is
    NO_TOKEN if the largest logit is not finite."""

    logits: Tensor
    token: int


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


def check_stream(spec: DecoderSpec, context: int, prompt: Sequence[int], positions: int) -> None:
    """Raises UsageError, as `DecodeSession.stream` does, for a token or position out of range, and as `check_turns`."""
    check_prompt(spec, context, prompt)
    check_turns(spec, context, len(prompt))
    check_place(spec, context, prompt[-1], positions - 1)


def lane_places(places: Sequence[int], lanes: int) -> list[int]:
    """The positions of all tokens of sequences whose first tokens are at `places`."""
    return [place + lane for place in places for lane in range(lanes)]


def positions_of(position: Positions, batch: int) -> Sequence[int]:
    """The position of each of `batch` sequences."""
    return [position] * batch if isinstance(position, int) else position


class Stepped(Protocol):
    """The parts of a DecodeSession that launch and that sequences with single steps use. Only positions and cache
    contents change between launches."""

    @property
    def spec(self) -> DecoderSpec:
        """The model."""

    @property
    def context(self) -> int:
        """Positions that the caches hold."""

    @property
    def batch(self) -> int:
        """Number of sequences: rows 0 to batch - 1."""

    @property
    def lanes(self) -> int:
        """Consecutive tokens of each sequence in a launch."""

    @property
    def caches(self) -> Caches:
        """KV caches of all sequences."""

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """Decode one token of each sequence at its position, after the cached ones, and cache it. Only the tokens of
        `wanted` rows are cached; None means all. With several lanes, `lanes` tokens of each sequence, from its position
        on.

        Raises UsageError for a token or position out of range and for a wrong number of tokens, and CacheMemoryError if
        the caches cannot grow that far.
        """

    def reading(self, token_ids: Sequence[int], caches: Caches, row: int, start: int) -> Reading:
        """See `Prefill.begin`. The tokens are in the vocabulary and fit the context."""

    def explain(self, text: Sequence[int]) -> str:
        """See `runtime.sequences.Explain`. No launch may be running."""


class DecodeSession(Stepped, Session, Protocol):
    """A lowered model on a device, whose intermediate tensors can be read after a launch."""

    @property
    def dtype(self) -> DType:
        """Type of the caches and activations."""

    @property
    def taps(self) -> Taps:
        """The intermediate tensors that can be read."""

    @property
    def shares_memory(self) -> bool:
        """Whether buffers of the program share memory, so that a launch overwrites some of its intermediate tensors."""

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """Start the sequence of a row with these tokens: replace its caches by what single steps would write, up to
        rounding. Its positions before `start` are cached already. Other sequences keep theirs.

        Raises UsageError for a token or position out of range.
        """

    def step(self, token_id: int, position: int) -> Step:
        """`step_rows` of the only token of a launch."""

    def stream(
        self, prompt: Sequence[int], positions: int, start: int = 0, sampling: Sampling = GREEDY
    ) -> TokenStream:
        """The tokens after a prompt, chosen by `sampling`, in the first row. One launch decodes each position from
        `start` to `positions` - 1. The caches hold the positions before `start`, which is at most the position of the
        prompt's last token.

        Raises UsageError for a token or position out of range, and NonFiniteError, after the tokens before, for logits
        that are not finite.
        """

    def write_cache(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """Replace the caches of a sequence by copies of `layers`; positions after theirs hold nothing. Raises
        UsageError for a wrong number of layers, or too many positions."""

    def show(self, token_ids: Sequence[int], position: Positions, *, apart: bool) -> Launched:
        """Run one launch and return copies of the buffers of `taps`, on the caches' device. With `apart`, the launch is
        of the same program with separate memory for each buffer.

        Raises UsageError as `step_rows`.
        """
