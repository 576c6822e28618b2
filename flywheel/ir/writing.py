"""Programs as JSON text. Source: docs/ir.md."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Final

from flywheel.errors import IrFormatError
from flywheel.ir.compressed import Runs, task_of
from flywheel.ir.config import config_to_dict
from flywheel.ir.files import MAX_FILE_BYTES, MAX_VALUES, dump_json, write_atomically
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.recipe import Recipe, recipe_to_dict
from flywheel.ir.records import Buffer, Counter, PageAllocation, Task
from flywheel.ir.target import GpuTarget

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
        nbytes, values = _extent_of(program.tasks, texts)
        where = f"program: its {len(program.tasks):,} tasks would take"
        if nbytes > MAX_FILE_BYTES:
            raise IrFormatError(f"{where} {nbytes:,} bytes of JSON, more than {MAX_FILE_BYTES:,}")
        if values > MAX_VALUES:
            raise IrFormatError(f"{where} {values:,} values of JSON, more than {MAX_VALUES:,}")
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


def _extent_of(tasks: Runs, texts: _Texts) -> tuple[int, int]:
    """The bytes and the values of the text of all tasks, as far as they follow from the first tile of each stretch."""
    layers, nbytes, values = tasks.layers, 0, 0
    for place, run in enumerate(tasks.spelled):
        times = layers.times if layers.runs.start <= place < layers.runs.stop else 1
        for each in run.tiles.stretches:
            text = texts.task(task_of(run, each, 0, 0))
            count = times * each.n_tiles
            nbytes += count * len(text)
            values += count * sum(map(text.count, ",[{"))
    return nbytes, values


_KEPT: Final = 1 << 14
"""Texts of shared values, such as recipes, that are kept. Those of adjacent tasks are the same."""


class _Texts:
    """Texts of records. Recipes, which tasks share, become text once."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[object, str]] = {}

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
            inner = ",".join([f"\n        {self._value(name, 8)}: {self._value(params[name], 8)}" for name in params])
            made = f"{{{inner}\n      }}"
        else:
            made = dump_json({name: _plain(value) for name, value in params.items()}).replace("\n", "\n      ")
        waits = [
            f'{{\n          "counter": {self._value(wait.counter, 10)},\n'
            f'          "threshold": {self._value(wait.threshold, 10)}\n        }}'
            for wait in task.waits
        ]
        rank = f',\n      "rank": {self._value(task.rank, 6)}' if task.rank else ""
        return (
            f'\n    {{\n      "id": {self._value(task.id, 6)},\n      "op": "{task.op.name}",\n'
            f'      "inputs": {self._value(task.inputs, 6)},\n      "outputs": {self._value(task.outputs, 6)},\n'
            f'      "out_counter": {self._value(task.out_counter, 6)},\n      "waits": {_list(waits, 6)},\n'
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
        if isinstance(value, str):
            return encode_basestring_ascii(value)
        if isinstance(value, tuple | list) and set(map(type, value)) <= {int}:
            return _list(map(str, value), depth)
        if not isinstance(value, dict | list | tuple | Recipe):
            return json.dumps(value)
        key = id(value), depth
        if key not in self._known:
            if len(self._known) >= _KEPT:
                self._known.clear()
            text = dump_json(_plain(value)).replace("\n", f"\n{' ' * depth}")
            self._known[key] = value, text  # the value lives on, so that no other value gets its id
        return self._known[key][1]


def _list(texts: Iterable[str], depth: int) -> str:
    """A list of values as text, `depth` columns deep."""
    lines = f",\n{' ' * depth}  ".join(texts)
    return f"[\n{' ' * depth}  {lines}\n{' ' * depth}]" if lines else "[]"


def save_program(program: MegakernelProgram, path: str | Path) -> None:
    """Write the JSON to `path`, replacing it atomically. Raises OSError."""
    write_atomically(Path(path), chain(program_pieces(program), "\n"))


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


def _plain(value: object) -> object:
    return recipe_to_dict(value) if isinstance(value, Recipe) else value


def _task_to_dict(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "op": task.op.name,
        "inputs": list(task.inputs),
        "outputs": list(task.outputs),
        "out_counter": task.out_counter,
        "waits": [{"counter": wait.counter, "threshold": wait.threshold} for wait in task.waits],
        "params": {name: _plain(value) for name, value in task.params.items()},
        "sm": task.sm,
        "est_bytes": task.est_bytes,
        "est_flops": task.est_flops,
        "label": task.label,
        **_rank(task),
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
