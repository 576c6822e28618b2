"""Decoding without a pause between launches: the host queues launches ahead and reads their tokens later."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from ctypes import c_int32, c_uint32
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from flywheel.decode.caches import Caches, view
from flywheel.decode.choices import WORDS, Choices, most_asked, read_row, report
from flywheel.decode.memory import within_memory
from flywheel.decode.on_gpu import torch_device
from flywheel.decode.prompts import Prefill, Prefixes
from flywheel.decode.session import TokenStream
from flywheel.errors import CacheMemoryError, FlywheelError, GpuMemoryError
from flywheel.ir import NO_TOKEN
from flywheel.models.spec import DecoderSpec
from flywheel.plan.variant import WARP
from flywheel.runtime.sequences import Explain, Made, Sampling, check_join, not_finite
from flywheel.vm.gpu.loader import POSITIONS
from flywheel.vm.gpu.ranked import AnyProgram

AHEAD: Final = 4
"""Launches queued besides the one whose tokens the host waits for. When a text ends, this many launches are wasted."""

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
class _Launch:
    """A queued launch. Once it is over, the host can read the tokens of the rows that the same sequences still hold."""

    rows: tuple[tuple[int, _QueuedRow], ...]
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
            for row, each in self.rows
            if self.held.get(row) is each
        ]


class QueuedRows:
    """Launches of a program of `batch` rows over the caller's `caches`, whose memory grows before the launches need it.

    After each launch, the device copies the chosen tokens to where the next launch reads them, and advances every row
    by one position. The host sends positions only when a row starts, leaves or ends. A free row decodes some token at
    position 0 of its own caches.
    """

    def __init__(
        self, loaded: AnyProgram, caches: Caches, batch: int, limit_s: float, explain: Explain | None = None
    ) -> None:
        """`explain` is for errors; no launch runs meanwhile."""
        self._loaded, self._caches, self._batch, self._limit_s = loaded, caches, batch, limit_s
        self._explain = explain
        self._device = device = caches.device
        self._lost: dict[int, CacheMemoryError] = {}
        self._spoilt: dict[int, list[int]] = {}  # row -> a text after which logits were not finite
        self._gpu = gpu = loaded.gpu
        self._on_stream = _on_stream_of(loaded, device)
        self._token_in, self._token_out = loaded.address("token_id"), loaded.address("next_token")
        self._place_in = loaded.address("position")
        self._logits: dict[int, Tensor] = {}
        self._choices: Choices | None = None
        self._held: dict[int, _QueuedRow] = {}
        self._queued: deque[tuple[int, tuple[tuple[int, _QueuedRow], ...], int, Any]] = deque()
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
        for row in range(self._batch):
            self._caches.leave(row)
        self._undo.close()

    def _finish(self) -> None:
        if not self._gpu.broken:  # a broken GPU finishes nothing
            self._loaded.sync(self._limit_s * _SLOTS)

    def settle(self) -> None:
        """Wait for the queued launches. Raises as `next_launch`."""
        if self._queued:
            self._loaded.wait(self._gpu.record(), self._limit_s * _SLOTS)

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

    def next_launch(self) -> _Launch | None:
        """Wait for the oldest unread launch and return it; more launches stay queued after it. None if there is none.

        Raises LaunchTimeoutError and GpuFaultError as `LoadedProgram.wait` does, and ConfigError for a position that
        the program cannot move to.
        """
        while len(self._queued) <= AHEAD and self._enqueue():
            pass
        if not self._queued:
            return None
        slot, rows, width, done = self._queued.popleft()
        self._loaded.wait(done, self._limit_s)
        chosen = self._words.array[self._tokens_at(slot) :][: self._batch].copy().view(np.int32)
        report_words = self._words.array[self._report_at(slot) :][: self._batch * width].copy()
        self._read(rows, chosen)
        return _Launch(rows, self._held, chosen, report_words.reshape(self._batch, width) if width else None)

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
        return _SLOTS * POSITIONS + slot * self._batch

    def _report_at(self, slot: int) -> int:
        return self._tokens_at(_SLOTS) + slot * self._batch * WORDS

    def _enqueue(self) -> bool:
        """Queue a launch of the rows that have not reached their ends; False if there are none."""
        live = [(row, each) for row, each in self._held.items() if each.position < each.positions]
        live = [(row, each) for row, each in live if self._grows(row, each)]
        if not live:
            return False
        gpu, slot = self._gpu, self._next_slot
        self._place_rows(slot, live)
        last = max(each.position for _, each in live)
        self._loaded.spread_inputs()
        self._loaded.launch(last, self._positions.data_ptr() if self._batch > 1 else 0)
        chosen = self._token_out
        if self._choices is not None or any(each.position + 1 < len(each.prompt) for _, each in live):
            gpu.copy(self._token_in, self._token_out, self._batch * _WORD)
            with self._on_stream():
                self._replace_choices(live)
            chosen = self._token_in
        self._advance(chosen, slot, live)
        shown = tuple([(row, each) for row, each in live if each.position >= len(each.prompt) - 1])
        width = self._fetch_report(slot, shown)
        self._queued.append((slot, shown, width, gpu.record()))
        self._next_slot = (slot + 1) % _SLOTS
        for _, each in live:
            each.position += 1
        return True

    def lost(self) -> dict[int, FlywheelError]:
        """The rows whose caches could not grow, and those whose logits are not finite, with the error, each reported
        once after all its tokens were read. These rows are free. Raises as `next_launch`."""
        unread = {row for _, rows, _, _ in self._queued for row, _ in rows}
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
                    self._caches.hold(row, each.position + 1, may_take=True)
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
            self._gpu.fetch(self._words, self._report_at(slot), found.data_ptr(), found.numel())
        return found.shape[1]

    def _place_rows(self, slot: int, live: Sequence[tuple[int, _QueuedRow]]) -> None:
        """Set each row's position for the next launch. Free rows stand at position 0, where they cost least."""
        places = [0] * self._batch
        for row, each in live:
            places[row] = each.position
        if places == self._places:
            return
        first = slot * POSITIONS
        self._words.array[first : first + self._batch] = places
        self._gpu.send(self._place_in, self._words, first, self._batch)
        if self._batch > 1:
            self._gpu.copy(self._positions.data_ptr(), self._place_in, self._batch * _WORD)
        self._places = places

    def _advance(self, chosen: int, slot: int, live: Sequence[tuple[int, _QueuedRow]]) -> None:
        """Let the next launch decode the tokens at device address `chosen`, one position further, and let the host read
        them from a slot. This takes one small kernel, which costs the stream less than three copies."""
        rows = {row for row, _ in live}
        told = self._words.address + self._tokens_at(slot) * _WORD
        positions = self._positions.data_ptr() if self._batch > 1 else 0
        mask = c_uint32(sum(1 << row for row in rows))
        args = (chosen, self._token_in, told, self._place_in, positions, mask, c_int32(self._batch))
        self._gpu.launch(self._loaded.parts[0].kernel.advance_rows, 1, WARP, args)
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
            self._choices = Choices(self._batch, self._loaded.shape("logits")[-1], self._device)
        if self._choices is not None:
            self._choices.begin(row, prompt, sampling)

    def _all_logits(self) -> Tensor:
        """Logits of the last launch, a float32 view [batch, vocab]."""
        address = self._loaded.last_address("logits")
        if address not in self._logits:
            shape = (self._batch, self._loaded.shape("logits")[-1])
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
    """Implements `Sequences`. torch reads a prompt in the stream of the launches, after those that are queued."""

    def __init__(
        self, rows: QueuedRows, caches: Caches, prefill: Prefill, spec: DecoderSpec, context: int, batch: int
    ) -> None:
        self.batch = batch
        self._rows, self._caches, self._prefill, self._spec, self._context = rows, caches, prefill, spec, context
        self._taken: set[int] = set()
        self._prefixes = Prefixes(caches)

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> int:
        """See `Sequences.join`. Also raises GpuMemoryError if the prompt's activations do not fit, and errors of
        `QueuedRows.next_launch` if a queued launch does not end."""
        check_join(self._spec, self._context, self._taken, row, prompt, positions)

        def begin() -> int:
            with self._rows.stream():
                start = self._prefixes.reuse(row, prompt, reuse)
                self._prefill(prompt[:-1], self._caches, row, start)
                self._prefixes.begin(row, prompt)
            self._rows.begin(row, prompt, positions, len(prompt) - 1, sampling)
            return start

        self._rows.settle()  # with a time limit, which torch's own wait lacks
        what = f"prompt of {len(prompt)} tokens"
        try:
            start = within_memory(what, begin)
        except CacheMemoryError:
            self._caches.leave(row)
            raise
        except GpuMemoryError:
            self._caches.leave(row)
            self._caches.give_back()  # of sequences that are over
            try:
                start = within_memory(what, begin)
            except GpuMemoryError:
                self._caches.leave(row)
                raise
        self._rows.finish_torch()
        self._taken.add(row)
        return start

    def pick(self, free: Sequence[int], prompt: Sequence[int]) -> int:
        """See `Sequences.pick`."""
        return self._prefixes.pick(free, prompt)

    def leave(self, row: int) -> None:
        """See `Sequences.leave`."""
        self._rows.end(row)
        self._prefixes.leave(row)
        self._taken.discard(row)

    def advance(self) -> list[Made]:
        """See `Sequences.advance`. Skips launches whose sequences have all left. Raises as `QueuedRows.next_launch`,
        and GpuMemoryError if the buffers of the sampling do not fit."""
        while (launch := within_memory("sampling", self._rows.next_launch)) is not None:
            tokens = launch.tokens()
            for made in tokens:
                self._prefixes.add(made.row, made.token)
            if tokens:
                return tokens
        return []

    def lost(self) -> dict[int, FlywheelError]:
        """See `Sequences.lost`. Raises as `QueuedRows.next_launch`."""
        lost = self._rows.lost()
        self._taken.difference_update(lost)
        return lost

    def close(self) -> None:
        """See `Sequences.close`. Raises as `QueuedRows.close`."""
        self._taken.clear()
        self._rows.close()
