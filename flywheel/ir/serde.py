"""Reading and writing the on-disk JSON. Everything read here may come from a stranger. Source: docs/ir.md."""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import MISSING, fields, replace
from enum import IntEnum
from math import isfinite
from pathlib import Path
from stat import S_IMODE, S_ISREG
from typing import Any, TypeVar
from uuid import uuid4

from flywheel.errors import IrFormatError
from flywheel.ir.config import ScheduleConfig
from flywheel.ir.dtype import BufferKind, DType, MemSpace
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Counter, Page, PageAllocation, Task, Wait
from flywheel.ir.show import one_line, show
from flywheel.ir.target import GpuTarget
from flywheel.ir.version import ABI_VERSION, IR_VERSION

_E = TypeVar("_E", bound=IntEnum)
_T = TypeVar("_T")


def dump_json(data: object, indent: int | None = 2) -> str:
    """JSON text with insertion order kept; NaN and infinities are written as Python's json does."""
    return json.dumps(data, indent=indent, separators=(",", ": ") if indent else (",", ":"))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises IrFormatError on malformed, non-UTF-8 or absurdly nested text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise IrFormatError("JSON: nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, integers beyond Python's digit limit
        raise IrFormatError(f"JSON: {str(error).splitlines()[0]}") from None


def read_text(path: Path) -> str:
    """Text of a file. Raises IrFormatError where it cannot be read as UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise IrFormatError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise IrFormatError(f"{path}: not UTF-8 at byte {error.start}") from None
    except ValueError as error:  # a NUL in the path
        raise IrFormatError(f"{str(path)!r}: {error}") from None


def read_program(path: Path) -> MegakernelProgram:
    """Read a program file. Raises IrFormatError that names the file."""
    text = read_text(path)
    try:
        return MegakernelProgram.from_json(text)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to a temporary file beside the one that `path` leads to, then rename it into place; the mode stays.

    What is there but no regular file, as a device or a pipe, is written to instead. Raises OSError.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not S_ISREG(mode):
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
        return
    place = path.resolve()
    draft = place.with_name(f".{place.name}.{uuid4().hex}")
    with ExitStack() as undo:
        undo.callback(draft.unlink, missing_ok=True)
        with draft.open("x", encoding="utf-8") as file:
            if mode is not None:
                draft.chmod(S_IMODE(mode))
            file.write(text)
        draft.replace(place)


def program_to_dict(program: MegakernelProgram) -> dict[str, Any]:
    """JSON-ready dict of a program, enums by name."""
    pages = program.pages
    return {
        "ir_version": program.ir_version,
        "abi_version": program.abi_version,
        "meta": dict(program.meta),
        "target": None if program.target is None else target_to_dict(program.target),
        "buffers": [_buffer_to_dict(buffer) for buffer in program.buffers],
        "counters": [{"id": c.id, "init": c.init, "note": c.note} for c in program.counters],
        "tasks": [_task_to_dict(task) for task in program.tasks],
        "pages": None if pages is None else _pages_to_dict(pages),
        "config": None if program.config is None else program.config.to_dict(),
    }


def target_to_dict(target: GpuTarget) -> dict[str, Any]:
    """JSON-ready dict of a GPU, in field order."""
    return {field.name: getattr(target, field.name) for field in fields(target)}


def _buffer_to_dict(buffer: Buffer) -> dict[str, Any]:
    return {
        "id": buffer.id,
        "name": buffer.name,
        "kind": buffer.kind.name,
        "dtype": buffer.dtype.name,
        "shape": list(buffer.shape),
        "space": buffer.space.name,
        "source": buffer.source,
    }


def _task_to_dict(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "op": task.op.name,
        "inputs": list(task.inputs),
        "outputs": list(task.outputs),
        "out_counter": task.out_counter,
        "waits": [{"counter": wait.counter, "threshold": wait.threshold} for wait in task.waits],
        "params": dict(task.params),
        "sm": task.sm,
        "est_bytes": task.est_bytes,
        "est_flops": task.est_flops,
        "label": task.label,
    }


def _pages_to_dict(pages: PageAllocation) -> dict[str, Any]:
    return {
        "buffer_to_page": {str(buffer): page for buffer, page in pages.buffer_to_page.items()},
        "pages": [
            {
                "id": page.id,
                "space": page.space.name,
                "nbytes": page.nbytes,
                "live_start": page.live_start,
                "live_end": page.live_end,
            }
            for page in pages.pages
        ],
    }


def program_from_dict(data: object) -> MegakernelProgram:
    """Read a program, dropping unknown fields. Raises IrFormatError."""
    root = _dict(data, "program")
    version = _str(_get(root, "ir_version", "program"), "ir_version")
    if version.split(".")[0] != IR_VERSION.split(".")[0]:
        raise IrFormatError(f"ir_version {show(version)}: major version differs from {IR_VERSION}")
    target, pages, config = root.get("target"), root.get("pages"), root.get("config")
    return MegakernelProgram(
        meta=_dict(root.get("meta", {}), "meta"),
        target=None if target is None else target_from_dict(target),
        buffers=_records(root, "buffers", _buffer),
        counters=_records(root, "counters", _counter),
        tasks=_records(root, "tasks", _Shared().task),
        pages=None if pages is None else _pages(pages),
        config=None if config is None else config_from_dict(config),
        ir_version=version,
        abi_version=_str(root.get("abi_version", ABI_VERSION), "abi_version"),
    )


def target_from_dict(data: object) -> GpuTarget:
    """Read a GPU record, dropping unknown fields. Raises IrFormatError."""
    root = _dict(data, "target")
    readers: dict[str, Callable[[object, str], Any]] = {
        "str": _str,
        "int": _int,
        "float": _number,
        "bool": _bool,
    }
    values = {}
    for field in fields(GpuTarget):
        if field.name in root:
            values[field.name] = readers[str(field.type)](root[field.name], f"target.{field.name}")
        elif field.default is MISSING:
            raise IrFormatError(f"target: no {field.name!r}")
    return GpuTarget(**values)


def config_from_dict(data: object) -> ScheduleConfig:
    """Read a schedule config, dropping unknown fields; absent fields take their defaults. Raises IrFormatError."""
    root = _dict(data, "config")
    default = ScheduleConfig()
    tiling = {
        op: {
            name: _int(size, f"config.tiling.{op}.{name}") for name, size in _dict(tiles, f"config.tiling.{op}").items()
        }
        for op, tiles in _dict(root.get("tiling", {}), "config.tiling").items()
    }
    grouping = tuple(
        tuple(_str(name, "config.fusion_grouping") for name in _list(group, "config.fusion_grouping"))
        for group in _list(root.get("fusion_grouping", []), "config.fusion_grouping")
    )
    assignment = root.get("sm_assignment", default.sm_assignment)
    if not isinstance(assignment, str):
        assignment = _int_map(assignment, "config.sm_assignment")

    def whole(name: str) -> int:
        return _int(root.get(name, getattr(default, name)), f"config.{name}")

    return ScheduleConfig(
        tiling=tiling,
        fusion_grouping=grouping,
        sm_assignment=assignment,
        pipelining_depth=whole("pipelining_depth"),
        page_allocation=_str(root.get("page_allocation", default.page_allocation), "config.page_allocation"),
        threads_per_block=whole("threads_per_block"),
        smem_bytes_per_block=whole("smem_bytes_per_block"),
    )


class _Shared:
    """Equal operands, waits and recipes of a file as one object: validation decides once for each object."""

    __slots__ = ("_ints", "_recipes", "_waits")

    def __init__(self) -> None:
        self._ints: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._waits: dict[tuple[Wait, ...], tuple[Wait, ...]] = {}
        self._recipes: dict[bytes, Any] = {}

    def task(self, data: Mapping[str, Any], where: str) -> Task:
        """Read a task."""
        task = _task(data, where)
        params = task.params
        if "recipe" in params:
            try:
                key = marshal.dumps(params["recipe"], 2)
            except ValueError:  # nested too deeply, or not from JSON: left alone
                pass
            else:
                params = {**params, "recipe": self._recipes.setdefault(key, params["recipe"])}
        return replace(
            task,
            inputs=self._ints.setdefault(tuple(task.inputs), tuple(task.inputs)),
            outputs=self._ints.setdefault(tuple(task.outputs), tuple(task.outputs)),
            waits=self._waits.setdefault(tuple(task.waits), tuple(task.waits)),
            params=params,
        )


def _buffer(data: Mapping[str, Any], where: str) -> Buffer:
    source = data.get("source")
    return Buffer(
        id=_int(_get(data, "id", where), where, "id"),
        name=_str(_get(data, "name", where), where, "name"),
        kind=_enum(BufferKind, _get(data, "kind", where), where, "kind"),
        dtype=_enum(DType, _get(data, "dtype", where), where, "dtype"),
        shape=_ints(_get(data, "shape", where), where, "shape"),
        space=_enum(MemSpace, data.get("space", "HBM"), where, "space"),
        source=None if source is None else _str(source, where, "source"),
    )


def _counter(data: Mapping[str, Any], where: str) -> Counter:
    return Counter(
        id=_int(_get(data, "id", where), where, "id"),
        init=_int(data.get("init", 0), where, "init"),
        note=_str(data.get("note", ""), where, "note"),
    )


def _task(data: Mapping[str, Any], where: str) -> Task:
    sm = data.get("sm")
    return Task(
        id=_int(_get(data, "id", where), where, "id"),
        op=_enum(InstructionKind, _get(data, "op", where), where, "op"),
        inputs=_ints(_get(data, "inputs", where), where, "inputs"),
        outputs=_ints(_get(data, "outputs", where), where, "outputs"),
        out_counter=_int(_get(data, "out_counter", where), where, "out_counter"),
        waits=tuple(_wait(wait, where) for wait in _list(data.get("waits", []), where, "waits")),
        params=_dict(data.get("params", {}), where, "params"),
        sm=None if sm is None else _int(sm, where, "sm"),
        est_bytes=_estimate(data.get("est_bytes", 0), where, "est_bytes"),
        est_flops=_estimate(data.get("est_flops", 0), where, "est_flops"),
        label=_str(data.get("label", ""), where, "label"),
    )


def _wait(data: object, where: str) -> Wait:
    wait = _dict(data, where, "waits")
    return Wait(
        _int(_get(wait, "counter", where), where, "waits.counter"),
        _int(_get(wait, "threshold", where), where, "waits.threshold"),
    )


def _pages(data: object) -> PageAllocation:
    root = _dict(data, "pages")
    return PageAllocation(
        buffer_to_page=_int_map(_get(root, "buffer_to_page", "pages"), "pages.buffer_to_page"),
        pages=_records(root, "pages", _page),
    )


def _page(data: Mapping[str, Any], where: str) -> Page:
    return Page(
        id=_int(_get(data, "id", where), where, "id"),
        space=_enum(MemSpace, _get(data, "space", where), where, "space"),
        nbytes=_int(_get(data, "nbytes", where), where, "nbytes"),
        live_start=_int(data.get("live_start", -1), where, "live_start"),
        live_end=_int(data.get("live_end", -1), where, "live_end"),
    )


def _records(root: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any], str], _T]) -> tuple[_T, ...]:
    items = _list(_get(root, name, "program"), name)
    return tuple(read(_dict(item, f"{name}[{index}]"), f"{name}[{index}]") for index, item in enumerate(items))


def _wrong(value: object, wanted: str, where: str, field: str) -> IrFormatError:
    place = f"{where}.{field}" if field else where
    return IrFormatError(one_line(f"{place}: expected {wanted}, got {show(value)}"))


def _get(data: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise IrFormatError(one_line(f"{where}: no {key!r}"))
    return data[key]


def _int(value: object, where: str, field: str = "") -> int:
    if type(value) is not int:
        raise _wrong(value, "an integer", where, field)
    return value


def _number(value: object, where: str, field: str = "") -> float:
    if type(value) is int or (type(value) is float and isfinite(value)):
        return value
    raise _wrong(value, "a finite number", where, field)


def _estimate(value: object, where: str, field: str) -> int:
    return value if type(value) is int else int(_number(value, where, field))


def _bool(value: object, where: str, field: str = "") -> bool:
    if not isinstance(value, bool):
        raise _wrong(value, "true or false", where, field)
    return value


def _str(value: object, where: str, field: str = "") -> str:
    if not isinstance(value, str):
        raise _wrong(value, "a string", where, field)
    return value


def _list(value: object, where: str, field: str = "") -> list[Any]:
    if not isinstance(value, list | tuple):
        raise _wrong(value, "a list", where, field)
    return list(value)


def _dict(value: object, where: str, field: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _wrong(value, "an object", where, field)
    for key in value:
        if type(key) is not str:
            raise _wrong(key, "a string key", where, field)
    return value


def _ints(value: object, where: str, field: str) -> tuple[int, ...]:
    return tuple([_int(item, where, field) for item in _list(value, where, field)])


def _int_map(value: object, where: str) -> dict[int, int]:
    result = {}
    for key, item in _dict(value, where).items():
        if not key.isascii() or not key.isdigit() or len(key) > 19 or str(int(key)) != key:
            raise _wrong(key, "an integer key", where, "")
        result[int(key)] = _int(item, where, key)
    return result


def _enum(kind: type[_E], value: object, where: str, field: str) -> _E:
    member = kind.__members__.get(value) if isinstance(value, str) else None
    if member is None:
        raise _wrong(value, f"a {kind.__name__} name", where, field)
    return member
