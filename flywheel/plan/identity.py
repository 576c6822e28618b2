"""The identity of a program: what it computes and how. Names, provenance and the config are not part of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

from flywheel.ir import MegakernelProgram, Runs, Task
from flywheel.ir.recipe import Recipe, recipe_digest
from flywheel.plan.variant import KernelVariant, variant_of

_VARIANT_FIELDS: Final = (
    "sm_arch", "threads", "matrix_warps", "chunk_warps", "smem_bytes", "staged_bytes", "chunk_bytes", "ring_slots",
    "inflight_chunks", "copies", "prefetch_depth", "data_hand_offs",
)  # fmt: skip
"""Fields of the kernel variant that every id holds. `x_slices` counts where it is above 1. `rows`, `formats` and
`ranked` do not count, since they follow from the tasks."""

_AS_BEFORE: Final = {"0.4.0": "0.3.0", "0.5.0": "0.3.0"}
"""Format version -> the version that ids hold for it. Such a version adds to the format and leaves older programs' ids
as they are."""

_ESCAPED: Final = "backslashreplace"

_json: Final = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def program_id(program: MegakernelProgram) -> str:
    """The first 16 hex digits of a SHA-256 over target, kernel variant, buffers, pages and tasks, by value.

    Two configs have equal ids if they lower to the same program and kernel, and so have a program and its copy from a
    file. Raises ConfigError as `variant_of`.
    """
    return id_with(program, variant_of(program))


def id_with(program: MegakernelProgram, variant: KernelVariant) -> str:
    """The id of a program with this kernel variant."""
    # Imported here, so that only ids wait for numpy and numba.
    from flywheel.plan.run_lines import lines_of_buffers, lines_of_runs

    target, pages, tasks = program.target, program.pages, program.tasks
    version = _AS_BEFORE.get(program.ir_version, program.ir_version)
    ranks = f" ranks={program.ranks}" if program.ranks > 1 else ""
    digest = hashlib.sha256(_line(f"{version} {target.name if target else None!r} {_variant_text(variant)}{ranks}"))
    digest.update(lines_of_buffers(program))
    if pages is not None:
        digest.update(_line(repr(sorted(pages.buffer_to_page.items()))))
        digest.update("".join([f"{page.id} {page.space:d} {page.nbytes}\n" for page in pages.pages]).encode())
    if program.ranks > 1:
        digest.update(_ranks(tasks))
    lines = lines_of_runs(program) if isinstance(tasks, Runs) else None
    digest.update("\n".join(_task_lines(tasks)).encode("utf-8", _ESCAPED) if lines is None else lines)
    return digest.hexdigest()[:16]


def _ranks(tasks: Sequence[Task]) -> bytes:
    """The ranks of tasks, a byte for each."""
    if isinstance(tasks, Runs):
        return b"".join([bytes([run.rank]) * len(run.tiles) for run in tasks.runs])
    return bytes([task.rank for task in tasks])


def _line(text: str) -> bytes:
    return f"{text}\n".encode("utf-8", _ESCAPED)


def _variant_text(variant: KernelVariant) -> str:
    named = ", ".join([f"{name}={getattr(variant, name)!r}" for name in _VARIANT_FIELDS])
    slices = f" x_slices={variant.x_slices}" if variant.x_slices > 1 else ""
    return f"KernelVariant({named}){slices}"


class _TaskPiece(NamedTuple):
    """Adjacent tasks with the same `head`."""

    head: str
    ids: Sequence[int]
    params: list[int]
    sms: Sequence[int | None]


def _task_lines(tasks: Sequence[Task]) -> Iterator[str]:
    """The texts of the distinct params, then a line for each run of like tasks: their shared fields, and their ids,
    params and SMs.

    Adjacent runs with equal shared fields are joined, so that the lines depend on values alone.
    """
    texts: dict[str, int] = {}
    pieces = list(_pieces(tasks, texts))
    yield from texts
    yield " [] [] []"  # an empty run, which every stored id has before its task lines
    for head, alike in groupby(pieces, key=itemgetter(0)):
        ids: list[int] = []
        params: list[int] = []
        sms: list[int | None] = []
        for piece in alike:
            ids += piece.ids
            params += piece.params
            sms += piece.sms
        yield f"{head} {ids} {params} {sms}"


def _pieces(tasks: Sequence[Task], texts: dict[str, int]) -> Iterator[_TaskPiece]:
    """Adjacent tasks grouped by object identity: the tiles of a projection share their records."""
    number_of = _Numbers(texts)
    params = [number_of(task.params) for task in tasks]
    keys = [(task.op, id(task.inputs), id(task.outputs), task.out_counter, id(task.waits)) for task in tasks]
    first = 0
    for _, same in groupby(keys):
        end = first + sum(1 for _ in same)
        part = tasks[first:end]
        yield _TaskPiece(_head(part[0]), [task.id for task in part], params[first:end], [task.sm for task in part])
        first = end


def _head(alike: Task) -> str:
    waits = ",".join([f"{wait.counter}>={wait.threshold}" for wait in alike.waits])
    return f"{alike.op:d} {list(alike.inputs)} {list(alike.outputs)} {alike.out_counter} {waits}"


class _Numbers:
    """Numbers of params records by their texts, which are added to `texts`. A shared record is written once."""

    def __init__(self, texts: dict[str, int]) -> None:
        self._texts = texts
        self._known: dict[int, int] = {}

    def __call__(self, params: Mapping[str, Any]) -> int:
        number = self._known.get(id(params))
        if number is None:
            number = self._known[id(params)] = self._texts.setdefault(self._text(params), len(self._texts))
        return number

    def _text(self, params: Mapping[str, Any]) -> str:
        recipe = params.get("recipe")
        return _json({**params, "recipe": recipe_digest(recipe)} if isinstance(recipe, Recipe) else params)
