"""What a launch with a trace writes: the indices of `amk_trace_t.at`, of a task and of an SM."""

from __future__ import annotations

from enum import IntEnum


class Stamp(IntEnum):
    """What a traced task has come to."""

    CURRENT = 0
    """The vector warps turned to it."""
    READY = 1
    """Its inputs are there: its counters were waited for, and the data that it awaits itself is loaded."""
    STAGED = 2
    """The operand of its last matrix step to stage one is announced, or the first slice of it."""
    MULTIPLIED = 3
    """The last pass of its last matrix step is complete."""
    STORED = 4
    """Its last step is done. Of a product that adds the ranks' partial sums: its own one is stored, at least by the
    first warp."""
    DONE = 5
    """It has signalled, if anybody asks for that."""


class Tie(IntEnum):
    """What a task writes behind its stamps, to tie them to the global timer."""

    TIMER_NS = 6
    """The global timer at the stamp CURRENT."""


class Anchor(IntEnum):
    """Of an SM: what ties its clock to the global timer, which all share; and its waits."""

    FIRST_NS = 0
    """The global timer at one of its ticks, when the launch began."""
    FIRST_CYCLES = 1
    """The SM's clock at that tick."""
    LAST_NS = 2
    """The same when it ended."""
    LAST_CYCLES = 3
    STALLED = 4
    """Cycles that its loader waited for a free slot of the ring, or to be allowed to read that far ahead."""
    STARVED = 5
    """Cycles that its first matrix warp waited for weights, with their operand staged."""
    AWAITING = 6
    """Cycles that its first matrix warp waited for an operand."""
