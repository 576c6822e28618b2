"""Types, ids and references. After this pass every field has the type that its annotation says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from math import isfinite
from typing import Any

from flywheel.ir.config import ScheduleConfig
from flywheel.ir.dtype import BufferKind, DType, MemSpace
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Counter, Page, PageAllocation, Task, Wait
from flywheel.ir.target import GpuTarget
from flywheel.ir.validate.findings import MAX_FINDINGS, Findings
from flywheel.ir.version import ABI_MAX_RANK


def check_structure(program: object, findings: Findings) -> bool:
    """Whether the later passes may rely on the types of `program`."""
    if not isinstance(program, MegakernelProgram):
        findings.error("not-a-program", f"expected a MegakernelProgram, got {type(program).__name__}")
        return False
    for name, kind in (("buffers", Buffer), ("counters", Counter), ("tasks", Task)):
        if not _records(getattr(program, name), kind, name, findings):
            return False
    _header(program, findings)
    for buffer in program.buffers:
        _buffer(buffer, findings)
    for counter in program.counters:
        if not _whole(counter.init) or counter.init != 0:
            findings.error("counter-init", f"counter {counter.id}: init={_show(counter.init)} is not 0")
    for task in program.tasks:
        _task(task, findings)
        if findings.full:
            break
    if not findings.errors:
        for name, records in (("buffer", program.buffers), ("counter", program.counters), ("task", program.tasks)):
            _ids(name, records, findings)
    if not findings.errors and program.pages is not None:
        _ids("page", program.pages.pages, findings)
    return not findings.errors


def _header(program: MegakernelProgram, findings: Findings) -> None:
    if not isinstance(program.meta, Mapping):
        findings.error("not-a-program", f"meta: expected an object, got {_show(program.meta)}")
    if program.config is not None and not isinstance(program.config, ScheduleConfig):
        findings.error("not-a-program", f"config: expected a ScheduleConfig, got {_show(program.config)}")
    target = program.target
    if target is not None and not (isinstance(target, GpuTarget) and _whole(target.num_sms) and target.num_sms > 0):
        findings.error("not-a-program", f"target: expected a GpuTarget with a positive num_sms, got {_show(target)}")
    pages = program.pages
    if pages is None:
        return
    if not isinstance(pages, PageAllocation) or not isinstance(pages.buffer_to_page, Mapping):
        findings.error("not-a-program", f"pages: expected a PageAllocation, got {_show(pages)}")
        return
    if not _records(pages.pages, Page, "pages", findings):
        return
    if not all(_whole(number) for pair in pages.buffer_to_page.items() for number in pair):
        findings.error("bad-page", "pages.buffer_to_page: an id is not an int")
    for page in pages.pages:
        if not _member(page.space, MemSpace) or not _whole(page.nbytes) or page.nbytes <= 0:
            findings.error("bad-page", f"page {_show(page.id)}: space {_show(page.space)}, {_show(page.nbytes)} bytes")


def _buffer(buffer: Buffer, findings: Findings) -> None:
    name = f"buffer {_show(buffer.id)} ({_show(buffer.name)})"
    for value, kind in ((buffer.kind, BufferKind), (buffer.dtype, DType), (buffer.space, MemSpace)):
        if not _member(value, kind):
            findings.error("bad-enum", f"{name}: {_show(value)} is not a {kind.__name__}")
    shape = buffer.shape
    if not _sequence(shape) or not all(_whole(dim) and dim > 0 for dim in shape):
        findings.error("bad-shape", f"{name}: shape {_show(shape)} is not made of positive ints")
    elif not 1 <= len(shape) <= ABI_MAX_RANK:
        findings.error("bad-shape", f"{name}: rank {len(shape)} is not in 1..{ABI_MAX_RANK}")


def _task(task: Task, findings: Findings) -> None:
    if type(task.op) is not InstructionKind:
        findings.error("bad-enum", f"task {_show(task.id)}: op {_show(task.op)} is not an InstructionKind", _id(task))
    inputs, outputs, waits = task.inputs, task.outputs, task.waits
    if not (_sequence(inputs) and _sequence(outputs) and all(map(_whole, inputs)) and all(map(_whole, outputs))):
        findings.error("not-a-program", f"task {_show(task.id)}: inputs and outputs must be lists of ints", _id(task))
    if not (_sequence(waits) and all(map(_wait, waits))):
        findings.error("not-a-program", f"task {_show(task.id)}: waits must be a list of Wait", _id(task))
    if not isinstance(task.params, Mapping):
        findings.error("not-a-program", f"task {_show(task.id)}: params must be an object", _id(task))
    if type(task.out_counter) is not int:
        findings.error("not-a-program", f"task {_show(task.id)}: out_counter must be an int", _id(task))
    if task.sm is not None and type(task.sm) is not int:
        findings.error("sm-range", f"task {_show(task.id)}: sm={_show(task.sm)} is not an int", _id(task))
    for name in ("est_bytes", "est_flops"):
        value = getattr(task, name)
        if (type(value) is not int and not (type(value) is float and isfinite(value))) or value < 0:
            findings.error("bad-param", f"task {_show(task.id)}: {name}={_show(value)} is not a count", _id(task))


def _ids(name: str, records: Sequence[Any], findings: Findings) -> None:
    seen: set[int] = set()
    for record in records:
        number = record.id
        if type(number) is not int or number < 0:
            findings.error("bad-id", f"{name} id {_show(number)} is not a non-negative int")
        elif number in seen:
            findings.error("duplicate-id", f"{name} id {number} is used twice", number if name == "task" else None)
        seen.add(number if type(number) is int else -1)
        if len(findings.errors) >= MAX_FINDINGS:
            return


def _records(items: object, kind: type, name: str, findings: Findings) -> bool:
    if not _sequence(items):
        findings.error("not-a-program", f"{name}: expected a list, got {_show(items)}")
        return False
    for index, item in enumerate(items):  # type: ignore[var-annotated,arg-type]
        if type(item) is not kind:
            findings.error("not-a-program", f"{name}[{index}]: expected a {kind.__name__}, got {_show(item)}")
            return False
    return True


def _sequence(value: object) -> bool:
    return type(value) in (tuple, list)


def _whole(value: object) -> bool:
    return type(value) is int


def _wait(value: object) -> bool:
    return type(value) is Wait and type(value.counter) is int and type(value.threshold) is int


def _member(value: object, kind: type[IntEnum]) -> bool:
    return type(value) is kind


def _id(task: Task) -> int | None:
    return task.id if type(task.id) is int else None


def _show(value: object) -> str:
    """`repr` cut to 60 characters, safe for values whose repr fails or does not end."""
    if isinstance(value, int | float | str | None.__class__):
        return repr(value)[:60] if not isinstance(value, int) or value.bit_length() < 1000 else "a huge int"
    if isinstance(value, list | tuple) and len(value) <= 8 and all(isinstance(v, int | str | float) for v in value):
        return "[" + ", ".join(_show(item) for item in value) + "]"
    return f"a {type(value).__name__}"
