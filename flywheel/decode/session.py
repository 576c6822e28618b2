"""Sequences on one device: a loaded program whose caches persist between launches."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flywheel.decode.caches import Caches, KvCaches
from flywheel.decode.choices import choose
from flywheel.decode.finite import explain_text
from flywheel.decode.interface import read_interface
from flywheel.decode.launched import Launched, places_of
from flywheel.decode.prefill import Prefill
from flywheel.decode.sequences import Sequences, SteppedSequences, stream_by_lanes
from flywheel.decode.source import Weights
from flywheel.decode.step import Positions, Step, check_prompt, check_rows, lane_places, positions_of
from flywheel.decode.taps import Taps, find_taps
from flywheel.decode.whole import as_whole
from flywheel.ir import NO_TOKEN, DType, MegakernelProgram
from flywheel.models.eager import LayerCache
from flywheel.models.quantise import typed
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind
from flywheel.runtime.sequences import GREEDY, Sampling, not_finite
from flywheel.vm.gpu.granules import Granules
from flywheel.vm.reference import BoundProgram, ReferenceVM

TokenStream = Generator[int, None, None]
"""Tokens as they are made. Close it to stop early."""


class DecodeSession(Protocol):
    """A lowered model on a device. Only positions and cache contents change between steps."""

    @property
    def spec(self) -> DecoderSpec:
        """The model."""

    @property
    def dtype(self) -> DType:
        """Type of the caches and activations."""

    @property
    def context(self) -> int:
        """Positions that the caches hold."""

    def step(self, token_id: int, position: int) -> Step:
        """Decode `token_id` at `position` after the cached positions, and cache it. Raises UsageError for a token or
        position out of range."""

    def prefill(self, token_ids: Sequence[int]) -> None:
        """Start a sequence with these tokens: replace the caches by what single steps would write, up to rounding.

        Raises UsageError for a token or position out of range.
        """

    def stream(
        self, prompt: Sequence[int], positions: int, start: int = 0, sampling: Sampling = GREEDY
    ) -> TokenStream:
        """The tokens after a prompt, chosen by `sampling`. One launch decodes each position from `start` to `positions`
        - 1. The caches hold the positions before `start`, which is at most the position of the prompt's last token.

        Raises UsageError for a token or position out of range, and NonFiniteError, after the tokens before, for logits
        that are not finite.
        """

    def explain(self, text: Sequence[int]) -> str:
        """See `runtime.sequences.Explain`. No launch may be running."""

    def write_cache(self, layers: Sequence[LayerCache]) -> None:
        """Replace the caches by copies of `layers`; positions after theirs hold nothing."""


def stream_by_steps(
    session: DecodeSession, prompt: Sequence[int], positions: int, start: int = 0, sampling: Sampling = GREEDY
) -> TokenStream:
    """Implements `DecodeSession.stream` with `step`."""
    seen = torch.zeros(session.spec.vocab, dtype=torch.bool)
    seen[list(prompt)] = True
    text = list(prompt)
    for position in range(start, positions):
        step = session.step(text[position], position)
        if position < len(prompt) - 1:
            continue
        token = step.token if sampling.is_argmax else int(choose(step.logits.cpu(), seen, sampling, position))
        if token == NO_TOKEN:
            raise not_finite(text, session.explain)
        yield token
        text.append(token)
        seen[token] = True


class BatchSession(DecodeSession, Protocol):
    """A lowered model that decodes `batch` sequences in one launch. With one sequence it also is a DecodeSession."""

    @property
    def batch(self) -> int:
        """Number of sequences: rows 0 to batch - 1."""

    @property
    def lanes(self) -> int:
        """Consecutive tokens of each sequence in a launch."""

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """`step` for one token of each sequence. Only the tokens of `wanted` rows are cached; None means all. With
        several lanes, `lanes` tokens of each sequence, from its position on. Raises UsageError also for a wrong number
        of tokens, and CacheMemoryError if the caches cannot grow that far."""

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """See `DecodeSession.prefill`, for sequence `row`, whose positions before `start` are cached. Other sequences
        keep theirs."""

    def sequences(self) -> Sequences:
        """Rows for sequences that decode together, all free. Until it is closed, nothing else may use the session."""

    def write_cache(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """See `DecodeSession.write_cache`, for sequence `row`."""


class JudgedSession(BatchSession, Protocol):
    """A program whose intermediate tensors can be read after a launch."""

    @property
    def caches(self) -> Caches:
        """KV caches of all sequences."""

    @property
    def taps(self) -> Taps:
        """The intermediate tensors that can be read."""

    @property
    def shares_memory(self) -> bool:
        """Whether buffers of the program share memory, so that a launch overwrites some of its intermediate tensors."""

    def show(self, token_ids: Sequence[int], position: Positions, *, apart: bool) -> Launched:
        """Run one launch and return copies of the buffers of `taps`, on the caches' device. With `apart`, the launch is
        of the same program with separate memory for each buffer.

        Raises UsageError as `step_rows`.
        """


class ReferenceSession:
    """A program in the reference VM, proved and bound once.

    Weights of another float type than their buffer are converted, once. `order` and `seed` are arguments of
    `firing_order`. Positions that no token has written hold NaN, so that reading them shows. With `granules`, the
    caches' memory grows with use; this needs torch's CPU device.

    Raises InvalidProgramError for an unsafe program, unless `proved` is false, TensorError for a program that is no
    decode step of `spec`, and WeightsError if its weights are not the model's.
    """

    def __init__(
        self,
        program: MegakernelProgram,
        spec: DecoderSpec,
        weights: Weights,
        device: str | torch.device = "cpu",
        order: str = "list",
        seed: int = 0,
        proved: bool = True,
        granules: Granules | None = None,
    ) -> None:
        machine = ReferenceVM(program, device) if proved else ReferenceVM.unchecked(program, device)
        self._whole = whole = as_whole(program, spec)
        interface = read_interface(program, spec)
        self.spec = spec
        self.dtype = interface.dtype
        self.context = interface.context
        self.batch = interface.batch
        self.lanes = interface.lanes
        self._order = order
        self._seed = seed
        self.caches = KvCaches(spec, self.dtype, self.context, machine.device, self.batch, granules, self.lanes)
        self.taps = find_taps(whole.program, spec, interface)
        self.shares_memory = shares_memory(program)
        self._machine = machine
        self._given = {**bind(program, weights, cast=True), **whole.spread(self.caches.by_name(interface))}
        self._bound = machine.bind(self._given)
        self._apart: BoundProgram | None = None
        self._weights = weights
        self._prefill: Prefill | None = None
        self._tokens = torch.zeros(interface.rows, dtype=torch.int32)
        self._position = torch.zeros(interface.rows, dtype=torch.int32)

    def step(self, token_id: int, position: int) -> Step:
        """See `DecodeSession.step`. Raises ConfigError if the program was lowered for fewer positions than its caches
        hold."""
        return self.step_rows([token_id], position)[0]

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """See `BatchSession.step_rows`. Raises ConfigError as `step`."""
        check_rows(self.spec, self.context, self.batch, token_ids, position, self.lanes)
        hold_rows(self.caches, positions_of(position, self.batch), wanted, self.lanes)
        outputs = self._launch(self._bound, token_ids, position)
        logits, tokens = (outputs[self._whole.parts[name][0]] for name in ("logits", "next_token"))
        return [Step(row, int(token)) for row, token in zip(logits, tokens, strict=True)]

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """See `BatchSession.prefill`."""
        check_prompt(self.spec, self.context, token_ids)
        if self._prefill is None:
            given = {key: typed(key, tensor, self.dtype, DType.F32) for key, tensor in self._weights.items()}
            self._prefill = Prefill(self.spec, {key: each.to(self.caches.device) for key, each in given.items()})
        self._prefill(token_ids, self.caches, row, start)

    def stream(
        self, prompt: Sequence[int], positions: int, start: int = 0, sampling: Sampling = GREEDY
    ) -> TokenStream:
        """See `DecodeSession.stream`. Raises ConfigError as `step`."""
        if self.lanes > 1:
            return stream_by_lanes(SteppedSequences(self), prompt, positions, start, sampling)
        return stream_by_steps(self, prompt, positions, start, sampling)

    def sequences(self) -> Sequences:
        """See `BatchSession.sequences`."""
        return SteppedSequences(self)

    def show(self, token_ids: Sequence[int], position: Positions, *, apart: bool) -> Launched:
        """See `JudgedSession.show`. Raises ConfigError as `step`."""
        bound = self._bound
        if apart and self.shares_memory:
            bound = self._apart = self._apart or self._machine.bind(self._given, apart=True)
        self._launch(bound, token_ids, position)
        memory, starts = bound.transients()
        program, names = self._machine.program, self.taps.names()
        if program.ranks == 1:
            return Launched(memory[None], places_of(program, names, starts))
        parts = [part for name in names for part in self._whole.parts[name]]
        return self._whole.gather(Launched(memory[None], places_of(program, parts, starts)), names)

    def explain(self, text: Sequence[int]) -> str:
        """See `DecodeSession.explain`."""
        return explain_text(self.spec, self._weights, self.dtype, text)

    def write_cache(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """See `BatchSession.write_cache`. Raises UsageError for a wrong number of layers, or too many positions."""
        self.caches.write(layers, row)

    def _launch(self, bound: BoundProgram, token_ids: Sequence[int], position: Positions) -> dict[str, Tensor]:
        check_rows(self.spec, self.context, self.batch, token_ids, position, self.lanes)
        self._tokens.copy_(torch.tensor(token_ids))
        self._position.copy_(torch.tensor(lane_places(positions_of(position, self.batch), self.lanes)))
        inputs = self._whole.spread({"token_id": self._tokens, "position": self._position})
        return bound.step(inputs, position, self._order, self._seed)


def hold_rows(caches: Caches, places: Sequence[int], wanted: Collection[int] | None, lanes: int = 1) -> None:
    """Get cache memory for a launch of `lanes` tokens of each sequence at `places`; only `wanted` rows are cached. No
    launch may be running. Raises CacheMemoryError."""
    for row, place in enumerate(places):
        if wanted is None or row in wanted:
            caches.hold(row, place + lanes, may_take=True)


def shares_memory(program: MegakernelProgram) -> bool:
    """Whether a page holds more than one buffer."""
    homes = list(program.pages.buffer_to_page.values()) if program.pages is not None else []
    return len(set(homes)) < len(homes)
