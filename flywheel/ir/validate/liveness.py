"""Deadlock freedom: waits can be met, waits are full joins, and serial SM queues drain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from flywheel.ir.firing import ProofTask, stuck_in_queues
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Task
from flywheel.ir.validate.findings import MAX_FINDINGS, Findings


def check_waits(program: MegakernelProgram, findings: Findings) -> None:
    """Check that every wait names a counter and needs all of its producers."""
    known = {counter.id for counter in program.counters}
    producers = Counter([task.out_counter for task in program.tasks])
    for counter in sorted(producers.keys() - known)[:MAX_FINDINGS]:
        findings.error("unknown-counter", f"counter {counter} is signalled but not declared")
    for task in {id(task.waits): task for task in reversed(program.tasks)}.values():
        for wait in task.waits:
            _check_wait(task, wait.counter, wait.threshold, producers[wait.counter], known, findings)
        if findings.full:
            return


def _check_wait(task: Task, counter: int, threshold: int, count: int, known: set[int], findings: Findings) -> None:
    if threshold == count > 0 and counter in known:
        return
    where = f"task {task.id} ({task.label}): waits for counter {counter} >= {threshold}"
    if counter not in known:
        findings.error("unknown-counter", f"{where}, which is not declared", task.id)
    elif not 1 <= threshold <= count:
        findings.error("unsatisfiable-wait", f"{where}, which has {count} producers", task.id)
    else:
        findings.error("partial-join", f"{where}, but any of its {count} producers may be the first to signal", task.id)


def check_queues(tasks: Sequence[ProofTask], order: Sequence[int], findings: Findings) -> None:
    """Check that all serial SM queues drain, in list order. They always do where the list is in a topological order."""
    if order == range(len(tasks)):
        return
    for index in stuck_in_queues(tasks)[:MAX_FINDINGS]:
        task = tasks[index]
        counters = ", ".join(str(wait.counter) for wait in task.waits)
        findings.error(
            "queue-deadlock",
            f"task {task.id} ({task.label}): SM {task.sm} blocks here for ever, waiting for counters {counters}",
            task.id,
        )
