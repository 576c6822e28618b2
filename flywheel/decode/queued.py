"""Decoding without a pause between launches: the host queues launches ahead and reads their tokens later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from ctypes import c_int32, c_uint32
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from flywheel.decode.caches import Caches, view
from flywheel.decode.choices import WORDS, Choices, most_asked, read_row, report
from flywheel.decode.memory import within_memory
from flywheel.decode.on_gpu import torch_device
from flywheel.decode.pieces import Arrival, Arrivals, Begin, PromptPiece
from flywheel.decode.prefixes import Prefixes, keys_of
from flywheel.decode.session import TokenStream
from flywheel.errors import CacheMemoryError, FlywheelError
from flywheel.ir import NO_TOKEN
from flywheel.models.spec import DecoderSpec
from flywheel.plan.variant import WARP
from flywheel.runtime.sequences import Explain, Made, PromptRead, Sampling, check_join, not_finite
from flywheel.vm.gpu.loader import POSITIONS
from flywheel.vm.gpu.ranked import AnyProgram

AHEAD: Final = 4
"""Launches queued besides the one whose tokens the host waits for. When a text ends, this many launches are wasted."""

_AHEAD_OF_PROMPTS: Final = 1
"""As AHEAD while a prompt is read: with more, the device would hold so many of its operations that handing over another
one waits, without a time limit."""

_SLOTS: Final = AHEAD + 1
"""Launches that are queued or that the host waits for."""

_WORD: Final = 4
"""Bytes of a token and of a position."""


def decode_ahead(
    loaded: AnyProgram, caches: Caches, prompt: Sequence[int], positions: int, start: int,
    sampling: Sampling, limit_s: float, explain: Explain | None = None,
) -> TokenStream:  # fmt: skip
    """Decode one sequence as `DecodeSession.stream` does, with launches queued ahead. Closing the stream waits for the
    queued launches. Raises as `QueuedRows.next_launch` does, and the errors of `QueuedRows.lost`."""
    with closing(QueuedRows(loaded, caches, 1, limit_s, explain)) as rows:
        rows.begin(0, prompt, positions, start, sampling)
        while queued := rows.next_launch():
            yield from [made.token for made in queued.tokens()]
        for error in rows.lost().values():
            raise error


@dataclass(slots=True, eq=False)
class _QueuedRow:
    """The state of a sequence for the next launch to queue: `position` is the position that this launch decodes.
    `text` are the tokens that the host knows."""

    prompt: tuple[int, ...]
    positions: int
    position: int
    sampling: Sampling
    text: list[int]


@dataclass(frozen=True, slots=True)
class _PieceSpan:
    """A piece of a prompt on the device, between two events."""

    begun: Any
    piece: PromptPiece
    done: Any


@dataclass(frozen=True, slots=True)
class _Queued:
    """A launch that the host has not waited for: its slot, the rows whose tokens it makes, the words of its report a
    row, the piece before it, and the event behind it."""

    slot: int
    rows: tuple[tuple[int, _QueuedRow], ...]
    width: int
    before: _PieceSpan | None
    done: Any


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch that is over. The host can read the tokens of the rows that the same sequences still hold."""

    queued: _Queued
    held: dict[int, _QueuedRow]
    chosen: np.ndarray[Any, Any]
    reported: np.ndarray[Any, Any] | None
    """Words of `report`, [batch, ...]; None if no row asks for them."""

    def tokens(self) -> list[Made]:
        """The token of each row."""
        return [
            Made(
                row,
                int(self.chosen[row]),
                None if self.reported is None else read_row(self.reported[row], each.sampling),
            )
            for row, each in self.queued.rows
            if self.held.get(row) is each
        ]


class QueuedRows:
    """Launches of a program of `batch` rows over the caller's `caches`, whose memory grows before the launches need it.

    After each launch, the device copies the chosen tokens to where the next launch reads them, and advances every row
    by one position. The host sends positions only when a row starts, leaves or ends. A free row decodes some token at
    position 0 of its own caches.
    """

    def __init__(
        self, loaded: AnyProgram, caches: Caches, batch: int, limit_s: float, explain: Explain | None = None,
        hold: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """`explain` is for errors; no launch runs meanwhile. Nor does one when `hold` gets a row memory for so many
        positions, by default as `Caches.hold` with `may_take`."""
        self.batch: Final = batch
        self._loaded, self._caches, self._limit_s = loaded, caches, limit_s
        self._explain = explain
        self._hold = partial(caches.hold, may_take=True) if hold is None else hold
        self._device = device = caches.device
        self._lost: dict[int, CacheMemoryError] = {}
        self._spoilt: dict[int, list[int]] = {}  # row -> a text after which logits were not finite
        self.gpu: Final = loaded.gpu
        gpu = self.gpu
        self._on_stream = _on_stream_of(loaded, device)
        self._token_in, self._token_out = loaded.address("token_id"), loaded.address("next_token")
        self._place_in = loaded.address("position")
        self._logits: dict[int, Tensor] = {}
        self._choices: Choices | None = None
        self._held: dict[int, _QueuedRow] = {}
        self._queued: deque[_Queued] = deque()
        self._next_slot = 0
        self._places: list[int] | None = None  # position of each row that the device has for the next launch
        with self._on_stream():
            self._tokens = view(self._token_in, (batch,), torch.int32, device)
            self._positions = torch.zeros(POSITIONS, dtype=torch.int32, device=device)
            self._tokens.zero_()
        with ExitStack() as undo:
            # Positions of each slot, then tokens, then reports. One buffer, since pinning memory takes long.
            self._words = gpu.alloc_host(_SLOTS * (POSITIONS + batch + batch * WORDS))
            undo.callback(gpu.free_host, self._words)
            undo.callback(self._finish)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Wait for the queued launches, and free memory. Raises as `LoadedProgram.sync` does."""
        self._held.clear()
        for row in range(self.batch):
            self._caches.leave(row)
        self._undo.close()

    def _finish(self) -> None:
        if not self.gpu.broken:  # a broken GPU finishes nothing
            self._loaded.sync(self._limit_s * _SLOTS)

    def settle(self) -> None:
        """Wait for the queued launches. Raises as `next_launch`."""
        if self._queued:
            self._loaded.wait(self.gpu.record(), self._limit_s * _SLOTS)

    def finish_torch(self) -> None:
        """Wait, without a time limit, for torch's pending operations, so that a launch queued after them is not counted
        as late."""
        for part in self._loaded.parts:
            part.gpu.sync()

    @property
    def stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context in which torch's operations wait for earlier launches, and later launches wait for torch's
        operations."""
        return self._on_stream

    def begin(self, row: int, prompt: Sequence[int], positions: int, start: int, sampling: Sampling) -> None:
        """Start a sequence in a free row. It decodes the prompt's tokens from position `start` on, then its own tokens,
        up to `positions` - 1. The row's caches hold the positions before `start`."""
        with self._on_stream():
            if start == len(prompt) - 1:
                self._begin_choices(row, prompt, sampling)
            self._tokens[row] = prompt[start]
        self._held[row] = _QueuedRow(tuple(prompt), positions, start, sampling, list(prompt))

    def end(self, row: int) -> None:
        """Free a row."""
        self._lost.pop(row, None)
        self._spoilt.pop(row, None)
        if self._held.pop(row, None) is not None:
            self._let_go(row)

    def _let_go(self, row: int) -> None:
        """Stop decoding a row. Its memory stays until another sequence takes it."""
        self._caches.leave(row)
        if self._choices is not None:
            with self._on_stream():
                self._choices.free(row)

    @property
    def ahead(self) -> int:
        """Launches that the host has not waited for."""
        return len(self._queued)

    @property
    def is_idle(self) -> bool:
        """Whether no sequence decodes."""
        return not self._queued and not any(each.position < each.positions for each in self._held.values())

    def text_of(self, row: int) -> list[int] | None:
        """The tokens of a row's sequence that the host knows; None if the row is free."""
        return self._held[row].text if row in self._held else None

    def next_launch(self) -> _Launch | None:
        """`take`, with AHEAD launches queued after it."""
        while self.ahead <= AHEAD and self.enqueue():
            pass
        return self.take()

    def take(self) -> _Launch | None:
        """Wait for the oldest unread launch and return it. None if there is none.

        Raises LaunchTimeoutError and GpuFaultError as `LoadedProgram.wait` does.
        """
        if not self._queued:
            return None
        queued = self._queued.popleft()
        if queued.before is not None:
            self.finish(queued.before)
        self._loaded.wait(queued.done, self._limit_s)
        slot, width = queued.slot, queued.width
        chosen = self._words.array[self._tokens_at(slot) :][: self.batch].copy().view(np.int32)
        report_words = self._words.array[self._report_at(slot) :][: self.batch * width].copy()
        self._read(queued.rows, chosen)
        return _Launch(queued, self._held, chosen, report_words.reshape(self.batch, width) if width else None)

    def finish(self, span: _PieceSpan) -> None:
        """Wait for a piece, behind launches that are over, without a time limit: a launch after it is not late for
        it."""
        self.gpu.wait(span.done, inf)

    def _read(self, rows: Sequence[tuple[int, _QueuedRow]], chosen: np.ndarray[Any, Any]) -> None:
        """Append each row's token to its text. A row without one ends: its later launches decode other tokens."""
        for row, each in rows:
            if self._held.get(row) is not each:
                continue
            token = int(chosen[row])
            if token == NO_TOKEN:
                self.end(row)
                self._spoilt[row] = each.text
            else:
                each.text.append(token)

    def _tokens_at(self, slot: int) -> int:
        return _SLOTS * POSITIONS + slot * self.batch

    def _report_at(self, slot: int) -> int:
        return self._tokens_at(_SLOTS) + slot * self.batch * WORDS

    def enqueue(self, before: _PieceSpan | None = None) -> bool:
        """Queue a launch of the rows that have not reached their ends, behind a piece; False if there are none. Raises
        ConfigError for a position that the program cannot move to."""
        live = [(row, each) for row, each in self._held.items() if each.position < each.positions]
        live = [(row, each) for row, each in live if self._grows(row, each)]
        if not live:
            return False
        gpu, slot = self.gpu, self._next_slot
        self._place_rows(slot, live)
        last = max(each.position for _, each in live)
        self._loaded.spread_inputs()
        self._loaded.launch(last, self._positions.data_ptr() if self.batch > 1 else 0)
        chosen = self._token_out
        if self._choices is not None or any(each.position + 1 < len(each.prompt) for _, each in live):
            gpu.copy(self._token_in, self._token_out, self.batch * _WORD)
            with self._on_stream():
                self._replace_choices(live)
            chosen = self._token_in
        self._advance(chosen, slot, live)
        shown = tuple([(row, each) for row, each in live if each.position >= len(each.prompt) - 1])
        width = self._fetch_report(slot, shown)
        self._queued.append(_Queued(slot, shown, width, before, gpu.record()))
        self._next_slot = (slot + 1) % _SLOTS
        for _, each in live:
            each.position += 1
        return True

    def lost(self) -> dict[int, FlywheelError]:
        """The rows whose caches could not grow, and those whose logits are not finite, with the error, each reported
        once after all its tokens were read. These rows are free. Raises as `next_launch`."""
        unread = {row for queued in self._queued for row, _ in queued.rows}
        lost: dict[int, FlywheelError] = {row: error for row, error in self._lost.items() if row not in unread}
        for row in lost:
            self.end(row)
        spoilt, self._spoilt = self._spoilt, {}
        if spoilt:
            self.settle()  # with a time limit, which torch's own wait lacks
            with self._on_stream():
                lost |= {row: not_finite(text, self._explain) for row, text in spoilt.items()}
            self.finish_torch()
        return lost

    def _grows(self, row: int, each: _QueuedRow) -> bool:
        """Get memory for the row's position in the next launch. False if there is none: the row then stops decoding."""
        if self._caches.reaches(row, each.position + 1):
            return True
        try:
            with self._on_stream():
                self._caches.hold(row, each.position + 1)
        except CacheMemoryError:
            self.settle()  # no later launch touches the memory of rows that left
            try:
                with self._on_stream():
                    self._hold(row, each.position + 1)
            except CacheMemoryError as error:
                self._lost[row] = error
                each.positions = each.position
                self._let_go(row)  # launches on its memory are over; their tokens are still unread
                return False
        return True

    def _fetch_report(self, slot: int, shown: Sequence[tuple[int, _QueuedRow]]) -> int:
        """Queue a copy of the report that rows ask for with their tokens. Returns its words per row; 0 if no row
        asks."""
        most = most_asked(each.sampling for _, each in shown)
        if most is None:
            return 0
        with self._on_stream():  # its order keeps the report until it is fetched
            found = report(self._all_logits(), self._tokens, most)
            self.gpu.fetch(self._words, self._report_at(slot), found.data_ptr(), found.numel())
        return found.shape[1]

    def _place_rows(self, slot: int, live: Sequence[tuple[int, _QueuedRow]]) -> None:
        """Set each row's position for the next launch. Free rows stand at position 0, where they cost least."""
        places = [0] * self.batch
        for row, each in live:
            places[row] = each.position
        if places == self._places:
            return
        first = slot * POSITIONS
        self._words.array[first : first + self.batch] = places
        self.gpu.send(self._place_in, self._words, first, self.batch)
        if self.batch > 1:
            self.gpu.copy(self._positions.data_ptr(), self._place_in, self.batch * _WORD)
        self._places = places

    def _advance(self, chosen: int, slot: int, live: Sequence[tuple[int, _QueuedRow]]) -> None:
        """Let the next launch decode the tokens at device address `chosen`, one position further, and let the host read
        them from a slot. This takes one small kernel, which costs the stream less than three copies."""
        rows = {row for row, _ in live}
        told = self._words.address + self._tokens_at(slot) * _WORD
        positions = self._positions.data_ptr() if self.batch > 1 else 0
        mask = c_uint32(sum(1 << row for row in rows))
        args = (chosen, self._token_in, told, self._place_in, positions, mask, c_int32(self.batch))
        self.gpu.launch(self._loaded.parts[0].kernel.advance_rows, 1, WARP, args)
        assert self._places is not None
        self._places = [place + 1 if row in rows else 0 for row, place in enumerate(self._places)]

    def _replace_choices(self, live: Sequence[tuple[int, _QueuedRow]]) -> None:
        """Replace the program's own choices by the tokens that rows must decode next, where they differ."""
        if self._choices is not None:
            self._choices.replace(self._tokens, self._all_logits(), {row: each.position for row, each in live})
        for row, each in live:
            if each.position + 1 < len(each.prompt):
                self._tokens[row] = each.prompt[each.position + 1]
            if each.position + 2 == len(each.prompt):
                self._begin_choices(row, each.prompt, each.sampling)

    def _begin_choices(self, row: int, prompt: Sequence[int], sampling: Sampling) -> None:
        """Choose tokens as `sampling` asks from the next launch on, which decodes the prompt's last token."""
        if self._choices is None and not sampling.is_argmax:
            self._choices = Choices(self.batch, self._loaded.shape("logits")[-1], self._device)
        if self._choices is not None:
            self._choices.begin(row, prompt, sampling)

    def _all_logits(self) -> Tensor:
        """Logits of the last launch, a float32 view [batch, vocab]."""
        address = self._loaded.last_address("logits")
        if address not in self._logits:
            shape = (self.batch, self._loaded.shape("logits")[-1])
            self._logits[address] = view(address, shape, torch.float32, self._device)
        return self._logits[address]


def _on_stream_of(loaded: AnyProgram, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """A context that orders torch's operations after earlier launches, and later launches after torch's operations, on
    all of a program's GPUs. Within it, the first GPU's stream is torch's current one."""
    if device.type == "cpu":
        return nullcontext
    streams = [
        torch.cuda.ExternalStream(part.gpu.stream_handle, torch_device(part.gpu))  # type: ignore[no-untyped-call]
        for part in loaded.parts
    ]

    @contextmanager
    def current() -> Iterator[None]:
        with ExitStack() as stack:
            for stream in reversed(streams):
                stack.enter_context(torch.cuda.stream(stream))
            yield

    return current


class QueuedSequences:
    """Implements `Sequences`. torch reads pieces of prompts in the stream of the launches, between two of them."""

    def __init__(
        self, rows: QueuedRows, caches: Caches, prefixes: Prefixes, begin: Begin, spec: DecoderSpec, context: int
    ) -> None:
        self.batch: Final = rows.batch
        self._rows, self._caches, self._prefixes = rows, caches, prefixes
        self._spec, self._context = spec, context
        self._taken: set[int] = set()
        self._arrivals = Arrivals(caches, prefixes, begin, rows.settle)

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> None:
        """See `Sequences.join`. A row that needs more memory while launches are queued gets it later."""
        check_join(self._spec, self._context, self._taken, row, prompt, positions)
        if not self._rows.ahead or self._caches.reaches(row, len(prompt)):
            try:
                with self._rows.stream():
                    self._prefixes.hold(row, len(prompt))
            except CacheMemoryError:
                self._caches.leave(row)
                raise
        self._arrivals.add(Arrival(row, tuple(prompt), positions, sampling, reuse))
        self._taken.add(row)

    def read_of(self, row: int) -> PromptRead:
        """See `Sequences.read_of`."""
        return self._arrivals.read_of(row)

    def leave(self, row: int) -> None:
        """See `Sequences.leave`."""
        self._arrivals.drop(row)
        text = self._rows.text_of(row)
        if text is not None:
            with self._rows.stream():
                self._prefixes.save(row, keys_of(text[:-1]))
        self._rows.end(row)
        self._caches.leave(row)
        self._taken.discard(row)

    def advance(self) -> list[Made]:
        """See `Sequences.advance`. Skips launches whose sequences have all left. Raises as `QueuedRows.take`, and
        GpuMemoryError if the buffers of the sampling do not fit."""
        while True:
            within_memory("sampling", self._fill)
            launch = self._rows.take()
            if launch is None:
                return []
            self._learn(launch.queued)
            tokens = launch.tokens()
            if tokens:
                return tokens

    def _fill(self) -> None:
        """Queue launches, with a piece before each while there are prompts. Waits for a piece that no launch
        follows. Queues nothing until all launches are over where a prompt's row needs memory."""
        while self._rows.ahead <= (_AHEAD_OF_PROMPTS if self._arrivals else AHEAD):
            if self._rows.ahead and self._arrivals.needs_memory:
                return
            span = self._read() if self._arrivals else None
            if not self._rows.enqueue(span):
                if span is not None and not self._rows.ahead:
                    self._rows.finish(span)
                return

    def _read(self) -> _PieceSpan | None:
        """Read a piece of a prompt, and begin its sequence if that was the last."""
        begun = self._rows.gpu.record()
        with self._rows.stream():
            piece = self._arrivals.read(alone=self._rows.is_idle)
        if piece is None:
            return None
        if (joins := piece.joins) is not None:
            self._rows.begin(joins.row, joins.prompt, joins.positions, len(joins.prompt) - 1, joins.sampling)
        return _PieceSpan(begun, piece, self._rows.gpu.record())

    def _learn(self, queued: _Queued) -> None:
        """Tell the pace what a piece and the launch after it have taken."""
        if queued.before is None or not queued.before.piece.layers:
            return
        gpu, pace, span = self._rows.gpu, self._arrivals.pace, queued.before
        pace.piece_took(span.piece, gpu.elapsed_us(span.begun, span.done))
        pace.launch_took(gpu.elapsed_us(span.done, queued.done))

    def lost(self) -> dict[int, FlywheelError]:
        """See `Sequences.lost`. Raises as `QueuedRows.take`."""
        lost = self._rows.lost() | self._arrivals.lost()
        self._taken.difference_update(lost)
        return lost

    def close(self) -> None:
        """See `Sequences.close`. Raises as `QueuedRows.close`."""
        self._taken.clear()
        self._prefixes.clear()
        self._rows.close()
