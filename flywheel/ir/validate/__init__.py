"""The proof that a program is safe to launch: well-formed, free of deadlocks, free of races. Source: docs/ir.md."""

from __future__ import annotations

from flywheel.ir.compressed import (
    NO_LAYERS,
    NO_SM,
    as_runs,
    column_of,
    layers_of,
    local_layers,
    repeated,
    spelled_out,
)
from flywheel.ir.dag import find_cycle, topological_positions
from flywheel.ir.dtype import BufferKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.show import show
from flywheel.ir.validate.by_layer import levels_of_safe_layers
from flywheel.ir.validate.by_run import levels_of_safe_runs
from flywheel.ir.validate.findings import CODES, Finding, Findings, ValidationResult
from flywheel.ir.validate.lanes import check_lanes, check_sequences
from flywheel.ir.validate.liveness import check_queues, check_waits
from flywheel.ir.validate.memory import check_pages, check_per_sm_buffers
from flywheel.ir.validate.races import Accesses, check_races
from flywheel.ir.validate.ranks import check_exchanges, check_places
from flywheel.ir.validate.structure import check_structure, is_complete
from flywheel.ir.validate.tasks import check_tasks

__all__ = ["CODES", "Finding", "ValidationResult", "validate"]


def validate(program: object, strict: bool = False) -> ValidationResult:
    """Prove `program` safe, or say why it is not. Never raises. `strict` makes errors of page aliasing, unwritten
    columns and unknown params.

    Each family of rules relies on the ones before it, so it runs only if those found nothing.
    """
    findings = Findings(strict)
    stats: dict[str, int] = {}
    if type(program) is MegakernelProgram and is_complete(program):
        if _is_proved_by_layers(program, findings, stats):
            return ValidationResult(not findings.errors, tuple(findings.errors), tuple(findings.warnings), stats)
        program = spelled_out(program)
    if check_structure(program, findings):
        assert isinstance(program, MegakernelProgram)
        _prove(program, findings, stats)
    return ValidationResult(not findings.errors, tuple(findings.errors), tuple(findings.warnings), stats)


def _is_proved_by_layers(program: MegakernelProgram, findings: Findings, stats: dict[str, int]) -> bool:
    """Whether the proof by layers finds a program safe. It still warns of a wrong label."""
    layers, tried = layers_of(program), Findings(strict=True)
    if layers is NO_LAYERS or program.pages is not None or not check_structure(repeated(program, 1), tried):
        return False
    levels = levels_of_safe_layers(program, layers) if local_layers(program) is layers else None
    if levels is None:
        return False
    stats |= _counts(program) | {"levels": levels}
    _check_gpu_label(program, findings)
    return True


def _counts(program: MegakernelProgram) -> dict[str, int]:
    tasks = program.tasks
    return {
        "tasks": len(tasks),
        "buffers": len(program.buffers),
        "counters": len(program.counters),
        "sms": used_sms(program),
        "weight_bytes": weight_bytes(program),
        "scratch_bytes": program.pages.total_scratch_bytes if program.pages else 0,
    }


def used_sms(program: MegakernelProgram) -> int:
    """The number of SMs with tasks, over all GPUs."""
    tasks = as_runs(program)
    if program.ranks == 1:
        return len(tasks.used_sms - {NO_SM})
    used = {(run.rank, sm) for run, first in tasks.placed for sm in tasks.sms[first : first + len(run.tiles)]}
    return sum(sm != NO_SM for _, sm in used)


def weight_bytes(program: MegakernelProgram) -> int:
    """Bytes of all WEIGHT buffers, even where a step reads only a part of one."""
    return sum(column_of(program.buffers, lambda each: each.nbytes if each.kind is BufferKind.WEIGHT else 0))


def _prove(program: MegakernelProgram, findings: Findings, stats: dict[str, int]) -> None:
    tasks = program.tasks
    stats |= _counts(program)
    _check_gpu_label(program, findings)
    levels = levels_of_safe_runs(program)
    if levels is not None:
        stats["levels"] = levels
        return
    check_tasks(program, findings)
    check_waits(program, findings)
    if not findings.errors:
        check_sequences(program, findings)
        check_lanes(program, findings)
    if not findings.errors:
        check_places(program, findings)
    if findings.errors:
        return
    order = topological_positions(tasks)
    if len(order) < len(tasks):
        cycle = find_cycle(tasks, order)
        names = " -> ".join(f"{tasks[index].id} ({tasks[index].label})" for index in cycle[:8])
        more = f" -> ... {len(cycle)} tasks" if len(cycle) > 8 else ""
        findings.error("cycle", f"tasks wait for each other: {names}{more}", tasks[cycle[0]].id if cycle else None)
        return
    check_queues(tasks, order, findings)
    accesses = Accesses(program, order)
    stats["levels"] = accesses.done.depth
    check_races(program, accesses, findings)
    check_per_sm_buffers(program, findings)
    check_pages(program, accesses, findings)
    if not findings.errors:
        check_exchanges(program, accesses, findings)


def _check_gpu_label(program: MegakernelProgram, findings: Findings) -> None:
    if program.target is not None and "gpu" in program.meta:
        label, name = program.meta["gpu"], program.target.name
        if type(label) is not str or label != name:
            findings.warn("gpu-label", f"meta.gpu={show(label)} is not target.name={show(name)}")
