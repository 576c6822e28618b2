"""What the proof knows of a task: its waits, its signal, and its queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flywheel.ir.records import Wait


class ProofTask(Protocol):
    """A task of a flywheel program, or of another runtime with monotone counters and serial queues.

    When it completes it adds 1 to `out_counter`. Steps with equal waits may share the sequence, which is then checked
    once.
    """

    @property
    def id(self) -> int:
        """Number in messages."""

    @property
    def label(self) -> str:
        """Name in messages."""

    @property
    def waits(self) -> Sequence[Wait]:
        """The waits that must hold before it starts."""

    @property
    def out_counter(self) -> int:
        """The counter that it signals."""

    @property
    def rank(self) -> int:
        """The GPU that runs it."""

    @property
    def sm(self) -> int | None:
        """The serial queue, on that GPU, that holds it, in list order; None where no queue does."""
