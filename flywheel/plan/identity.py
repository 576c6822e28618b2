"""The identity of a program: what it computes and how, without names, provenance or the config that led to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from flywheel.ir import MegakernelProgram, Task
from flywheel.plan.variant import KernelVariant, variant_of

_VARIANT_FIELDS: Final = (
    "sm_arch", "threads", "matrix_warps", "chunk_warps", "smem_bytes", "staged_bytes", "chunk_bytes", "ring_slots",
    "inflight_chunks", "copies", "prefetch_depth", "data_hand_offs",
)  # fmt: skip
"""What of a kernel variant every id holds. `x_slices` counts where it is above 1; `rows` follows from the tasks."""

_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def program_id(program: MegakernelProgram) -> str:
    """First 16 hex digits of a SHA-256 over target, kernel variant, buffers, pages and tasks, by value.

    Equal for two configs that lower to the same program and the same kernel, and for a program and its copy from a
    file. Raises ConfigError as `variant_of` does.
    """
    target, pages = program.target, program.pages
    lines = [
        f"{program.ir_version} {target.name if target else None!r} {_variant_text(variant_of(program))}",
        *(f"{b.id} {b.kind:d} {b.dtype:d} {tuple(b.shape)} {b.space:d} {b.source!r}" for b in program.buffers),
    ]
    if pages is not None:
        lines.append(repr(sorted(pages.buffer_to_page.items())))
        lines.extend(f"{page.id} {page.space:d} {page.nbytes}" for page in pages.pages)
    lines.extend(_task_lines(program.tasks))
    return hashlib.sha256("\n".join(lines).encode("utf-8", "backslashreplace")).hexdigest()[:16]


def _variant_text(variant: KernelVariant) -> str:
    named = ", ".join([f"{name}={getattr(variant, name)!r}" for name in _VARIANT_FIELDS])
    return f"KernelVariant({named})" + (f" x_slices={variant.x_slices}" if variant.x_slices > 1 else "")


def _task_lines(tasks: Sequence[Task]) -> Iterator[str]:
    """Texts of distinct params, then for each run of tasks that are alike: what they share, and their ids, params, SMs.

    Tasks are first grouped by identity, since the tiles of a projection share their records; neighbours that turn out
    to be equal join one run, so that the lines depend on values alone.
    """
    texts: dict[str, int] = {}
    params = _numbers([task.params for task in tasks], texts)
    yield from texts
    keys = [(task.op, id(task.inputs), id(task.outputs), task.out_counter, id(task.waits)) for task in tasks]
    head, start, first = "", 0, 0
    for _, same in groupby(keys):
        alike = _operands(tasks[first])
        if alike != head:
            yield _run(head, tasks[start:first], params[start:first])
            head, start = alike, first
        first += sum(1 for _ in same)
    yield _run(head, tasks[start:], params[start:])


def _run(head: str, tasks: Sequence[Task], params: Sequence[int]) -> str:
    return f"{head} {[task.id for task in tasks]} {params} {[task.sm for task in tasks]}"


def _operands(task: Task) -> str:
    waits = ",".join([f"{wait.counter}>={wait.threshold}" for wait in task.waits])
    return f"{task.op:d} {list(task.inputs)} {list(task.outputs)} {task.out_counter} {waits}"


def _numbers(records: Sequence[Mapping[str, Any]], texts: dict[str, int]) -> list[int]:
    """Number of each params record's text, which is added to `texts`; shared records are written out once."""
    recipes: dict[int, str] = {}

    def text(params: Mapping[str, Any]) -> str:
        recipe = params.get("recipe")
        if recipe is None:
            return _json(params)
        if id(recipe) not in recipes:
            recipes[id(recipe)] = hashlib.sha256(_json(recipe).encode()).hexdigest()
        return _json({**params, "recipe": recipes[id(recipe)]})

    identities = list(map(id, records))
    numbers = {
        identity: texts.setdefault(text(record), len(texts))
        for identity, record in dict(zip(identities, records, strict=True)).items()
    }
    return list(map(numbers.__getitem__, identities))
