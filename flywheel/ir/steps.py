"""What the proof knows of a task, whosever it is: what it waits for, what it signals, and in whose queue it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flywheel.ir.records import Wait


class Step(Protocol):
    """A task of a program of ours, or of another runtime that has monotone counters and serial queues.

    On completion it adds 1 to `out_counter`. Steps with the same waits may share the sequence: it is looked at once.
    """

    @property
    def id(self) -> int:
        """Number in messages."""

    @property
    def label(self) -> str:
        """Name in messages."""

    @property
    def waits(self) -> Sequence[Wait]:
        """All that must be complete before it starts."""

    @property
    def out_counter(self) -> int:
        """The counter that it signals."""

    @property
    def rank(self) -> int:
        """The GPU that runs it."""

    @property
    def sm(self) -> int | None:
        """The serial queue of that GPU in which it stands, by its place in the list; None in none."""
