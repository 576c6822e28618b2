"""Decoding without a pause between launches: they are queued ahead, and the host reads tokens behind."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from flywheel.decode.sampling import Sampling, choose
from flywheel.decode.session import TokenStream
from flywheel.vm.driver import Gpu
from flywheel.vm.loader import LoadedProgram

AHEAD: Final = 4
"""Launches in the stream beside the one whose token the host waits for. So many are in vain where a text ends."""

_WORD: Final = 4
"""Bytes of a token and of a position."""


def decode_ahead(
    loaded: LoadedProgram, device: torch.device, prompt: Sequence[int], positions: int, start: int,
    sampling: Sampling, limit_s: float,
) -> TokenStream:  # fmt: skip
    """As `DecodeSession.stream`, of a program of one sequence on torch's `device`. Closing the stream waits for what is
    queued.

    The device hands each launch its position, and the prompt's token or the one that was chosen behind the launch
    before. Raises LaunchTimeoutError, TensorError and GpuFaultError as `LoadedProgram.sync` does, GpuMemoryError, and
    ConfigError for a position that the program cannot move to.
    """
    gpu = loaded.gpu
    token_in, place_in = loaded.address("token_id"), loaded.address("position")
    on_stream = _on_stream_of(gpu, device)
    with on_stream():
        tokens = torch.zeros(positions + 1, dtype=torch.int32, device=device)
        tokens[: len(prompt)] = torch.tensor(prompt)
        places = torch.arange(positions, dtype=torch.int32, device=device)
        choice = _Choice(loaded, device, tokens, prompt, sampling)
    with ExitStack() as undo:
        chosen = gpu.alloc_host(positions)
        undo.callback(gpu.free_host, chosen)
        undo.callback(loaded.sync, limit_s * (AHEAD + 1))
        queued: deque[tuple[int, Any]] = deque()
        for position in range(start, positions):
            gpu.copy(token_in, tokens.data_ptr() + position * _WORD, _WORD)
            gpu.copy(place_in, places.data_ptr() + position * _WORD, _WORD)
            loaded.launch(position)
            if position >= len(prompt) - 1:
                with on_stream():
                    choice.enqueue(position)
                gpu.fetch(chosen, position, tokens.data_ptr() + (position + 1) * _WORD)
            queued.append((position, gpu.record()))
            if len(queued) > AHEAD:
                yield from _next(loaded, queued, chosen.array, len(prompt), limit_s)
        while queued:
            yield from _next(loaded, queued, chosen.array, len(prompt), limit_s)


class _Choice:
    """Enqueues what puts the token behind a launch into `tokens`."""

    def __init__(
        self, loaded: LoadedProgram, device: torch.device, tokens: Tensor, prompt: Sequence[int], sampling: Sampling
    ) -> None:
        self._gpu, self._tokens, self._sampling = loaded.gpu, tokens, sampling
        self._token_out = loaded.address("next_token")
        if not sampling.is_argmax:
            logits = next(buffer for buffer in loaded.packed.program.buffers if buffer.name == "logits")
            self._logits = _floats_at(loaded.address("logits"), logits.shape[-1], device)
            self._seen = torch.zeros(logits.shape[-1], dtype=torch.bool, device=device)
            self._seen[torch.tensor(prompt, device=device)] = True

    def enqueue(self, position: int) -> None:
        if self._sampling.is_argmax:
            self._gpu.copy(self._tokens.data_ptr() + (position + 1) * _WORD, self._token_out, _WORD)
            return
        token = choose(self._logits, self._seen, self._sampling, position)
        self._tokens[position + 1] = token
        self._seen.index_fill_(0, token, True)


def _next(
    loaded: LoadedProgram, queued: deque[tuple[int, Any]], chosen: np.ndarray[Any, Any], prompt: int, limit_s: float
) -> Iterator[int]:
    """The token of the oldest launch, which leaves the queue; nothing where it was the prompt's."""
    position, done = queued.popleft()
    loaded.wait(done, limit_s)
    if position >= prompt - 1:
        yield int(chosen[position].astype(np.int32))


def _on_stream_of(gpu: Gpu, device: torch.device) -> Callable[[], AbstractContextManager[Any]]:
    """What makes torch's operations wait for the VM's launches before them, and those behind wait for torch's."""
    if device.type == "cpu":
        return nullcontext
    stream = torch.cuda.ExternalStream(gpu.stream_handle)  # type: ignore[no-untyped-call]
    return lambda: torch.cuda.stream(stream)


def _floats_at(address: int, count: int, device: torch.device) -> Tensor:
    """float32 [count] of a device's memory, as a view."""
    if device.type == "cpu":
        return torch.from_numpy(np.ctypeslib.as_array((ctypes.c_float * count).from_address(address)))
    interface = {"data": (address, True), "shape": (count,), "typestr": "<f4", "version": 3}
    return torch.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=device)
