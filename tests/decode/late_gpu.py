"""A GPU in Python that works when it is waited for, and a program for it whose tokens depend on all that its caches
hold."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flywheel.decode.caches import KvCaches
from flywheel.decode.growing import HostGranules
from flywheel.decode.prefixes import Prefixes
from flywheel.decode.queued import QueuedRows, QueuedSequences
from flywheel.ir import DType
from flywheel.models.spec import DecoderSpec
from flywheel.vm.gpu.driver import HostWords
from flywheel.vm.gpu.loader import POSITIONS

SPEC = DecoderSpec("late", "llama", 32, 32, 1, 1, 1, 16, 97, 1e4, 1e-5, 256)
CONTEXT, GRANULE = 200, 4096
"""A granule holds 64 positions of the keys or values, of 64 bytes each."""


class LateGpu:
    """A stream whose work is done when somebody waits for it, and no sooner."""

    stream_handle, broken = 0, False

    def __init__(self) -> None:
        self._work: deque[Callable[[], None]] = deque()
        self._begun, self._done = 0, 0

    def enqueue(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        self._begun += 1

    def record(self) -> int:
        return self._begun

    def wait(self, event: int, limit_s: float) -> bool:
        self.run(event)
        return True

    def elapsed_us(self, start: int, end: int) -> float:
        return float(end - start)

    def run(self, event: int) -> None:
        while self._done < event:
            self._work.popleft()()
            self._done += 1

    def sync(self) -> None:
        self.run(self._begun)

    def alloc_host(self, count: int) -> HostWords:
        array = np.full(count, 0x5A5A5A5A, np.uint32)
        return HostWords(array.ctypes.data, array)

    def free_host(self, words: HostWords) -> None:
        assert self._done == self._begun

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self.enqueue(lambda: ctypes.memmove(target, source, nbytes) and None)

    def fetch(self, words: HostWords, index: int, source: int, count: int) -> None:
        self.copy(words.address + 4 * index, source, 4 * count)

    def send(self, target: int, words: HostWords, index: int, count: int) -> None:
        self.copy(target, words.address + 4 * index, 4 * count)

    def launch(self, kernel: Callable[..., None], grid: int, block: int, args: Sequence[Any]) -> None:
        self.enqueue(lambda: kernel(*(getattr(arg, "value", arg) for arg in args)))

    @contextmanager
    def after(self) -> Iterator[None]:
        """The stream of torch, whose operations wait for what is before them."""
        self.sync()
        yield


class LateProgram:
    """A LoadedProgram: keys hold tokens, and the next token is made of all of them."""

    def __init__(self, gpu: LateGpu, caches: KvCaches, batch: int) -> None:
        self.gpu, self.launches = gpu, 0
        self._caches, self._batch = caches, batch
        self.io = {name: np.zeros(batch, np.int32) for name in ("token_id", "next_token", "position")}
        self.logits = np.zeros((batch, SPEC.vocab), np.float32)
        self.parts = (self,)
        self.kernel = SimpleNamespace(advance_rows=advance_rows)

    def address(self, name: str) -> int:
        return int((self.logits if name == "logits" else self.io[name]).ctypes.data)

    def last_address(self, name: str) -> int:
        return self.address(name)

    def shape(self, name: str) -> tuple[int, ...]:
        assert name == "logits"
        return self.logits.shape

    def spread_inputs(self) -> None:
        pass

    def launch(self, last: int, positions: int) -> None:
        self.launches += 1
        self.gpu.enqueue(lambda: self._step(last, positions))

    def wait(self, event: int, limit_s: float) -> None:
        self.gpu.run(event)

    def sync(self, limit_s: float) -> None:
        self.gpu.sync()

    def _step(self, last: int, positions: int) -> None:
        """Of a free row, position 0 has memory at least: everybody's, in which nothing is kept."""
        kept = (ctypes.c_int32 * POSITIONS).from_address(positions) if positions else [last]
        for row in range(self._batch):
            place, token = int(self.io["position"][row]), int(self.io["token_id"][row])
            assert place <= last and kept[row] == place
            if place:
                assert self._caches.reaches(row, place + 1)
            keys, _ = self._caches.seen(0, row, place + 1)
            keys[:, place] = token
            self.logits[row] = said(keys[0, :, 0])
            self.io["next_token"][row] = self.logits[row].argmax()


def advance_rows(chosen: int, tokens: int, told: int, place: int, places: int, live: int, batch: int) -> None:
    """As the kernel of this name."""
    words = {at: (ctypes.c_int32 * batch).from_address(at) for at in (chosen, tokens, told, place, places) if at}
    for row in range(batch):
        words[tokens][row] = words[told][row] = words[chosen][row]
        words[place][row] = words[place][row] + 1 if live >> row & 1 else 0
        if places:
            words[places][row] = words[place][row]


def said(tokens: torch.Tensor) -> torch.Tensor:
    """[vocab] of tokens [S]: the largest is at a sum of them by their places."""
    places = torch.arange(1, len(tokens) + 1, dtype=torch.float64)
    number = float((tokens.double() * places).sum()) % SPEC.vocab
    return -(torch.arange(SPEC.vocab) - number).abs().float()


class LateReading:
    """As a Reading of a model of so many layers, of which the last one writes the caches."""

    def __init__(self, token_ids: Sequence[int], caches: KvCaches, row: int, start: int, depth: int = 3) -> None:
        caches.forget(row, start)
        self._prompt, self._caches, self._row = token_ids, caches, row
        self._next, self._depth, self.layers = start, depth, depth

    @property
    def held(self) -> int:
        return self._next

    @property
    def is_done(self) -> bool:
        return self._next >= len(self._prompt)

    @property
    def length(self) -> int:
        return min(5, len(self._prompt) - self._next)

    def read(self, layers: int) -> None:
        self.layers -= min(layers, self.layers)
        if not self.layers:
            for place in range(self._next, self._next + self.length):
                new = torch.full((1, 1, SPEC.head_dim), float(self._prompt[place]))
                self._caches.append(0, self._row, place, new, new)
            self._next, self.layers = self._next + self.length, self._depth
        new = torch.full((1, 1, SPEC.head_dim), float(self._prompt[0]))
        self._caches.append(0, self._row, 0, new, new)  # which launches have overwritten


def late_sequences(
    monkeypatch: pytest.MonkeyPatch, batch: int, granules: int | None = None
) -> tuple[QueuedSequences, LateProgram, KvCaches]:
    """Sequences over so many granules of memory."""
    held = HostGranules(2**30 if granules is None else granules * GRANULE, GRANULE)
    caches = KvCaches(replace(SPEC), DType.F32, CONTEXT, "cpu", batch, held)
    gpu = LateGpu()
    program: Any = LateProgram(gpu, caches, batch)
    monkeypatch.setattr("flywheel.decode.queued._on_stream_of", lambda *_: gpu.after)
    prefixes = Prefixes(caches)
    rows = QueuedRows(program, caches, batch, 1.0, hold=prefixes.hold)
    begin: Any = LateReading
    made = QueuedSequences(rows, caches, prefixes, begin, SPEC, CONTEXT)
    return made, program, caches


def speech(prompt: Sequence[int], count: int) -> list[int]:
    """The greedy tokens behind a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(said(torch.tensor(tokens, dtype=torch.float32)).argmax()))
    return tokens[len(prompt) :]
