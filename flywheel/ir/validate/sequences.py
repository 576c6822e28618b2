"""The rule that lets each sequence have a position of its own: tasks that share a cache move together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flywheel.ir.dtype import BufferKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Task
from flywheel.ir.runs import Runs, task_of
from flywheel.ir.tiles import stretches_of
from flywheel.ir.validate.findings import Findings


def check_sequences(program: MegakernelProgram, findings: Findings) -> None:
    """Check that all tasks with `pos` or `kv_len` that touch one KV cache name one `sequence`.

    Then the rows of a cache that tasks touch are those of a program whose sequences are all at that position, which the
    other rules prove. No other buffer has rows that move.
    """
    caches = {buffer.id: buffer.name for buffer in program.buffers if buffer.kind is BufferKind.KV_CACHE}
    first: dict[int, tuple[int, Task]] = {}
    for task in tasks_with(program, caches):
        params = task.params
        if "pos" not in params and "kv_len" not in params:
            continue
        sequence = params.get("sequence", 0)
        for number in {*task.inputs, *task.outputs} & caches.keys():
            known, other = first.setdefault(number, (sequence, task))
            if known != sequence:
                findings.error(
                    "kv-sequence",
                    f"task {task.id} ({task.label}): sequence {sequence} with cache {number} ({caches[number]}), of "
                    f"which task {other.id} ({other.label}) is sequence {known}",
                    task.id,
                )
                if findings.full:
                    return


def tasks_with(program: MegakernelProgram, caches: Mapping[int, Any]) -> Iterator[Task]:
    """Tasks that touch these caches; of a run, one a stretch of tiles."""
    tasks = program.tasks
    if not isinstance(tasks, Runs):
        yield from tasks
        return
    for run, first in zip(tasks.runs, tasks.first, strict=False):
        if caches.keys().isdisjoint(run.inputs) and caches.keys().isdisjoint(run.outputs):
            continue
        for stretch in stretches_of(run.tiles):
            yield task_of(run, stretch, first, 0)
