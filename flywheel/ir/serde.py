"""Programs from JSON, which may come from a stranger. Source: docs/ir.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from flywheel.errors import IrFormatError
from flywheel.ir.config import config_from_dict
from flywheel.ir.dtype import BufferKind, DType, MemSpace
from flywheel.ir.fields import (
    read_bool,
    read_dict,
    read_enum,
    read_estimate,
    read_field,
    read_int,
    read_int_map,
    read_ints,
    read_list,
    read_number,
    read_str,
)
from flywheel.ir.files import parse_json, read_text
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.recipe import recipe_from_dict
from flywheel.ir.records import Buffer, Counter, Page, PageAllocation, Task, Wait
from flywheel.ir.show import show
from flywheel.ir.target import GpuTarget
from flywheel.ir.version import ABI_VERSION, IR_VERSION

_T = TypeVar("_T")


def program_from_json(text: str | bytes) -> MegakernelProgram:
    """Read a program from JSON text. Raises IrFormatError."""
    return program_from_dict(parse_json(text))


def load_program(path: str | Path) -> MegakernelProgram:
    """Read a program file. Raises IrFormatError that names the file, also where the file is unreadable."""
    text = read_text(Path(path))
    try:
        return program_from_json(text)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None


def program_from_dict(data: object) -> MegakernelProgram:
    """Read a program, dropping unknown fields. Raises IrFormatError."""
    root = read_dict(data, "program")
    version = read_str(read_field(root, "ir_version", "program"), "ir_version")
    if version.split(".")[0] != IR_VERSION.split(".")[0]:
        raise IrFormatError(f"ir_version {show(version)}: major version differs from {IR_VERSION}")
    target, pages, config = root.get("target"), root.get("pages"), root.get("config")
    return MegakernelProgram(
        meta=read_dict(root.get("meta", {}), "meta"),
        target=None if target is None else target_from_dict(target),
        buffers=_records(root, "buffers", _buffer),
        counters=_records(root, "counters", _counter),
        tasks=_records(root, "tasks", _Shared().task),
        pages=None if pages is None else _pages(pages),
        config=None if config is None else config_from_dict(config),
        ir_version=version,
        abi_version=read_str(root.get("abi_version", ABI_VERSION), "abi_version"),
        ranks=read_int(root.get("ranks", 1), "ranks"),
    )


def target_from_dict(data: object) -> GpuTarget:
    """Read a GPU record, dropping unknown fields. Raises IrFormatError."""
    root = read_dict(data, "target")
    readers: dict[str, Callable[[object, str], Any]] = {
        "str": read_str,
        "int": read_int,
        "float": read_number,
        "bool": read_bool,
    }
    values = {}
    for field in fields(GpuTarget):
        if field.name in root:
            values[field.name] = readers[str(field.type)](root[field.name], f"target.{field.name}")
        elif field.default is MISSING:
            raise IrFormatError(f"target: {field.name!r} is missing")
    return GpuTarget(**values)


class _Shared:
    """Makes equal operands and waits of a file one object. Validation checks each object once."""

    __slots__ = ("_ints", "_waits")

    def __init__(self) -> None:
        self._ints: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._waits: dict[tuple[Wait, ...], tuple[Wait, ...]] = {}

    def task(self, data: Mapping[str, Any], where: str) -> Task:
        """Read a task."""
        task = _task(data, where)
        return replace(
            task,
            inputs=self._ints.setdefault(tuple(task.inputs), tuple(task.inputs)),
            outputs=self._ints.setdefault(tuple(task.outputs), tuple(task.outputs)),
            waits=self._waits.setdefault(tuple(task.waits), tuple(task.waits)),
        )


def _buffer(data: Mapping[str, Any], where: str) -> Buffer:
    source = data.get("source")
    return Buffer(
        id=read_int(read_field(data, "id", where), where, "id"),
        name=read_str(read_field(data, "name", where), where, "name"),
        kind=read_enum(BufferKind, read_field(data, "kind", where), where, "kind"),
        dtype=read_enum(DType, read_field(data, "dtype", where), where, "dtype"),
        shape=read_ints(read_field(data, "shape", where), where, "shape"),
        space=read_enum(MemSpace, data.get("space", "HBM"), where, "space"),
        source=None if source is None else read_str(source, where, "source"),
        rank=read_int(data.get("rank", 0), where, "rank"),
        part=None if data.get("part") is None else _part(data["part"], where),
    )


def _part(data: object, where: str) -> tuple[int, int]:
    found = read_ints(data, where, "part")
    if len(found) != 2:
        raise IrFormatError(f"{where}.part: expected [axis, first], got {show(data)}")
    return found[0], found[1]


def _counter(data: Mapping[str, Any], where: str) -> Counter:
    return Counter(
        id=read_int(read_field(data, "id", where), where, "id"),
        init=read_int(data.get("init", 0), where, "init"),
        note=read_str(data.get("note", ""), where, "note"),
    )


def _task(data: Mapping[str, Any], where: str) -> Task:
    sm = data.get("sm")
    return Task(
        id=read_int(read_field(data, "id", where), where, "id"),
        op=read_enum(InstructionKind, read_field(data, "op", where), where, "op"),
        inputs=read_ints(read_field(data, "inputs", where), where, "inputs"),
        outputs=read_ints(read_field(data, "outputs", where), where, "outputs"),
        out_counter=read_int(read_field(data, "out_counter", where), where, "out_counter"),
        waits=tuple(_wait(wait, where) for wait in read_list(data.get("waits", []), where, "waits")),
        params=_params(read_dict(data.get("params", {}), where, "params"), where),
        sm=None if sm is None else read_int(sm, where, "sm"),
        est_bytes=read_estimate(data.get("est_bytes", 0), where, "est_bytes"),
        est_flops=read_estimate(data.get("est_flops", 0), where, "est_flops"),
        label=read_str(data.get("label", ""), where, "label"),
        rank=read_int(data.get("rank", 0), where, "rank"),
    )


def _params(params: dict[str, Any], where: str) -> dict[str, Any]:
    """A recipe is read as one whatever the opcode, since equal recipes are told by their object."""
    if "recipe" not in params:
        return params
    return {**params, "recipe": recipe_from_dict(params["recipe"], f"{where}.params.recipe")}


def _wait(data: object, where: str) -> Wait:
    wait = read_dict(data, where, "waits")
    return Wait(
        read_int(read_field(wait, "counter", where), where, "waits.counter"),
        read_int(read_field(wait, "threshold", where), where, "waits.threshold"),
    )


def _pages(data: object) -> PageAllocation:
    root = read_dict(data, "pages")
    return PageAllocation(
        buffer_to_page=read_int_map(read_field(root, "buffer_to_page", "pages"), "pages.buffer_to_page"),
        pages=_records(root, "pages", _page),
    )


def _page(data: Mapping[str, Any], where: str) -> Page:
    return Page(
        id=read_int(read_field(data, "id", where), where, "id"),
        space=read_enum(MemSpace, read_field(data, "space", where), where, "space"),
        nbytes=read_int(read_field(data, "nbytes", where), where, "nbytes"),
        live_start=read_int(data.get("live_start", -1), where, "live_start"),
        live_end=read_int(data.get("live_end", -1), where, "live_end"),
    )


def _records(root: Mapping[str, Any], name: str, read: Callable[[Mapping[str, Any], str], _T]) -> tuple[_T, ...]:
    items = read_list(read_field(root, name, "program"), name)
    return tuple(read(read_dict(item, f"{name}[{index}]"), f"{name}[{index}]") for index, item in enumerate(items))
