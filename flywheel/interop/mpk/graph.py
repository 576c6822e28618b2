"""What a task_graph.json says: tasks, tensors and events of one rank. Source: docs/mpk.md, "The format"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

INVALID: Final = 0x7FFFFFFFFFFFFFFE
"""The event number that stands for no event."""

NVSHMEM_TAG: Final = 0x1E00000000000000
"""Bits that are set in the id of an event that another GPU signals."""

TERMINATE_TASK: Final = 0
BEGIN_TASK: Final = 1
FIRST_TASK: Final = 2
"""Positions in the list of tasks: task 0 ends a launch, task 1 begins an iteration, and the model's tasks follow."""

EMPTY: Final = 900
LAUNCH: Final = 901
LAUNCH_MASSIVE: Final = 902
LAUNCH_DEPENDENT: Final = 903
END: Final = 910
TERMINATION: Final = 911

EVENT_TYPES: Final = MappingProxyType(
    {
        EMPTY: "EMPTY",
        LAUNCH: "LAUNCH_TASKS",
        LAUNCH_MASSIVE: "LAUNCH_MASSIVE_TASKS",
        LAUNCH_DEPENDENT: "LAUNCH_DEPENDENT_TASKS",
        END: "END_OF_TASK_GRAPH",
        TERMINATION: "TERMINATION",
    }
)

LAUNCHING: Final = frozenset((LAUNCH, LAUNCH_MASSIVE, LAUNCH_DEPENDENT))
"""Types of events that put tasks into the workers' queues."""

ITEM_BYTES: Final = MappingProxyType(
    {930: 1, 935: 1, 936: 1, 940: 2, 941: 2, 945: 2, 946: 2, 950: 4, 955: 4, 956: 4, 960: 8, 965: 8, 966: 8}
)
"""Bytes of an element, by `data_type`. Types of four bits are missing here, and so is 999, which marks an absent
tensor."""


@dataclass(frozen=True, slots=True)
class MpkTensor:
    """A strided piece of the tensor `name`: `offset` in bytes, `dims` and `strides` in elements."""

    name: str
    offset: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    data_type: int

    @property
    def item_bytes(self) -> int:
        """Bytes of an element, 1 where elements are smaller or unknown."""
        return ITEM_BYTES.get(self.data_type, 1)


@dataclass(frozen=True, slots=True)
class MpkTask:
    """One task. `metadata` is request_id, kv_idx, merge_task_offset, expert_offset and task_offset; in files of 2025
    it is empty."""

    kind: int
    variant: int
    inputs: Sequence[MpkTensor]
    outputs: Sequence[MpkTensor]
    trigger: int
    dependent: int
    metadata: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MpkEvent:
    """A counter. In iteration i, counted from 1, it is met once it reaches `triggers` * i. It then launches the tasks
    at positions `first` up to, not including, `last`."""

    kind: int
    triggers: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How a file is written: spaces of indentation (None: all in one line), and the text behind the last bracket."""

    indent: int | None
    tail: str


@dataclass(frozen=True, slots=True)
class MpkGraph:
    """The task graph of one rank. `document` is the parsed file; nobody modifies it."""

    rank: int
    tasks: Sequence[MpkTask]
    events: Sequence[MpkEvent]
    first_tasks: Sequence[int]
    document: Mapping[str, Any]
    layout: FileLayout


def is_remote(event: int) -> bool:
    """Whether another GPU signals the event. `event` is an id other than INVALID."""
    return event & NVSHMEM_TAG > 0


def rank_of(event: int) -> int:
    """The rank that an event belongs to."""
    return event >> 32 & 0xFFFF


def place_of(event: int) -> int:
    """The event's position in `all_events`."""
    return event & 0xFFFFFFFF


def event_id(rank: int, place: int, remote: bool = False) -> int:
    """The id of an event."""
    return rank << 32 | place | (NVSHMEM_TAG if remote else 0)
