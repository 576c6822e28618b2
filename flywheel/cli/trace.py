"""`flywheel trace`: how one launch spends its time on this GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flywheel.cli.decoding import check_device, lower_model, notes_of_program, open_model
from flywheel.cli.files import announce, announce_notes, load_config
from flywheel.cli.options import (
    DEFAULTS,
    OutputFile,
    SharedOption,
    announce_written,
    batch_option,
    check_writable,
    command,
    json_option,
    ranks_option,
    store_option,
    weights_option,
    write_file,
)
from flywheel.cli.text import ABSENT, note, pairs, percent, show, show_json, show_table, size, us, us_of
from flywheel.errors import UnknownNameError, UsageError
from flywheel.ir import MegakernelProgram
from flywheel.plan import is_another, program_id
from flywheel.store.schedule import Schedule

if TYPE_CHECKING:
    from flywheel.decode.notes import Note
    from flywheel.decode.source import Source
    from flywheel.judge.trace import TracedStep


@command
@click.option("--model", cls=SharedOption, metavar="NAME|DIR",
              help="Model by name, with random weights, or a checkpoint's directory.  [default: the schedule's]")
@click.option("--config", "config_file", metavar="FILE|-",
              help="Exported schedule, or ScheduleConfig.  [default: the one that a search tries first]")
@click.option("--campaign", metavar="NAME", help="Trace the best schedule of this campaign.")
@click.option("--gpu", cls=SharedOption, metavar="NAME",
              help="GPU to lower for.  [default: the schedule's, else this machine's]")
@click.option("--dtype", cls=SharedOption, metavar="bf16|f16|f32",
              help="Type of weights and activations.  [default: the schedule's, else the checkpoint's, else "
                   f"{DEFAULTS['dtype']}]")
@weights_option
@click.option("--context", cls=SharedOption, type=int, metavar="TOKENS",
              help=f"Positions of the KV cache.  [default: the schedule's, else {DEFAULTS['context']}]")
@batch_option
@ranks_option
@click.option("--position", type=click.IntRange(min=1), metavar="P",
              help="Position to decode at.  [default: the last of the context]")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, metavar="N",
              help="Seed of the tokens and, without a checkpoint, of the weights.")
@click.option("-o", "--output", type=OutputFile(), metavar="FILE.json",
              help="Write the trace, for ui.perfetto.dev or chrome://tracing.")
@click.option("--picture", type=OutputFile(), metavar="FILE.svg",
              help="Draw the middle layer's tasks on every SM.")
@store_option
@json_option
def trace(
    model: str | None,
    config_file: str | None,
    campaign: str | None,
    gpu: str | None,
    dtype: str | None,
    weights: str | None,
    context: int | None,
    batch: int | None,
    ranks: int | None,
    position: int | None,
    seed: int,
    output: Path | None,
    picture: Path | None,
    store: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Show how one launch spends its time, from time stamps that its tasks write on this machine's GPU.

    First the program's tensors are compared with the oracle's, with and without tracing; exit code 3 if they differ.
    The result is a table by operation and a table by hand-off (a task's wait for another task's result) and, if asked
    for, a file for Perfetto and a picture.
    """
    if config_file is not None and campaign is not None:
        raise UsageError("trace: --config and --campaign both name a schedule; give one")
    for path in (output, picture):
        if path is not None:
            check_writable(path)
    check_device("cuda", ranks)
    given = load_config(config_file) if config_file is not None else None
    if campaign is not None:
        given = _best(store, campaign)
    schedule = given if isinstance(given, Schedule) else None
    name = model if model is not None or schedule is None else schedule.model
    if name is None:
        raise UsageError("trace: no model; give --model, or an exported schedule with --config")
    source = open_model("trace", name)
    lowered = lower_model(source, given, gpu, dtype, context, "cuda", batch, weights, ranks)
    program = lowered.program
    notes = (*notes_of_program(program, source, seed), *lowered.notes, *_notes_of_another(program, schedule))
    announce_notes(notes)
    traced = _run(program, source, position, seed)
    document = {
        "model": source.name,
        "config_id": program.config.config_id if program.config else None,
        "program_id": program_id(program),
        "random_weights": source.stored is None,
        "seed": seed,
        "notes": [asdict(each) for each in notes],
        **describe(program, traced),
    }
    _write(program, traced, document, output, picture)
    if as_json:
        show_json({**document, "trace": _named(output), "picture": _named(picture)})
    else:
        _show(document)


def _best(store: str, campaign: str) -> Schedule:
    """The best schedule of a campaign that this version lowers: measured if any is, else predicted. Raises
    UnknownNameError, StoreError."""
    from flywheel.ir import config_from_dict
    from flywheel.measure.standing import best_of
    from flywheel.search.knowledge.lowered import best_of_work
    from flywheel.search.knowledge.warm import work_of
    from flywheel.search.provenance import find_campaign
    from flywheel.store.sql import open_store

    with open_store(store, create=False) as opened:
        origin = find_campaign(opened, campaign)
        records = opened.trials(origin.name)
        best, workload = best_of(records), work_of(origin)
        if best is None:
            raise UnknownNameError(f"store {opened.name}: no trial of campaign {campaign!r} has a latency")
        if workload is not None:
            kind, measured = best.kind, not best.is_predicted
            best = best_of_work(opened, workload, measured=measured, campaign=origin.name, tell=announce)
            if best is None:
                raise UnknownNameError(f"trace: this version lowers no {kind} schedule of {origin.name}")
    note(f"{best.campaign}, {best.title}: {best.kind} {us_of(best)}")
    config = config_from_dict(json.loads(best.config))
    work = (best.model, best.gpu, best.dtype, best.context, best.batch)
    return Schedule(*work, config, best.config_id, best.program_id, best.weights or best.dtype)


def _notes_of_another(program: MegakernelProgram, schedule: Schedule | None) -> tuple[Note, ...]:
    """The note of a program that is not the one that the schedule was exported with."""
    from flywheel.decode.notes import Note

    if schedule is None or not is_another(schedule.program_id, program_id(program)):
        return ()
    text = f"not the schedule's program {schedule.program_id}: an option or this version changes it"
    return (Note("another-program", text),)


def _run(program: MegakernelProgram, source: Source, position: int | None, seed: int) -> TracedStep:
    from flywheel.judge.trace import trace_step

    return trace_step(program, source, position, seed)


def describe(program: MegakernelProgram, traced: TracedStep) -> dict[str, Any]:
    """The trace as a document, JSON-ready. An operation's shares are fractions of its own time; the launch's are
    fractions of the time of all SMs."""
    from flywheel.measure.verdict import as_document
    from flywheel.report.layer import step_states
    from flywheel.report.traced import (
        exchange_times,
        hand_off_times,
        idle_us,
        layer_times,
        measured,
        operation_times,
    )
    from flywheel.vm.gpu.trace import Phase

    launch, operations = traced.trace, operation_times(traced.trace)
    span = launch.span_us
    return {
        "gpu_name": traced.gpu_name,
        "position": traced.position,
        "batch": traced.batch,
        "verdict": as_document(traced.verdict),
        "latency_us": traced.latency.median_us,
        "traced_us": traced.traced_us,
        "span_us": span,
        "tasks": len(launch.tasks),
        "sms": launch.sms,
        "states": step_states(measured(program, launch)),
        "phases": {phase: sum(each.phases_us[phase] for each in operations) / span for phase in Phase},
        "idle": idle_us(launch) / span,
        "loader_stalled": launch.stalled,
        "matrix_starved": launch.starved,
        "matrix_awaiting": launch.awaiting,
        "operations": [
            {
                "operation": each.operation,
                "tasks": each.tasks,
                "bytes": each.bytes,
                "sm_us": each.sm_us,
                "busy_us": each.busy_us,
                "gbs": each.gbs,
                "phases": {phase: each.share(phase) for phase in Phase},
            }
            for each in operations
        ],
        "layer": [asdict(each) for each in layer_times(launch)],
        "hand_offs": [asdict(each) for each in hand_off_times(launch)],
        "exchanges": [asdict(each) for each in exchange_times(launch)],
    }


def _write(
    program: MegakernelProgram, traced: TracedStep, document: dict[str, Any], output: Path | None, picture: Path | None
) -> None:
    from flywheel.report.chrome import chrome_trace, measured_slices
    from flywheel.report.layer import layer
    from flywheel.report.svg import standalone
    from flywheel.report.traced import measured

    origin = f"measured on {traced.gpu_name}"
    if output is not None:
        plain = {name: value for name, value in document.items() if not isinstance(value, dict | list)}
        write_file(output, chrome_trace(f"{document['model']}, {origin}", measured_slices(traced.trace), plain))
        announce_written(output, "; ui.perfetto.dev opens it")
    if picture is not None:
        write_file(picture, standalone(layer(measured(program, traced.trace), origin)))
        announce_written(picture)


def _show(document: dict[str, Any]) -> None:
    step = f"{document['model']} on {document['gpu_name']}, position {document['position']:,}"
    step += f", {document['batch']} sequences" if document["batch"] > 1 else ""
    size_of = f"{document['tasks']:,} tasks on {document['sms']} SMs"
    show(f"{step}: {size_of}, program {document['program_id']}")
    show(
        *pairs(
            [
                ("latency", f"{us(document['latency_us'])} without a trace, {us(document['traced_us'])} with it; "
                            f"{us(document['span_us'])} from the first stamp to the last"),
                ("an SM", ", ".join(f"{name} {percent(share)}" for name, share in document["states"].items())),
                ("its loader", f"stalled {percent(document['loader_stalled'])}: the ring full, or too far ahead"),
                ("matrix warps", f"starved {percent(document['matrix_starved'])}: the operand there, no weights; "
                                 f"{percent(document['matrix_awaiting'])} of the launch without an operand"),
                ("verdict", f"right at {', '.join(map(str, document['verdict']['positions']))}: error "
                            f"{document['verdict']['error']:.2g}, at most {document['verdict']['bound']:.2g}"),
            ]
        )
    )  # fmt: skip
    phases = list(document["phases"])
    rows = [
        (row["operation"], f"{row['tasks']:,}", size(row["bytes"]), f"{row['sm_us']:,.1f}",
         ABSENT if row["gbs"] is None else f"{row['gbs']:,.0f}", *(percent(row["phases"][name]) for name in phases))
        for row in document["operations"]
    ]  # fmt: skip
    show_table(("<operation", "tasks", "bytes", "us an SM", "GB/s", *phases), rows, indent="  ", gap=True)
    if document["layer"]:
        rows = [
            (row["operation"], f"{row['tasks']:,}", *(_two(row[name]) for name in ("ready_us", "stored_us", "last_us")))
            for row in document["layer"]
        ]
        show_table(("<in a layer", "tasks", "ready us", "stored us", "all stored us"), rows, indent="  ", gap=True)
    rows = [
        (row["operation"], ", ".join(row["after"]), f"{row['waited']:,} of {row['tasks']:,}", _two(row["median_us"]),
         _two(row["max_us"]), _two(row["sm_held_us"]), _two(row["sm_hand_off_us"]))
        for row in document["hand_offs"]
    ]  # fmt: skip
    headers = ("<hand-off to", "<after", "waited", "median us", "max us", "before, us an SM", "after, us an SM")
    show_table(headers, rows, indent="  ", gap=True)
    if document["exchanges"]:
        rows = [
            (row["operation"], f"{row['sums']:,}", _two(row["median_us"]), _two(row["mean_us"]), _two(row["max_us"]))
            for row in document["exchanges"]
        ]
        show_table(("<exchange", "all-reduces", "median us", "mean us", "max us"), rows, indent="  ", gap=True)


def _two(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.2f}"


def _named(path: Path | None) -> str | None:
    return None if path is None else str(path)
