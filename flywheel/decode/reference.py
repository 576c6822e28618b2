"""A program in the reference VM as a session."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from flywheel.decode.caches import Caches, KvCaches, hold_rows
from flywheel.decode.choices import choose
from flywheel.decode.finite import explain_text
from flywheel.decode.interface import Launched, as_whole, find_taps, places_of, read_interface
from flywheel.decode.prompts import Prefill, Reading
from flywheel.decode.sequences import SteppedSequences, stream_by_lanes
from flywheel.decode.session import (
    DecodeSession,
    Positions,
    Step,
    TokenStream,
    check_rows,
    check_stream,
    lane_places,
    positions_of,
)
from flywheel.decode.source import Weights
from flywheel.ir import NO_TOKEN, DType, MegakernelProgram
from flywheel.models.oracle import LayerCache
from flywheel.models.quantise import typed
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind
from flywheel.runtime.sequences import GREEDY, Sampling, check_prompt, not_finite
from flywheel.vm.gpu.granules import Granules
from flywheel.vm.reference import BoundProgram, ReferenceVM


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
        """See `DecodeSession.step_rows`. Raises ConfigError as `step`."""
        check_rows(self.spec, self.context, self.batch, token_ids, position, self.lanes)
        hold_rows(self.caches, positions_of(position, self.batch), wanted, self.lanes)
        outputs = self._launch(self._bound, token_ids, position)
        logits, tokens = (outputs[self._whole.parts[name][0]] for name in ("logits", "next_token"))
        return [Step(row, int(token)) for row, token in zip(logits, tokens, strict=True)]

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """See `DecodeSession.prefill`."""
        check_prompt(self.spec, self.context, token_ids)
        self._reader()(token_ids, self.caches, row, start)

    def reading(self, token_ids: Sequence[int], caches: Caches, row: int, start: int) -> Reading:
        """See `Stepped.reading`."""
        return self._reader().begin(token_ids, caches, row, start)

    def _reader(self) -> Prefill:
        if self._prefill is None:
            given = {key: typed(key, tensor, self.dtype, DType.F32) for key, tensor in self._weights.items()}
            placed = {key: each.to(self.caches.device) for key, each in given.items()}
            self._prefill = Prefill(self.spec, placed, self.context)
        return self._prefill

    def stream(
        self, prompt: Sequence[int], positions: int, start: int = 0, sampling: Sampling = GREEDY
    ) -> TokenStream:
        """See `DecodeSession.stream`. Raises ConfigError as `step`."""
        check_stream(self.spec, self.context, prompt, positions)
        if self.lanes > 1:
            return stream_by_lanes(SteppedSequences(self), prompt, positions, start, sampling)
        return stream_by_steps(self, prompt, positions, start, sampling)

    def sequences(self) -> SteppedSequences:
        """See `DecodeSession.sequences`."""
        return SteppedSequences(self)

    def show(self, token_ids: Sequence[int], position: Positions, *, apart: bool) -> Launched:
        """See `DecodeSession.show`. Raises ConfigError as `step`."""
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
        return explain_text(self.spec, self._weights, self.dtype, self.context, text)

    def write_cache(self, layers: Sequence[LayerCache], row: int = 0) -> None:
        """See `DecodeSession.write_cache`. Raises UsageError for a wrong number of layers, or too many positions."""
        self.caches.write(layers, row)

    def _launch(self, bound: BoundProgram, token_ids: Sequence[int], position: Positions) -> dict[str, Tensor]:
        check_rows(self.spec, self.context, self.batch, token_ids, position, self.lanes)
        self._tokens.copy_(torch.tensor(token_ids))
        self._position.copy_(torch.tensor(lane_places(positions_of(position, self.batch), self.lanes)))
        inputs = self._whole.spread({"token_id": self._tokens, "position": self._position})
        return bound.step(inputs, position, self._order, self._seed)


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


def shares_memory(program: MegakernelProgram) -> bool:
    """Whether a page holds more than one buffer."""
    homes = list(program.pages.buffer_to_page.values()) if program.pages is not None else []
    return len(set(homes)) < len(homes)
