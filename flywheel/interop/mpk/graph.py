"""What a task_graph.json says: tasks, tensors and events of one rank; and reading and writing it: a file that was read
is written back byte for byte. Source: docs/mpk.md, "The format"."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from flywheel.errors import IrFormatError
from flywheel.ir.files import parse_json
from flywheel.ir.show import show

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


MAX_INPUTS: Final = 7
MAX_OUTPUTS: Final = 3
MAX_DIMS: Final = 4
"""Most dimensions that the runtime's structs hold. Source: runtime_header.h and config.h of MPK."""

METADATA: Final = ("request_id", "kv_idx", "merge_task_offset", "expert_offset", "task_offset")
"""Fields of a task that only files of 2026 have."""

_TENSOR: Final = ("base_ptr", "offset", "dims", "strides", "data_type")
_TASK: Final = ("task_type", "variant_id", "inputs", "outputs", "trigger_event", "dependent_event")
_EVENT: Final = ("event_type", "num_triggers", "first_task_id", "last_task_id")
_NUMBERS: Final = ("task_type", "variant_id", "trigger_event", "dependent_event")

MAX_INDENT: Final = 16
"""Most spaces of indentation in a written file, so that deep indentation makes no huge file."""

_U64: Final = 1 << 64
_I32: Final = 1 << 31


@dataclass(frozen=True, slots=True)
class _GraphReader:
    """Reads one file, and makes equal tensors only once."""

    tensors: dict[tuple[Any, ...], MpkTensor]

    def task(self, place: int, item: object) -> MpkTask:
        where = f"all_tasks[{place}]"
        found = _object(item, where, _TASK)
        kind, variant, trigger, dependent = (_number(found, name, where, 0, _U64) for name in _NUMBERS)
        inputs = self._operands(found["inputs"], f"{where}.inputs", MAX_INPUTS)
        outputs = self._operands(found["outputs"], f"{where}.outputs", MAX_OUTPUTS)
        present = [name for name in METADATA if name in found]
        if present and len(present) < len(METADATA):
            missing = next(name for name in METADATA if name not in found)
            raise IrFormatError(f"{where}: {present[0]} is there and {missing} is not")
        metadata = tuple(_number(found, name, where, -_I32, _I32) for name in present)
        return MpkTask(kind, variant, inputs, outputs, trigger, dependent, metadata)

    def _operands(self, items: object, where: str, most: int) -> tuple[MpkTensor, ...]:
        if items is None:
            return ()
        if type(items) is not list:
            raise IrFormatError(f"{where}: {show(items)} is not a list")
        if len(items) > most:
            raise IrFormatError(f"{where}: {len(items)} tensors, more than the {most} that a task holds")
        return tuple([self._tensor(item, where, place) for place, item in enumerate(items)])

    def _tensor(self, item: object, where: str, place: int) -> MpkTensor:
        where = f"{where}[{place}]"
        found = _object(item, where, _TENSOR)
        name, dims, strides = found["base_ptr"], found["dims"], found["strides"]
        if type(name) is not str:
            raise IrFormatError(f"{where}: base_ptr {show(name)} is not a string")
        sizes, steps = _sizes(dims, f"{where}.dims"), _sizes(strides, f"{where}.strides")
        if len(sizes) != len(steps):
            raise IrFormatError(f"{where}: {len(sizes)} dims and {len(steps)} strides")
        offset = _number(found, "offset", where, 0, 1 << 62)
        data_type = _number(found, "data_type", where, 0, _I32)
        key = (name, offset, sizes, steps, data_type)
        known = self.tensors.get(key)
        if known is None:
            known = self.tensors[key] = MpkTensor(name, offset, sizes, steps, data_type)
        return known


def read_graph(data: bytes) -> MpkGraph:
    """The graph in a file's bytes. Raises IrFormatError, of one line, where it is no task graph, and nothing else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise IrFormatError(f"not UTF-8 at byte {error.start}") from None
    return graph_of(parse_json(text), _layout(text))


def graph_of(document: object, layout: FileLayout) -> MpkGraph:
    """The graph in a parsed file. Raises IrFormatError where it is no task graph."""
    found = _object(document, "the file", ("all_tasks", "all_events", "first_tasks"))
    items = {name: _list(found[name], name) for name in ("all_tasks", "all_events", "first_tasks")}
    reader = _GraphReader({})
    tasks = tuple([reader.task(place, item) for place, item in enumerate(items["all_tasks"])])
    if len({len(task.metadata) for task in tasks}) > 1:
        raise IrFormatError("all_tasks: some tasks have request_id and others have not")
    events = tuple([_event(place, item) for place, item in enumerate(items["all_events"])])
    first = tuple([_whole(item, f"first_tasks[{place}]", 0, _I32) for place, item in enumerate(items["first_tasks"])])
    return MpkGraph(_rank(tasks), tasks, events, first, found, layout)


def write_graph(document: Mapping[str, Any], layout: FileLayout) -> bytes:
    """The bytes of a graph's file. For a graph that `read_graph` made of a file by MPK or by Python's `json`, they are
    the bytes that were read."""
    separators = (",", ":") if layout.indent is None else (",", ": ")
    text = json.dumps(document, indent=layout.indent, separators=separators, ensure_ascii=False)
    return (text + layout.tail).encode("utf-8", "backslashreplace")


def _rank(tasks: tuple[MpkTask, ...]) -> int:
    if len(tasks) < FIRST_TASK:
        raise IrFormatError(f"all_tasks: {len(tasks)} tasks; the first two end a launch and begin an iteration")
    trigger = tasks[BEGIN_TASK].trigger
    if trigger == INVALID:
        raise IrFormatError("all_tasks[1]: trigger_event is invalid, so nothing begins an iteration")
    return rank_of(trigger)


def _layout(text: str) -> FileLayout:
    body = text.rstrip()
    lines = body.split("\n", 2)
    indent = None if len(lines) == 1 else min(MAX_INDENT, len(lines[1]) - len(lines[1].lstrip(" ")))
    return FileLayout(indent, text[len(body) :])


def _event(place: int, item: object) -> MpkEvent:
    where = f"all_events[{place}]"
    found = _object(item, where, _EVENT)
    kind, triggers, first, last = (_number(found, name, where, 0, _I32) for name in _EVENT)
    return MpkEvent(kind, triggers, first, last)


def _object(item: object, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    if type(item) is not dict:
        raise IrFormatError(f"{where}: {show(item)} is not an object")
    for name in names:
        if name not in item:
            raise IrFormatError(f"{where}: no {name}")
    return item


def _list(item: object, where: str) -> list[Any]:
    if type(item) is not list:
        raise IrFormatError(f"{where}: {show(item)} is not a list")
    return item


def _number(found: Mapping[str, Any], name: str, where: str, low: int, end: int) -> int:
    value = found[name]
    if type(value) is int and low <= value < end:
        return value
    return _whole(value, f"{where}: {name}", low, end)


def _whole(value: object, where: str, low: int, end: int) -> int:
    if type(value) is not int or not low <= value < end:
        raise IrFormatError(f"{where}: {show(value)} is not an int in {low}..{end - 1}")
    return value


def _sizes(items: object, where: str) -> tuple[int, ...]:
    found = _list(items, where)
    if len(found) > MAX_DIMS:
        raise IrFormatError(f"{where}: {len(found)} dims, more than {MAX_DIMS}")
    return tuple([_whole(item, f"{where}[{place}]", 0, _I32) for place, item in enumerate(found)])
