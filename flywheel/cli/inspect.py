"""`flywheel inspect`: summarise a program."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from flywheel.cli.files import load_program
from flywheel.cli.options import command, document_option, give, json_option
from flywheel.cli.text import cell, pairs, percent, predicted, show, show_table, size, us
from flywheel.cli.warming import announce_compiling
from flywheel.cost_model import MODEL_VERSION, Machine, Prediction, predict
from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import MegakernelProgram, config_to_dict, validate
from flywheel.ir.validate import weight_bytes
from flywheel.ir.work import Work, works_of
from flywheel.measure.floor import floor_fraction
from flywheel.measure.latency import band_of
from flywheel.plan import KernelVariant, program_id, variant_of
from flywheel.report.layer import operation


@command
@click.argument("file", metavar="FILE")
@document_option
@json_option
def inspect(file: str, output: Path | None, as_json: bool) -> None:
    """Summarise a program: buffers, tasks, counters, depth, load of the SMs, pages and config. `-` is stdin."""
    program = load_program(file)
    announce_compiling()
    facts = describe(program)
    give({"path": file, **facts}, output, as_json, lambda: _show(file, facts))


def describe(program: MegakernelProgram) -> dict[str, Any]:
    """A summary of a program, JSON-ready. A field is None where only a valid program on a target has it."""
    result = validate(program)
    variant = _variant(program) if result.ok else None
    works = works_of(program) if result.ok else [Work()] * len(program.tasks)
    buffers: dict[str, list[int]] = {}
    for buffer in program.buffers:
        tally = buffers.setdefault(buffer.kind.name, [0, 0])
        tally[0] += 1
        tally[1] += buffer.nbytes
    pages = program.pages
    return {
        "program_id": program_id(program) if variant else None,
        "ir_version": program.ir_version,
        "valid": result.ok,
        "errors": [str(finding) for finding in result.errors],
        "warnings": [str(finding) for finding in result.warnings],
        "meta": dict(program.meta),
        "target": program.target.name if program.target else None,
        "variant": _variant_document(variant),
        "ranks": program.ranks,
        "tasks": len(program.tasks),
        "operations": _operations(program, works),
        "buffers": {kind: {"count": count, "bytes": nbytes} for kind, (count, nbytes) in buffers.items()},
        "counters": len(program.counters),
        "waits": sum(len(task.waits) for task in program.tasks),
        "depth": result.stats.get("levels"),
        "work": _work_document(sum(works, Work())) if result.ok else None,
        "weight_bytes": weight_bytes(program),
        "scratch_bytes": pages.total_scratch_bytes if pages else None,
        "pages": len(pages.pages) if pages else None,
        "load": _load(program),
        **(_predicted(program) if variant else {"predicted_us": None, "floor_us": None, "floor_fraction": None}),
        "config": config_to_dict(program.config) if program.config else None,
    }


def _variant(program: MegakernelProgram) -> KernelVariant | None:
    try:
        return variant_of(program)
    except ConfigError:
        return None


def _variant_document(variant: KernelVariant | None) -> dict[str, int] | None:
    if variant is None:
        return None
    return {
        "sm_arch": variant.sm_arch,
        "threads": variant.threads,
        "smem_bytes": variant.smem_bytes,
        "staged_bytes": variant.staged_bytes,
        "chunk_bytes": variant.chunk_bytes,
        "ring_slots": variant.ring_slots,
        "prefetch_depth": variant.prefetch_depth,
    }


def _load(program: MegakernelProgram) -> dict[str, Any] | None:
    """Tasks and bytes per SM, over all GPUs; None without SMs. `balance` is the mean of the SMs' bytes over their
    maximum."""
    tasks: Counter[tuple[int, int]] = Counter()
    nbytes: Counter[tuple[int, int]] = Counter()
    for task in program.tasks:
        if task.sm is not None:
            tasks[task.rank, task.sm] += 1
            nbytes[task.rank, task.sm] += task.est_bytes
    if not tasks:
        return None
    sms = program.target.num_sms * program.ranks if program.target else len(tasks)
    least = len(tasks) == sms
    most = max(nbytes.values())
    return {
        "sms": len(tasks),
        "sms_of_target": sms,
        "tasks": [min(tasks.values()) if least else 0, max(tasks.values())],
        "bytes": [min(nbytes.values()) if least else 0, most],
        "balance": sum(nbytes.values()) / sms / most if sms and most else None,
    }


def predict_latency(program: MegakernelProgram, machine: Machine | None = None) -> Prediction:
    """The cost model's prediction, with the constants of `machine` if given.

    Raises ConfigError for a program without tasks, a target without a bandwidth, and as the cost model; ConfigError and
    InvalidProgramError as `check_program` for one that no kernels run.
    """
    from flywheel.plan.program import check_program

    if not program.tasks:
        raise ConfigError("the program has no tasks")
    target = program.target
    if target is not None and not target.hbm_bandwidth_gbs > 0:
        raise ConfigError(f"target {target.name}: hbm_bandwidth_gbs={target.hbm_bandwidth_gbs} is not above 0")
    check_program(program)
    return predict(program, machine)


def _predicted(program: MegakernelProgram) -> dict[str, float | None]:
    try:
        prediction = predict_latency(program)
    except (ConfigError, InvalidProgramError):
        return {"predicted_us": None, "floor_us": None, "floor_fraction": None}
    fraction = floor_fraction(prediction.floor_us, prediction.latency_us)
    return {"predicted_us": prediction.latency_us, "floor_us": prediction.floor_us, "floor_fraction": fraction}


def _show(file: str, facts: dict[str, Any]) -> None:
    band = band_of(facts["target"] or "", MODEL_VERSION)
    variant, load, work, errors = facts["variant"], facts["load"], facts["work"], facts["errors"]
    show(f"{file}: program {facts['program_id'] or '(no identity)'}, IR {facts['ir_version']}")
    meta = ", ".join(f"{name} {value}" for name, value in facts["meta"].items())
    proof = "valid" if facts["valid"] else f"{len(errors)} errors, the first {errors[0]}"
    lines = [
        ("meta", meta or None),
        ("proof", f"{proof}; {len(facts['warnings'])} warnings"),
        ("predicted", facts["predicted_us"] and f"{predicted(facts['predicted_us'], band)}; the floor of "
                                                f"{us(facts['floor_us'])} is {percent(facts['floor_fraction'])} of it"),
        ("kernel", variant and _kernel(variant)),
        ("tasks", f"{facts['tasks']:,}, with {facts['waits']:,} waits"),
        ("work", work and f"{size(work['streamed_bytes'])} of weights and caches read a step, "
                          f"{size(work['read_bytes'])} of all else, {size(work['written_bytes'])} written, "
                          f"{work['flops'] / 1e9:,.2f} GFLOP"),
        ("counters", f"{facts['counters']:,}, {cell(facts['depth'])} deep"),
        ("SMs", load and _spread(load)),
        ("pages", facts["pages"] and f"{facts['pages']:,}, {size(facts['scratch_bytes'])} of scratch"),
        *(_config(facts["config"]) if facts["config"] is not None else ()),
    ]  # fmt: skip
    show(*pairs(lines))
    rows = [(kind, f"{tally['count']:,}", size(tally["bytes"])) for kind, tally in facts["buffers"].items()]
    show_table(("<buffers", "count", "bytes stored"), rows, indent="  ", gap=True)
    operations = [
        (row["operation"], row["op"], f"{row['tasks']:,}", size(row["streamed_bytes"]), f"{row['flops'] / 1e6:,.1f}")
        for row in facts["operations"]
    ]
    show_table(("<operations", "<opcode", "tasks", "read a step", "MFLOP"), operations, indent="  ", gap=True)


def _operations(program: MegakernelProgram, works: Sequence[Work]) -> list[dict[str, Any]]:
    """Tasks and their work by operation and opcode, ordered by first task."""
    tally: dict[tuple[str, str], tuple[int, Work]] = {}
    for task, work in zip(program.tasks, works, strict=True):
        key = operation(task.label), task.op.name
        tasks, before = tally.get(key, (0, Work()))
        tally[key] = tasks + 1, before + work
    return [
        {"operation": name, "op": op, "tasks": tasks, **_work_document(work)}
        for (name, op), (tasks, work) in tally.items()
    ]


def _work_document(work: Work) -> dict[str, int]:
    return {
        "streamed_bytes": work.streamed, "read_bytes": work.read, "written_bytes": work.written, "flops": work.flops
    }  # fmt: skip


def _kernel(variant: dict[str, int]) -> str:
    ring = f"{variant['ring_slots']} x {variant['chunk_bytes'] // 1024} KiB ring"
    return f"sm_{variant['sm_arch']}, {variant['threads']} threads, {ring}, prefetch {variant['prefetch_depth']} ahead"


def _spread(load: dict[str, Any]) -> str:
    (fewest, most), (least, largest) = load["tasks"], load["bytes"]
    return (
        f"{load['sms']} of {load['sms_of_target']}, each {fewest:,} to {most:,} tasks and {size(least)} to "
        f"{size(largest)}; mean over maximum {percent(load['balance'])}"
    )


def _config(config: dict[str, Any]) -> list[tuple[str, str]]:
    plain = [f"{name} {value}" for name, value in config.items() if isinstance(value, str | int)]
    tiles = [f"{op} {' '.join(map(str, sizes.values()))}" for op, sizes in config["tiling"].items()]
    fused = ["+".join(group) for group in config["fusion_grouping"]]
    named = (("config", plain), ("tiling", tiles), ("fusion", fused))
    return [(name, ", ".join(items) or "none") for name, items in named]
