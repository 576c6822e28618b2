"""The identity of a program: what it computes and how, without names, provenance or the config that led to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import groupby

from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Task
from flywheel.ir.variant import variant_of


def program_id(program: MegakernelProgram) -> str:
    """First 16 hex digits of a SHA-256 over target, kernel variant, buffers, pages and tasks.

    Equal for two configs that lower to the same program and the same kernel. Raises ConfigError as `variant_of` does.
    """
    target, pages = program.target, program.pages
    lines = [
        f"{program.ir_version} {target.name if target else None} {variant_of(program)!r}",
        *(f"{b.id} {b.kind:d} {b.dtype:d} {tuple(b.shape)} {b.space:d} {b.source}" for b in program.buffers),
    ]
    if pages is not None:
        lines.append(repr(sorted(pages.buffer_to_page.items())))
        lines.extend(f"{page.id} {page.space:d} {page.nbytes}" for page in pages.pages)
    lines.extend(_task_lines(program.tasks))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _task_lines(tasks: Sequence[Task]) -> Iterator[str]:
    """One line for all tasks that are neighbours and share everything but id, params and SM: the tiles of a projection."""
    texts: dict[str, int] = {}  # text of a params record -> its number
    recipes: dict[int, int] = {}  # identity of a recipe, which tiles share -> number of its text
    numbers: dict[int, int] = {}  # identity of a params record -> number of its text
    for own, record in {id(task.params): task.params for task in tasks}.items():
        plain = dict(record)
        recipe = plain.pop("recipe", None)
        if recipe is not None:
            if id(recipe) not in recipes:
                recipes[id(recipe)] = texts.setdefault(repr(recipe), len(texts))
            plain["recipe"] = recipes[id(recipe)]
        numbers[own] = texts.setdefault(repr(sorted(plain.items())), len(texts))
    yield from texts
    owns = [id(task.params) for task in tasks]
    keys = [(task.op, id(task.inputs), id(task.outputs), task.out_counter, id(task.waits)) for task in tasks]
    first = 0
    for _, run in groupby(keys):
        last = first + sum(1 for _ in run)
        some = tasks[first:last]
        params = [numbers[own] for own in owns[first:last]]
        yield f"{_operands(tasks[first])} {[task.id for task in some]} {params} {[task.sm for task in some]}"
        first = last


def _operands(task: Task) -> str:
    waits = ",".join(f"{wait.counter}>={wait.threshold}" for wait in task.waits)
    inputs, outputs = ",".join(map(str, task.inputs)), ",".join(map(str, task.outputs))
    return f"{task.op:d} {inputs} {outputs} {task.out_counter} {waits}"
