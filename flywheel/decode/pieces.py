"""Prompts that are read piece by piece between launches, so that other sequences go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from flywheel.decode.caches import Caches
from flywheel.decode.memory import within_memory
from flywheel.decode.prefixes import BLOCK, RUN, Prefixes, keys_of
from flywheel.decode.prompts import Reading
from flywheel.errors import CacheMemoryError, FlywheelError, GpuMemoryError
from flywheel.runtime.sequences import PromptRead, Sampling

Begin = Callable[[Sequence[int], Caches, int, int], Reading]
"""See `Prefill.begin`."""

MOST: Final = 16
"""Most layers of a piece while others decode. The device takes about a thousand operations ahead, some twenty a layer;
handing over more waits, without a time limit."""

_FORGETS: Final = 1.25
"""A step may seem this much longer, and a layer this much shorter, with each measurement: one that is far off makes no
piece much longer, and is forgotten."""


@dataclass(slots=True)
class Pace:
    """Chooses pieces that take about as long as a launch, by what launches and pieces have taken.

    So a sequence waits for at most about two launches' time for a token while prompts are read. One late measurement
    makes no piece much longer.
    """

    step_us: float | None = None
    layer_us: dict[int, float] = field(default_factory=dict)
    """Time of a layer by the bits of the number of tokens that pass it."""

    def layers(self, tokens: int) -> int:
        """Layers of a piece of a chunk of so many tokens, at most MOST: one, as long as nothing is known."""
        layer_us = self._layer_us(tokens.bit_length())
        if self.step_us is None or layer_us is None:
            return 1
        return max(1, int(min(MOST, self.step_us / max(layer_us, 1e-3))))

    def launch_took(self, us: float) -> None:
        """Learn the time of a launch."""
        self.step_us = us if self.step_us is None else min(us, _FORGETS * self.step_us)

    def piece_took(self, piece: PromptPiece, us: float) -> None:
        """Learn the time of a piece of at least a layer."""
        bits, each = piece.tokens.bit_length(), us / piece.layers
        self.layer_us[bits] = max(each, self.layer_us.get(bits, 0.0) / _FORGETS)

    def _layer_us(self, bits: int) -> float | None:
        """By the nearest known number of tokens: more tokens take no less, and twice as many at most twice as long."""
        more = [known for known in self.layer_us if known >= bits]
        if more:
            return self.layer_us[min(more)]
        fewer = max(self.layer_us, default=None)
        return None if fewer is None else self.layer_us[fewer] * 2.0 ** (bits - fewer)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence whose prompt is to be read: the arguments of `Sequences.join`."""

    row: int
    prompt: tuple[int, ...]
    positions: int
    sampling: Sampling
    reuse: bool


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """What was read: `layers` of a chunk of `tokens`, 0 if there was nothing to read. `joins` is the sequence whose
    prompt is read with it."""

    tokens: int
    layers: int
    joins: Arrival | None


class Arrivals:
    """Sequences whose prompts are read one after the other, in order of arrival.

    A row that has too little memory for its prompt gets it when the prompt's turn comes. Beginnings that `Prefixes` has
    are copied then, too, so that a prompt finds those of the prompt before.
    """

    def __init__(self, caches: Caches, prefixes: Prefixes, begin: Begin, settle: Callable[[], None]) -> None:
        """`settle` waits until no launch is running."""
        self.pace = Pace()
        self._caches, self._prefixes, self._begin, self._settle = caches, prefixes, begin, settle
        self._waiting: dict[int, Arrival] = {}
        self._turn: _PromptTurn | None = None
        self._read: dict[int, PromptRead] = {}
        self._lost: dict[int, FlywheelError] = {}

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, row: object) -> bool:
        return row in self._waiting

    def add(self, arrival: Arrival) -> None:
        """Let a sequence wait for its turn."""
        self._waiting[arrival.row] = arrival
        self._read[arrival.row] = PromptRead(0, 0)

    def drop(self, row: int) -> None:
        """Forget the prompt of a row, read or not."""
        if row == next(iter(self._waiting), None):
            self._turn = None
        self._waiting.pop(row, None)
        self._lost.pop(row, None)

    @property
    def needs_memory(self) -> bool:
        """Whether the next piece is one for whose row memory is taken. Then no launch may be running."""
        first = next(iter(self._waiting.values()), None)
        return first is not None and not self._caches.reaches(first.row, len(first.prompt))

    def read_of(self, row: int) -> PromptRead:
        """How the prompt of a row was read, so far."""
        return self._read.get(row, PromptRead(0, 0))

    def lost(self) -> dict[int, FlywheelError]:
        """Rows whose prompts could not be read since the last call, with the error."""
        lost, self._lost = self._lost, {}
        return lost

    def read(self, *, alone: bool) -> PromptPiece | None:
        """Read the next piece, or take the memory that the prompt needs; a whole chunk if no other sequence waits for
        it (`alone`). None if there is none, or the device has not told yet what it needs."""
        if not self._waiting:
            return None
        first = next(iter(self._waiting.values()))
        what = f"prompt of {len(first.prompt)} tokens"
        try:
            if self.needs_memory:
                self._prefixes.hold(first.row, len(first.prompt))
                if not alone:
                    return PromptPiece(0, 0, None)
            try:
                return within_memory(what, lambda: self._piece(first, alone))
            except GpuMemoryError:
                self._settle()
                self._prefixes.clear()
                self._caches.give_back()  # of sequences that are over
                return within_memory(what, lambda: self._piece(first, alone))
        except (CacheMemoryError, GpuMemoryError) as error:
            self.drop(first.row)
            self._caches.leave(first.row)
            self._lost[first.row] = error
            return None

    def _piece(self, first: Arrival, alone: bool) -> PromptPiece | None:
        if self._turn is None:
            keys = keys_of(first.prompt[:-1])
            blocks = self._prefixes.find(keys, wait=alone) if first.reuse else []
            if blocks is None:
                return None
            self._turn = _PromptTurn(keys, blocks, len(blocks))
        turn = self._turn
        if (reading := turn.reading) is None:
            # The first run comes last: launches between pieces overwrite the row's first positions.
            while turn.left:
                start = (turn.left - 1) // RUN * RUN
                self._prefixes.restore(first.row, start, turn.blocks[start : turn.left])
                turn.left = start
                if turn.left and not alone:
                    return PromptPiece(0, 0, None)
            start = len(turn.blocks) * BLOCK
            turn.reading = reading = self._begin(first.prompt[:-1], self._caches, first.row, start)
            self._read[first.row] = PromptRead(start, 0)
        tokens, layers, held = reading.length, 0, reading.held
        if not reading.is_done:
            layers = reading.layers if alone else min(reading.layers, self.pace.layers(tokens))
            reading.read(layers)
            reused, pieces = self._read[first.row]
            self._read[first.row] = PromptRead(reused, pieces + 1)
        if reading.held > held:
            self._prefixes.save(first.row, turn.keys[: reading.held // BLOCK])
        if not reading.is_done:
            return PromptPiece(tokens, layers, None)
        self.drop(first.row)
        return PromptPiece(tokens, layers, first)


@dataclass(slots=True)
class _PromptTurn:
    """The prompt that is being read: its keys, and the blocks that it begins with, of which the first `left` are still
    to be copied before its `reading` begins."""

    keys: list[bytes]
    blocks: list[Tensor]
    left: int
    reading: Reading | None = None
