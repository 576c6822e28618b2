"""The identity of a program: what it computes and how, without names, provenance or the config that led to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Task
from flywheel.ir.variant import variant_of

_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def program_id(program: MegakernelProgram) -> str:
    """First 16 hex digits of a SHA-256 over target, kernel variant, buffers, pages and tasks, by value.

    Equal for two configs that lower to the same program and the same kernel, and for a program and its copy from a
    file. Raises ConfigError as `variant_of` does.
    """
    target, pages = program.target, program.pages
    lines = [
        f"{program.ir_version} {target.name if target else None!r} {variant_of(program)!r}",
        *(f"{b.id} {b.kind:d} {b.dtype:d} {tuple(b.shape)} {b.space:d} {b.source!r}" for b in program.buffers),
    ]
    if pages is not None:
        lines.append(repr(sorted(pages.buffer_to_page.items())))
        lines.extend(f"{page.id} {page.space:d} {page.nbytes}" for page in pages.pages)
    lines.extend(_task_lines(program.tasks))
    return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _task_lines(tasks: Sequence[Task]) -> Iterator[str]:
    """Tables of distinct params, operands and waits, then a line for each run of tasks that share all but params."""
    recipes: dict[int, str] = {}  # identity of a recipe, which the tiles of a projection share -> its digest

    def params_text(params: Any) -> str:
        recipe = params.get("recipe")
        if recipe is None:
            return _json(params)
        if id(recipe) not in recipes:
            recipes[id(recipe)] = hashlib.sha256(_json(recipe).encode()).hexdigest()
        return _json({**params, "recipe": recipes[id(recipe)]})

    params, texts = _numbered([task.params for task in tasks], params_text)
    yield from texts
    inputs, texts = _numbered([task.inputs for task in tasks], _ints)
    yield from texts
    outputs, texts = _numbered([task.outputs for task in tasks], _ints)
    yield from texts
    waits, texts = _numbered([task.waits for task in tasks], _waits)
    yield from texts
    ops, counters = [int(task.op) for task in tasks], [task.out_counter for task in tasks]
    first = 0
    for key, run in groupby(zip(ops, inputs, outputs, counters, waits, strict=True)):
        last = first + sum(1 for _ in run)
        some = tasks[first:last]
        yield f"{key} {[task.id for task in some]} {params[first:last]} {[task.sm for task in some]}"
        first = last


def _numbered(parts: Sequence[Any], text: Callable[[Any], str]) -> tuple[list[int], list[str]]:
    """The number of each part and the texts by number; equal parts have one number, shared ones are read once."""
    texts: dict[str, int] = {}
    identities = list(map(id, parts))
    numbers = {
        identity: texts.setdefault(text(part), len(texts))
        for identity, part in dict(zip(identities, parts, strict=True)).items()
    }
    return list(map(numbers.__getitem__, identities)), list(texts)


def _ints(numbers: Any) -> str:
    return ",".join(map(str, numbers))


def _waits(waits: Any) -> str:
    return ",".join(f"{wait.counter}>={wait.threshold}" for wait in waits)
