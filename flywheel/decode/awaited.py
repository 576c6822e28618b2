"""GPU launches that the host waits for one by one, since the next launch depends on their tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Final, Protocol

import numpy as np
import torch

from flywheel.decode.caches import Caches
from flywheel.decode.memory import within_memory
from flywheel.decode.step import Positions, Step, check_rows, lane_places, positions_of
from flywheel.decode.views import view
from flywheel.errors import GpuMemoryError
from flywheel.models.spec import DecoderSpec
from flywheel.vm.gpu.loader import POSITIONS, LoadedProgram

_WORD: Final = 4
"""Bytes of a token and of a position."""


class Prefilled(Protocol):
    """The parts of a GPU session that `AwaitedLaunches` uses."""

    @property
    def spec(self) -> DecoderSpec:
        """The model."""

    @property
    def context(self) -> int:
        """Positions that the caches hold."""

    @property
    def batch(self) -> int:
        """Sequences."""

    @property
    def caches(self) -> Caches:
        """KV caches of all sequences."""

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """Start the sequence of a row: read its prompt with torch."""

    def explain(self, text: Sequence[int]) -> str:
        """See `runtime.sequences.Explain`. No launch may be running."""


class AwaitedLaunches:
    """Implements `decode.sequences.Stepped` for a GPU session with a loaded program. The host reads only tokens after a
    launch: logits stay on the GPU, and a `Step` refers to them until the next launch. Raises GpuMemoryError."""

    def __init__(self, session: Prefilled, loaded: LoadedProgram, limit_s: float) -> None:
        self.spec: Final = session.spec
        self.context: Final = session.context
        self.batch: Final = session.batch
        self.lanes: Final = loaded.packed.lanes
        self.caches: Final = session.caches
        self._session, self._loaded, self._limit_s = session, loaded, limit_s
        self._gpu = gpu = loaded.gpu
        self._rows = rows = self.batch * self.lanes
        self._token_in, self._place_in = loaded.address("token_id"), loaded.address("position")
        self._token_out = loaded.address("next_token")
        shape = (rows, self.spec.vocab)
        self._logits = view(loaded.address("logits"), shape, torch.float32, self.caches.device)
        with ExitStack() as undo:
            # Inputs (positions and tokens) and outputs.
            self._words = gpu.alloc_host(POSITIONS + 2 * rows)
            undo.callback(gpu.free_host, self._words)
            self._positions = gpu.alloc(POSITIONS * _WORD)
            undo.callback(gpu.free, self._positions)
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Free its memory."""
        self._undo.close()

    def prefill(self, token_ids: Sequence[int], row: int = 0, start: int = 0) -> None:
        """See `BatchSession.prefill`. Raises GpuMemoryError if the prompt's activations do not fit even after the
        caches of ended sequences are freed."""
        what, work = f"prompt of {len(token_ids) + 1} tokens", partial(self._session.prefill, token_ids, row, start)
        try:
            within_memory(what, work)
        except GpuMemoryError:
            self.caches.give_back()
            within_memory(what, work)

    def explain(self, text: Sequence[int]) -> str:
        """See `runtime.sequences.Explain`."""
        return self._session.explain(text)

    def step_rows(
        self, token_ids: Sequence[int], position: Positions, wanted: Collection[int] | None = None
    ) -> list[Step]:
        """See `BatchSession.step_rows`, but the caches must already have memory for the positions. Raises as
        `CudaSession.step`."""
        check_rows(self.spec, self.context, self.batch, token_ids, position, self.lanes)
        gpu, rows, words = self._gpu, self._rows, self._words.array
        places = positions_of(position, self.batch)
        words[:POSITIONS] = 0
        words[:rows] = lane_places(places, self.lanes)
        words[POSITIONS : POSITIONS + rows] = token_ids
        if self.caches.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # the VM's stream does not wait for torch's
        gpu.send(self._positions.address, self._words, 0, POSITIONS)
        gpu.send(self._place_in, self._words, 0, rows)
        gpu.send(self._token_in, self._words, POSITIONS, rows)
        self._loaded.launch(max(places), self._positions.address)
        gpu.fetch(self._words, POSITIONS + rows, self._token_out, rows)
        self._loaded.wait(gpu.record(), self._limit_s)
        chosen = words[POSITIONS + rows :][:rows].view(np.int32).tolist()
        return [Step(logits, token) for logits, token in zip(self._logits, chosen, strict=True)]
