"""The identity of a program: what it computes and how, without names, provenance or the config that led to it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from flywheel.ir.program import MegakernelProgram
from flywheel.ir.variant import variant_of


def program_id(program: MegakernelProgram) -> str:
    """First 16 hex digits of a SHA-256 over target, kernel variant, buffers, pages and tasks.

    Equal for two configs that lower to the same program and the same kernel. Raises ConfigError as `variant_of` does.
    """
    known: dict[int, str] = {}

    def text(part: object, show: Callable[[Any], str] = repr) -> str:
        """`show(part)`, once per object: tiles share their operand, wait and param records."""
        shown = known.get(id(part))
        if shown is None:
            shown = known[id(part)] = show(part)
        return shown

    target, pages = program.target, program.pages
    lines = [
        f"{program.ir_version} {target.name if target else None} {variant_of(program)!r}",
        *(f"{b.id} {b.kind:d} {b.dtype:d} {tuple(b.shape)} {b.space:d} {b.source}" for b in program.buffers),
    ]
    if pages is not None:
        lines.append(repr(sorted(pages.buffer_to_page.items())))
        lines.extend(f"{page.id} {page.space:d} {page.nbytes}" for page in pages.pages)
    for task in program.tasks:
        lines.append(
            f"{task.id} {task.op:d} {text(task.inputs, _ints)} {text(task.outputs, _ints)} {task.out_counter} "
            f"{text(task.waits, _waits)} {text(task.params, _params)} {task.sm}"
        )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _ints(numbers: Any) -> str:
    return ",".join(map(str, numbers))


def _waits(waits: Any) -> str:
    return ",".join(f"{wait.counter}>={wait.threshold}" for wait in waits)


def _params(params: Any) -> str:
    return repr(sorted(params.items()))
