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
from flywheel.interop.mpk.joint import n_ranks
from flywheel.interop.mpk.predicting import predict_step, shares, unqueued_us
from flywheel.interop.mpk.proof import check as prove
from flywheel.interop.mpk.reading import read_graph, write_graph
from flywheel.interop.mpk.timing import H200, Timing
from flywheel.ir import Finding, ValidationResult
from flywheel.ir.files import MAX_FILE_BYTES
from flywheel.measure.floor import floor_fraction

ACTIONS = ("check", "inspect", "predict", "repair")
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
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIRECTORY",
    help="repair: write the files there, under their names.",
)
@json_option
@click.pass_context
def mpk(
    ctx: click.Context, action: str, files: tuple[str, ...], workers: int | None, aliases: tuple[tuple[str, str], ...],
    context: int, trace: Path | None, output: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Judge a task_graph.json of Mirage MPK; several FILEs are the ranks of one program, and `-` is stdin.

    check proves it free of deadlocks and races, inspect says what is in it, predict what a step takes on an H200 and
    where its workers wait. repair adds what orders its races, in files that MPK loads. Exit code 3 if a file is
    unreadable or the graph is not safe.
    """
    _check_options(action, files, trace, output)
    graphs, result = _read(files)
    relays = None
    if result.ok and action == "repair":
        graphs, relays, result = _repaired(files, graphs, workers, dict(aliases), output)
    elif result.ok:
        result = prove(graphs, H200.workers if action == "predict" and workers is None else workers, dict(aliases))
    document = {"paths": list(files), **_verdict(result)}
    if relays is not None:
        document["relays"] = relays
    timing = None
    if graphs and action == "inspect":
        document |= {"graphs": [describe(graph) for graph in graphs]}
    elif action == "predict" and result.ok:
        timing = predict_step(graphs[0], H200, context, workers)
        document |= _prediction(graphs[0], timing, unqueued_us(graphs[0], H200, context))
    if as_json:
        show_json(document)
    else:
        show(*f"{escaped(', '.join(files))}: {result.report()}".split("\n"))
        _show(document)
    if not result.ok:
        ctx.exit(REJECTED)
    if trace is not None and timing is not None:
        _write_trace(trace, graphs[0], timing)


def _check_options(action: str, files: Sequence[str], trace: Path | None, output: Path | None) -> None:
    """Raises UsageError for options of another action, and where repair cannot write its files."""
    if trace is not None:
        if action != "predict":
            raise UsageError(f"mpk {action}: --trace is of predict")
        check_writable(trace)
    if (output is None) != (action != "repair"):
        raise UsageError("mpk repair: --output says where to write" if output is None else f"mpk {action}: no --output")
    names = [Path(path).name for path in files]
    if output is not None and ("-" in files or len(set(names)) < len(names)):
        raise UsageError("mpk repair: files with names of their own are written, not stdin")


def _repaired(
    files: Sequence[str], graphs: list[MpkGraph], workers: int | None, aliases: dict[str, str], output: Path | None
) -> tuple[list[MpkGraph], int, ValidationResult]:
    """Graphs with their races ordered, written to `output` if the proof accepts them. Raises UsageError."""
    from flywheel.interop.mpk.repairing import repair

    ranks = sorted(graph.rank for graph in graphs)
    if ranks != list(range(n_ranks(graphs))):
        raise UsageError(f"mpk repair: files of ranks {ranks} of {n_ranks(graphs)}; want one of each")
    found = repair(graphs, workers, aliases)
    if found.result.ok and output is not None:
        by_rank = {graph.rank: graph for graph in found.graphs}
        for path, graph in zip(files, graphs, strict=True):
            mended = by_rank[graph.rank]
            write_file(output / Path(path).name, write_graph(mended.document, mended.layout).decode("utf-8"))
    return list(found.graphs), found.relays, found.result


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


def _prediction(graph: MpkGraph, timing: Timing, free_us: float) -> dict[str, Any]:
    return {
        "prediction": {
            "latency_us": timing.latency_us,
            "unqueued_us": free_us,
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
    if "relays" in document:
        show(*pairs([("added", f"{document['relays']} relays")]))
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
                ("unqueued", f"{us(prediction['unqueued_us'])} with a worker for every task: what an order can gain"),
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
