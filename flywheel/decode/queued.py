"""Sequences of a program whose launches are queued ahead of the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flywheel.decode.ahead import QueuedRows
from flywheel.decode.caches import Caches
from flywheel.decode.memory import within_memory
from flywheel.decode.prefill import Prefill
from flywheel.decode.prefixes import Prefixes
from flywheel.errors import CacheMemoryError, FlywheelError, GpuMemoryError, UsageError
from flywheel.runtime.sequences import Made, Sampling

CheckJoin = Callable[[Sequence[int], int], None]


class QueuedSequences:
    """Implements `Sequences`. torch reads a prompt in the stream of the launches, after those that are
    queued."""

    def __init__(self, rows: QueuedRows, caches: Caches, prefill: Prefill, batch: int, check: CheckJoin) -> None:
        self.batch = batch
        self._rows, self._caches, self._prefill, self._check = rows, caches, prefill, check
        self._taken: set[int] = set()
        self._prefixes = Prefixes(caches)

    def join(
        self, row: int, prompt: Sequence[int], positions: int, sampling: Sampling, reuse: bool = True
    ) -> int:
        """See `Sequences.join`. Also raises GpuMemoryError if the prompt's activations do not fit, and errors of
        `QueuedRows.next_launch` if a queued launch does not end."""
        self._check(prompt, positions)
        if row in self._taken:
            raise UsageError(f"row {row} is taken")

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
