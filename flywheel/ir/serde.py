"""Programs as JSON, and back. The input may come from a stranger. Source: docs/ir.md."""

from __future__ import annotations

import json
import marshal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, TypeVar

from flywheel.errors import IrFormatError
from flywheel.ir.config import config_from_dict, config_to_dict
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
from flywheel.ir.files import MAX_FILE_BYTES, dump_json, parse_json, read_text, write_atomically
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Counter, Page, PageAllocation, Task, Wait
from flywheel.ir.runs import Run, Runs, task_of
from flywheel.ir.show import show
from flywheel.ir.target import GpuTarget
from flywheel.ir.tiles import stretches_of
from flywheel.ir.version import ABI_VERSION, IR_VERSION

_T = TypeVar("_T")

_PIECE: Final = 1 << 12
"""Records of a piece of a program's text."""


def program_to_json(program: MegakernelProgram, indent: int | None = 2) -> str:
    """The on-disk format. The same program always gives the same text."""
    return "".join(program_pieces(program)) if indent == 2 else dump_json(program_to_dict(program), indent)


def program_pieces(program: MegakernelProgram) -> Iterator[str]:
    """The text of `program_to_json`, piece by piece. Python's json takes ten times as long for it, and ten times the
    memory of the text.

    Raises IrFormatError, at once, for a program whose text would be larger than a file that is read.
    """
    texts = _Texts()
    if isinstance(program.tasks, Runs):
        nbytes = _bytes_of(program.tasks, texts)
        if nbytes > MAX_FILE_BYTES:
            raise IrFormatError(
                f"program: its {len(program.tasks):,} tasks would take {nbytes:,} bytes of JSON, more than "
                f"{MAX_FILE_BYTES:,}"
            )
    return _pieces(program, texts)


def _pieces(program: MegakernelProgram, texts: _Texts) -> Iterator[str]:
    tables: dict[str, tuple[Sequence[Any], Callable[[Any], str]]] = {
        "buffers": (program.buffers, texts.buffer),
        "counters": (program.counters, texts.counter),
        "tasks": (program.tasks, texts.task),
    }
    start = "{\n  "
    for name, value in program_to_dict(replace(program, buffers=(), counters=(), tasks=())).items():
        yield f'{start}"{name}": '
        start = ",\n  "
        if name in tables:
            yield from _table(*tables[name])
        else:
            yield dump_json(value).replace("\n", "\n  ")
    yield "\n}"


def _table(records: Sequence[Any], text: Callable[[Any], str]) -> Iterator[str]:
    start = "["
    for first in range(0, len(records), _PIECE):
        yield start + ",".join(map(text, records[first : first + _PIECE]))
        start = ","
    yield "\n  ]" if len(records) else "[]"


def _bytes_of(tasks: Runs, texts: _Texts) -> int:
    """Bytes of the text of all tasks, as far as they follow from the first tile of each stretch."""

    def taken(runs: Sequence[Run]) -> int:
        return sum(
            len(texts.task(task_of(run, each, 0, 0))) * getattr(each, "n_tiles", 1)
            for run in runs
            for each in stretches_of(run.tiles)
        )

    layers = tasks.layers
    further = 0 if layers is None else (layers.times - 1) * taken(tasks.spelled[layers.runs.start : layers.runs.stop])
    return taken(tasks.spelled) + further


class _Texts:
    """Texts of records. What tasks share, such as recipes, operands and waits, becomes text once."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[object, str]] = {}

    def buffer(self, buffer: Buffer) -> str:
        """A buffer, as _buffer_to_dict has it."""
        kept = {name: getattr(buffer, name) for name in ("shape", "part") if getattr(buffer, name) is not None}
        return self._record(_buffer_to_dict(buffer) | kept)

    def counter(self, counter: Counter) -> str:
        """A counter."""
        return self._record({"id": counter.id, "init": counter.init, "note": counter.note})

    def task(self, task: Task) -> str:
        """A task, as _task_to_dict has it."""
        params = task.params
        if params and set(map(type, params)) == {str}:
            inner = ",".join([f"\n        {json.dumps(name)}: {self._value(params[name], 8)}" for name in params])
            made = f"{{{inner}\n      }}"
        else:
            made = dump_json(dict(params)).replace("\n", "\n      ")
        rank = f',\n      "rank": {self._value(task.rank, 6)}' if task.rank else ""
        return (
            f'\n    {{\n      "id": {self._value(task.id, 6)},\n      "op": "{task.op.name}",\n'
            f'      "inputs": {self._value(task.inputs, 6)},\n      "outputs": {self._value(task.outputs, 6)},\n'
            f'      "out_counter": {self._value(task.out_counter, 6)},\n      "waits": {self._value(task.waits, 6)},\n'
            f'      "params": {made},\n      "sm": {self._value(task.sm, 6)},\n'
            f'      "est_bytes": {self._value(task.est_bytes, 6)},\n'
            f'      "est_flops": {self._value(task.est_flops, 6)},\n'
            f'      "label": {self._value(task.label, 6)}{rank}\n    }}'
        )

    def _record(self, fields: Mapping[str, Any]) -> str:
        lines = ",\n      ".join([f'"{name}": {self._value(value, 6)}' for name, value in fields.items()])
        return f"\n    {{\n      {lines}\n    }}"

    def _value(self, value: object, depth: int) -> str:
        """The text of a value `depth` columns deep."""
        if type(value) is int:
            return str(value)
        if not isinstance(value, dict | Sequence) or isinstance(value, str):
            return json.dumps(value)
        key = id(value), " " * depth
        if key not in self._known:
            plain = [_wait_to_dict(each) if isinstance(each, Wait) else each for each in value]
            text = dump_json(value if isinstance(value, dict) else plain).replace("\n", f"\n{' ' * depth}")
            self._known[key] = value, text  # the value lives on, so that no other value gets its id
        return self._known[key][1]


def program_from_json(text: str | bytes) -> MegakernelProgram:
    """Read a program from JSON text. Raises IrFormatError."""
    return program_from_dict(parse_json(text))


def save_program(program: MegakernelProgram, path: str | Path) -> None:
    """Write the JSON to `path`, replacing it atomically. Raises OSError."""
    write_atomically(Path(path), chain(program_pieces(program), "\n"))


def load_program(path: str | Path) -> MegakernelProgram:
    """Read a program file. Raises IrFormatError that names the file, also where the file is unreadable."""
    text = read_text(Path(path))
    try:
        return program_from_json(text)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None


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
        "config": None if program.config is None else config_to_dict(program.config),
        **({} if program.ranks == 1 else {"ranks": program.ranks}),
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
        **_rank(buffer),
        **({} if buffer.part is None else {"part": list(buffer.part)}),
    }


def _rank(record: Buffer | Task) -> dict[str, int]:
    """The field `rank`, which is written where it is not 0. So programs of one rank have no such field."""
    return {"rank": record.rank} if record.rank else {}


def _task_to_dict(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "op": task.op.name,
        "inputs": list(task.inputs),
        "outputs": list(task.outputs),
        "out_counter": task.out_counter,
        "waits": [_wait_to_dict(wait) for wait in task.waits],
        "params": dict(task.params),
        "sm": task.sm,
        "est_bytes": task.est_bytes,
        "est_flops": task.est_flops,
        "label": task.label,
        **_rank(task),
    }


def _wait_to_dict(wait: Wait) -> dict[str, int]:
    return {"counter": wait.counter, "threshold": wait.threshold}


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
    """Makes equal operands, waits and recipes of a file one object. Validation checks each object once."""

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
            except ValueError:  # nested too deeply, or not from JSON: kept as it is
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
        params=read_dict(data.get("params", {}), where, "params"),
        sm=None if sm is None else read_int(sm, where, "sm"),
        est_bytes=read_estimate(data.get("est_bytes", 0), where, "est_bytes"),
        est_flops=read_estimate(data.get("est_flops", 0), where, "est_flops"),
        label=read_str(data.get("label", ""), where, "label"),
        rank=read_int(data.get("rank", 0), where, "rank"),
    )


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
