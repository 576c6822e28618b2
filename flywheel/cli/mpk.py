"""`flywheel mpk`: task graphs of Mirage's persistent kernel, proved, summarised and predicted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from flywheel.cli.exits import REJECTED
from flywheel.cli.options import check_writable, command, json_option, setting, write_file
from flywheel.cli.text import escaped, note, pairs, percent, show, show_json, show_table, size, us
from flywheel.errors import IrFormatError, UsageError
from flywheel.interop.mpk.facts import describe
from flywheel.interop.mpk.graph import MpkGraph
from flywheel.interop.mpk.predicting import predict_step, shares
from flywheel.interop.mpk.proof import check as prove
from flywheel.interop.mpk.reading import read_graph
from flywheel.interop.mpk.timing import H200, Timing
from flywheel.ir import Finding, ValidationResult
from flywheel.ir.files import MAX_FILE_BYTES
from flywheel.measure.floor import floor_fraction

ACTIONS = ("check", "inspect", "predict")
UNREADABLE = "unreadable"
"""Code of the error of a file that holds no task graph."""


@command
@click.argument("action", type=click.Choice(ACTIONS), metavar="|".join(ACTIONS))
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="W",
    help="MPK's queues of so many workers, whose order then counts.  [default: any placement; predict: 128]",
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    type=setting,
    metavar="NAME=TENSOR",
    help="A tensor that is another one's memory.",
)
@click.option(
    "--context",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    metavar="TOKENS",
    help="predict: tokens that attention attends to.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE.json",
    help="predict: write the timeline, for ui.perfetto.dev or chrome://tracing.",
)
@json_option
@click.pass_context
def mpk(
    ctx: click.Context, action: str, files: tuple[str, ...], workers: int | None, aliases: tuple[tuple[str, str], ...],
    context: int, trace: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Judge a task_graph.json of Mirage MPK; several FILEs are the ranks of one program, and `-` is stdin.

    check proves it free of deadlocks and races, inspect says what is in it, predict what a step takes on an H200 and
    where its workers wait. Exit code 3 if a file is unreadable or the graph is not safe.
    """
    if trace is not None:
        if action != "predict":
            raise UsageError(f"mpk {action}: --trace is of predict")
        check_writable(trace)
    graphs, result = _read(files)
    if result.ok:
        result = prove(graphs, H200.workers if action == "predict" and workers is None else workers, dict(aliases))
    document = {"paths": list(files), **_verdict(result)}
    timing = None
    if graphs and action == "inspect":
        document |= {"graphs": [describe(graph) for graph in graphs]}
    elif action == "predict" and result.ok:
        timing = predict_step(graphs[0], H200, context, workers)
        document |= _prediction(graphs[0], timing)
    if as_json:
        show_json(document)
    else:
        show(*f"{escaped(', '.join(files))}: {result.report()}".split("\n"))
        _show(document)
    if not result.ok:
        ctx.exit(REJECTED)
    if trace is not None and timing is not None:
        _write_trace(trace, graphs[0], timing)


def _read(files: Sequence[str]) -> tuple[list[MpkGraph], ValidationResult]:
    graphs, errors = [], []
    for path in files:
        try:
            graphs.append(read_graph(_bytes(path)))
        except IrFormatError as error:
            errors.append(Finding(UNREADABLE, f"{path}: {error}"))
    return ([], ValidationResult(False, tuple(errors))) if errors else (graphs, ValidationResult(True))


def _bytes(path: str) -> bytes:
    """Raises IrFormatError where the file cannot be read or is too large."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if sys.stdin is not None else b""
        else:
            with Path(path).open("rb") as stream:
                data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise IrFormatError(error.strerror or str(error)) from None
    except ValueError as error:  # a NUL in the path
        raise IrFormatError(str(error)) from None
    if len(data) > MAX_FILE_BYTES:
        raise IrFormatError(f"more than {MAX_FILE_BYTES:,} bytes")
    return data


def _verdict(result: ValidationResult) -> dict[str, Any]:
    def listed(findings: Sequence[Finding]) -> list[dict[str, Any]]:
        return [{"code": each.code, "message": each.message, "task": each.task} for each in findings]

    return {
        "ok": result.ok,
        "errors": listed(result.errors),
        "warnings": listed(result.warnings),
        "stats": dict(result.stats),
    }


def _prediction(graph: MpkGraph, timing: Timing) -> dict[str, Any]:
    return {
        "prediction": {
            "latency_us": timing.latency_us,
            "floor_us": timing.floor_us,
            "floor_fraction": floor_fraction(timing.floor_us, timing.latency_us),
            "gpu": H200.name,
        },
        "types": [
            {"type": share.name, "tasks": share.tasks, "bytes": share.nbytes,
             "waited_us": share.waited_us, "ran_us": share.ran_us}
            for share in shares(graph, timing)
        ],
    }  # fmt: skip


def _show(document: dict[str, Any]) -> None:
    for graph in document.get("graphs", ()):
        show(*pairs([(name, str(value)) for name, value in graph.items() if name != "types"]))
        rows = [(row["type"], f"{row['tasks']:,}", size(row["bytes"])) for row in graph["types"]]
        show_table(("<type", "tasks", "lists"), rows, indent="  ", gap=True)
    prediction = document.get("prediction")
    if prediction is None:
        return
    show(
        *pairs(
            [
                ("predicted", f"{us(prediction['latency_us'])} on one {prediction['gpu']}"),
                ("floor", us(prediction["floor_us"])),
                ("reached", f"{percent(prediction['floor_fraction'])} of the floor"),
            ]
        )
    )
    total = sum(row["waited_us"] + row["ran_us"] for row in document["types"])
    waits = [
        (
            row["type"],
            f"{row['tasks']:,}",
            size(row["bytes"]),
            percent(row["waited_us"] / total),
            percent(row["ran_us"] / total),
        )
        for row in document["types"]
    ]
    show_table(("<type", "tasks", "bytes", "waits", "runs"), waits, indent="  ", gap=True)


def _write_trace(path: Path, graph: MpkGraph, timing: Timing) -> None:
    from flywheel.report.chrome import chrome_trace
    from flywheel.report.mpk import mpk_slices

    facts = {"latency_us": timing.latency_us, "floor_us": timing.floor_us}
    title = f"MPK's task graph, rank {graph.rank}, on an {H200.name}, by the cost model"
    write_file(path, chrome_trace(title, mpk_slices(graph, timing), facts))
    note(f"wrote {path}; ui.perfetto.dev opens it")
