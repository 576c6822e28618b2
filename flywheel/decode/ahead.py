"""Greedy decoding without a pause between launches: they are queued ahead, and the host reads tokens behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from flywheel.decode.session import TokenStream
from flywheel.vm.loader import LoadedProgram

AHEAD: Final = 4
"""Launches in the stream beside the one whose token the host waits for. So many are in vain where a text ends."""

_WORD: Final = 4
"""Bytes of a token and of a position."""


def decode_ahead(
    loaded: LoadedProgram, prompt: Sequence[int], positions: int, start: int, limit_s: float
) -> TokenStream:
    """As `DecodeSession.stream`, of a program of one sequence. Closing the stream waits for what is queued.

    The device hands each launch its position, and the prompt's token or the one that the launch before chose.
    Raises LaunchTimeoutError, TensorError and GpuFaultError as `LoadedProgram.sync` does, GpuMemoryError, and
    ConfigError for a position that the program cannot move to.
    """
    gpu = loaded.gpu
    with ExitStack() as undo:
        tokens = gpu.alloc((positions + 1) * _WORD)
        undo.callback(gpu.free, tokens)
        places = gpu.alloc(positions * _WORD)
        undo.callback(gpu.free, places)
        chosen = gpu.alloc_host(positions)
        undo.callback(gpu.free_host, chosen)
        gpu.upload(tokens, np.array(prompt, np.int32))
        gpu.upload(places, np.arange(positions, dtype=np.int32))
        token_in, place_in, token_out = map(loaded.address, ("token_id", "position", "next_token"))
        undo.callback(loaded.sync, limit_s * (AHEAD + 1))
        queued: deque[tuple[int, Any]] = deque()
        for position in range(start, positions):
            gpu.copy(token_in, tokens.address + position * _WORD, _WORD)
            gpu.copy(place_in, places.address + position * _WORD, _WORD)
            loaded.launch(position)
            if position >= len(prompt) - 1:
                gpu.copy(tokens.address + (position + 1) * _WORD, token_out, _WORD)
                gpu.fetch(chosen, position, token_out)
            queued.append((position, gpu.record()))
            if len(queued) > AHEAD:
                yield from _next(loaded, queued, chosen.array, len(prompt), limit_s)
        while queued:
            yield from _next(loaded, queued, chosen.array, len(prompt), limit_s)


def _next(
    loaded: LoadedProgram, queued: deque[tuple[int, Any]], chosen: np.ndarray[Any, Any], prompt: int, limit_s: float
) -> TokenStream:
    """The token of the oldest launch, which leaves the queue; nothing where it was the prompt's."""
    position, done = queued.popleft()
    loaded.wait(done, limit_s)
    if position >= prompt - 1:
        yield int(chosen[position].astype(np.int32))
