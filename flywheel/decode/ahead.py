"""Decoding without a pause between launches: they are queued ahead, and the host reads tokens behind."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from flywheel.decode.sampling import Sampling, choose
from flywheel.decode.session import TokenStream
from flywheel.vm.driver import Gpu
from flywheel.vm.loader import POSITIONS, LoadedProgram

AHEAD: Final = 4
"""Launches in the stream beside the one whose tokens the host waits for. So many are in vain where a text ends."""

_WORD: Final = 4
"""Bytes of a token and of a position."""


def decode_ahead(
    loaded: LoadedProgram, device: torch.device, prompt: Sequence[int], positions: int, start: int,
    sampling: Sampling, limit_s: float,
) -> TokenStream:  # fmt: skip
    """As `DecodeSession.stream`, of a program of one sequence on torch's `device`. Closing the stream waits for what is
    queued. Raises as `QueuedRows.advance` does."""
    with closing(QueuedRows(loaded, device, 1, limit_s)) as rows:
        rows.begin(0, prompt, positions, start, sampling)
        while queued := rows.next_launch():
            yield from [token for _, token in queued.tokens()]


@dataclass(slots=True, eq=False)
class _Row:
    """A sequence as launches are queued: `position` is where it stands in the next one."""

    prompt: tuple[int, ...]
    positions: int
    position: int
    sampling: Sampling
    seen: Tensor | None


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch behind which the host can read the tokens of those rows that are still held by the same sequences."""

    rows: tuple[tuple[int, _Row], ...]
    held: dict[int, _Row]
    chosen: np.ndarray[Any, Any]

    def tokens(self) -> list[tuple[int, int]]:
        """(row, token) of each."""
        found = [(row, each) for row, each in self.rows if self.held.get(row) is each]
        return [(row, int(self.chosen[row].astype(np.int32))) for row, _ in found]


class QueuedRows:
    """The rows of a program of `batch` sequences on torch's `device`. The caches are the caller's.

    The device keeps each row's token and position: behind a launch it puts the token that was chosen where the next one
    reads it, and moves the row on. A free row decodes some token at position 0 of its own caches.
    """

    def __init__(self, loaded: LoadedProgram, device: torch.device, batch: int, limit_s: float) -> None:
        self._loaded, self._device, self._batch, self._limit_s = loaded, device, batch, limit_s
        self._gpu = gpu = loaded.gpu
        self._on_stream = _on_stream_of(gpu, device)
        self._token_in, self._token_out = loaded.address("token_id"), loaded.address("next_token")
        self._place_in = loaded.address("position")
        self._logits: Tensor | None = None
        self._held: dict[int, _Row] = {}
        self._queued: deque[tuple[int, tuple[tuple[int, _Row], ...], Any]] = deque()
        self._next_slot = 0
        with self._on_stream():
            self._tokens = _view(self._token_in, (batch,), torch.int32, device)
            self._places = torch.zeros(POSITIONS, dtype=torch.int32, device=device)
            self._steps = torch.zeros(POSITIONS, dtype=torch.int32, device=device)  # 1 of those that move on
            self._tokens.zero_()
        with ExitStack() as undo:
            self._chosen = gpu.alloc_host((AHEAD + 1) * batch)
            undo.callback(gpu.free_host, self._chosen)
            undo.callback(loaded.sync, limit_s * (AHEAD + 1))
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Wait for what is queued, and give memory back. Raises as `LoadedProgram.sync` does."""
        self._held.clear()
        self._undo.close()

    @property
    def stream(self) -> Callable[[], AbstractContextManager[Any]]:
        """A context in which torch's operations wait for the launches before them, and launches behind wait for
        torch's."""
        return self._on_stream

    def begin(self, row: int, prompt: Sequence[int], positions: int, start: int, sampling: Sampling) -> None:
        """Let a free row decode its prompt's tokens from position `start` on, and what is chosen behind them, up to
        `positions` - 1. Positions before `start` are in its caches."""
        with self._on_stream():
            seen = None
            if not sampling.is_argmax:
                vocab = self._all_logits().shape[-1]
                seen = torch.zeros(vocab, dtype=torch.bool, device=self._device)
                seen[torch.tensor(prompt, device=self._device)] = True
            self._tokens[row] = prompt[start]
            self._places[row] = start
            self._steps[row] = 1
        self._held[row] = _Row(tuple(prompt), positions, start, sampling, seen)

    def end(self, row: int) -> None:
        """Make a row free."""
        if self._held.pop(row, None) is not None:
            self._rest(row)

    def next_launch(self) -> _Launch | None:
        """The oldest launch that was not read, once it is over; more are queued behind it. None where there is none.

        Raises LaunchTimeoutError, TensorError and GpuFaultError as `LoadedProgram.wait` does, and ConfigError for a
        position that the program cannot move to.
        """
        while len(self._queued) <= AHEAD and self._enqueue():
            pass
        if not self._queued:
            return None
        slot, rows, done = self._queued.popleft()
        self._loaded.wait(done, self._limit_s)
        return _Launch(rows, self._held, self._chosen.array[slot * self._batch :][: self._batch].copy())

    def _enqueue(self) -> bool:
        """Queue a launch of the rows that have not come to their ends; False where there are none."""
        live = [(row, each) for row, each in self._held.items() if each.position < each.positions]
        if not live:
            return False
        gpu, nbytes, slot = self._gpu, self._batch * _WORD, self._next_slot
        gpu.copy(self._place_in, self._places.data_ptr(), nbytes)
        self._loaded.launch(max(each.position for _, each in live), self._places.data_ptr())
        gpu.copy(self._token_in, self._token_out, nbytes)
        with self._on_stream():
            for row, each in live:
                self._replace_choice(row, each)
            self._places.add_(self._steps)
        gpu.fetch(self._chosen, slot * self._batch, self._token_in, self._batch)
        shown = tuple((row, each) for row, each in live if each.position >= len(each.prompt) - 1)
        self._queued.append((slot, shown, gpu.record()))
        self._next_slot = (slot + 1) % (AHEAD + 1)
        for row, each in live:
            each.position += 1
            if each.position == each.positions:
                self._rest(row)
        return True

    def _replace_choice(self, row: int, each: _Row) -> None:
        """Put what a row decodes next in the place of the program's own choice, where that is something else."""
        if each.position + 1 < len(each.prompt):
            self._tokens[row] = each.prompt[each.position + 1]
        elif each.seen is not None:
            token = choose(self._all_logits()[row], each.seen, each.sampling, each.position)
            self._tokens[row] = token
            each.seen.index_fill_(0, token, True)

    def _rest(self, row: int) -> None:
        """Let a row stand at position 0, where it costs least, behind what is queued."""
        with self._on_stream():
            self._places[row] = 0
            self._steps[row] = 0

    def _all_logits(self) -> Tensor:
        """float32 [batch, vocab] of the last launch, as a view."""
        if self._logits is None:
            buffer = next(each for each in self._loaded.packed.program.buffers if each.name == "logits")
            shape = (self._batch, buffer.shape[-1])
            self._logits = _view(self._loaded.address("logits"), shape, torch.float32, self._device)
        return self._logits


def _on_stream_of(gpu: Gpu, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What makes torch's operations wait for the VM's launches before them, and those behind wait for torch's."""
    if device.type == "cpu":
        return nullcontext
    stream = torch.cuda.ExternalStream(gpu.stream_handle)  # type: ignore[no-untyped-call]
    return lambda: torch.cuda.stream(stream)


_KINDS: Final = {torch.int32: "<i4", torch.float32: "<f4"}
"""Types of views, as an array interface names them."""


def _view(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of a device, as a tensor."""
    kind = np.dtype(_KINDS[dtype])
    if device.type == "cpu":
        held = (ctypes.c_byte * (prod(shape) * kind.itemsize)).from_address(address)
        return torch.from_numpy(np.ctypeslib.as_array(held).view(kind).reshape(shape))
    interface = {"data": (address, False), "shape": shape, "typestr": kind.str, "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
