"""`flywheel mpk`: prove, summarise, predict, repair, reschedule and convert task graphs of Mirage's persistent
kernel."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from flywheel.cli.exits import REJECTED
from flywheel.cli.options import (
    STDOUT,
    OutputFile,
    announce_written,
    check_writable,
    command,
    json_option,
    setting,
    write_file,
)
from flywheel.cli.task_graphs import prediction, searched, show_results, verdict
from flywheel.cli.text import show, show_json
from flywheel.errors import InvalidProgramError, IrFormatError, UsageError
from flywheel.interop.mpk.explain import describe
from flywheel.interop.mpk.graph import MpkGraph, read_graph, write_graph
from flywheel.interop.mpk.joint import n_ranks
from flywheel.interop.mpk.proof import check as prove
from flywheel.interop.mpk.timing import H200, Timing, bounds_of, predict_step
from flywheel.ir import Finding, ValidationResult
from flywheel.ir.files import MAX_FILE_BYTES
from flywheel.ir.show import did_you_mean, escaped

ACTIONS: Final = ("check", "inspect", "predict", "repair", "search", "convert")
UNREADABLE: Final = "unreadable"
"""Code of the error of a file that holds no task graph."""
MAX_CONTEXT: Final = 1 << 20
_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "context": ("predict", "search", "convert"),
    "trace": ("predict",),
    "picture": ("predict",),
    "output": ("repair", "search", "convert"),
    "model": ("convert",),
    "gpu": ("convert",),
    "dtype": ("convert",),
    "trials": ("search",),
    "seed": ("search",),
}
"""Option -> the actions that take it, where not all do."""


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments and options of one command line."""

    action: str
    files: tuple[str, ...]
    workers: int | None
    aliases: Mapping[str, str]
    context: int
    trace: Path | None
    picture: Path | None
    output: Path | None
    model: str | None
    gpu: str
    dtype: str
    trials: int
    seed: int


@command
@click.argument("action", type=click.Choice(ACTIONS), metavar="|".join(ACTIONS))
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Prove or predict with the order of MPK's queues for N workers.  [default: any placement; predict: 128; "
    "search: tries 96 to 131]",
)
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    type=setting,
    metavar="NAME=TENSOR",
    help="Tensor NAME shares the memory of TENSOR; repeatable.",
)
@click.option(
    "--context",
    type=click.IntRange(1, MAX_CONTEXT),
    metavar="TOKENS",
    help="predict, search: tokens that a step attends to; convert: positions of the KV cache.  [default: 512]",
)
@click.option(
    "--trace",
    type=OutputFile(),
    metavar="FILE.json",
    help="predict: write the timeline, for ui.perfetto.dev or chrome://tracing.",
)
@click.option(
    "--picture",
    type=OutputFile(),
    metavar="FILE.svg",
    help="predict: draw the middle layer's tasks on every worker.",
)
@click.option(
    "-o",
    "--output",
    type=OutputFile(),
    metavar="FILE|DIR",
    help="repair, search: directory for the new files, which keep their names, made if need be; convert: file of the "
    "program.",
)
@click.option("--model", metavar="NAME|DIR", help="convert: the graph's model, by name or directory.")
@click.option("--gpu", metavar="NAME", help="convert: the GPU that the program is for.  [default: h200]")
@click.option(
    "--dtype",
    type=click.Choice(["bf16", "f16", "f32"]),
    metavar="bf16|f16|f32",
    help="convert: type of weights and activations.  [default: bf16]",
)
@click.option("--trials", type=click.IntRange(min=1), metavar="N", help="search: schedules to try.  [default: 64]")
@click.option("--seed", type=click.IntRange(0, 2**31 - 1), metavar="N",
              help="search: seed of the sampler.  [default: 0]")
@json_option
@click.pass_context
def mpk(
    ctx: click.Context, /, action: str, files: tuple[str, ...], aliases: tuple[tuple[str, str], ...], as_json: bool,
    workers: int | None, **options: Any,
) -> None:  # fmt: skip
    """Judge a task_graph.json of Mirage MPK. Several FILEs are the ranks of one program, and `-` is stdin.

    check proves it free of deadlocks and races. inspect summarises it. predict says how long a step takes on an H200,
    and where its workers wait. repair adds events that order its races. search tries other orders, launches and numbers
    of workers. Both write files that MPK loads. convert makes a flywheel program, which verify and simulate take.

    Exit code 3 if a file is unreadable or the graph is not safe.
    """
    given = _settled(action, files, workers, dict(aliases), options)
    graphs, result = _read(files)
    _check_aliases(given, graphs)
    more: dict[str, Any] = {}
    if result.ok and action == "repair":
        graphs, relays, result = _repaired(given, graphs)
        more["relays"] = relays
    elif result.ok:
        count = workers or (H200.workers if action in ("predict", "search") else None)
        result = prove(graphs, count, given.aliases)
    drawn = None
    if graphs and action == "inspect":
        more["graphs"] = [describe(graph) for graph in graphs]
    elif action == "predict" and result.ok:
        timed = [(graph, predict_step(graph, H200, given.context, workers)) for graph in graphs]
        drawn = max(timed, key=lambda pair: pair[1].latency_us)
        more |= prediction(*drawn, bounds_of(drawn[0], H200, given.context))
        more["ranks"] = [{"rank": graph.rank, "latency_us": timing.latency_us} for graph, timing in timed]
    elif action == "search" and result.ok:
        more |= _searched(given, graphs)
    elif action == "convert" and result.ok:
        more["program"] = _converted(given, graphs)
    document = {"paths": list(files), **verdict(result), **more}
    if as_json:
        show_json(document)
    else:
        show(*f"{escaped(', '.join(files))}: {result.report()}".split("\n"))
        show_results(document)
    if not result.ok:
        ctx.exit(REJECTED)
    if drawn is not None:
        _draw(given, *drawn)


def _settled(
    action: str, files: tuple[str, ...], workers: int | None, aliases: Mapping[str, str], options: Mapping[str, Any]
) -> _Given:
    """The arguments as one record. Raises UsageError for options of another action, and for files that cannot be
    written."""
    for name, value in options.items():
        if value is not None and action not in _OF[name]:
            raise UsageError(f"mpk {action}: --{name} goes with {' and '.join(_OF[name])}")
    for path in (options["trace"], options["picture"]):
        if path is not None:
            check_writable(path)
    _check_output(action, files, options["output"])
    if action == "convert" and (options["model"] is None or len(files) > 1):
        raise UsageError("mpk convert: give one FILE, and its model as --model")
    defaults = {"context": 512, "trials": 64, "seed": 0, "gpu": H200.name, "dtype": "bf16"}
    filled: dict[str, Any] = {name: defaults.get(name) if value is None else value for name, value in options.items()}
    return _Given(action, files, workers, aliases, **filled)


def _check_aliases(given: _Given, graphs: Sequence[MpkGraph]) -> None:
    """Raises UsageError for a name that no tensor of the files has."""
    if not given.aliases or not graphs:
        return
    known = {tensor.name for graph in graphs for task in graph.tasks for tensor in (*task.inputs, *task.outputs)}
    for name in (each for pair in given.aliases.items() for each in pair):
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(f"mpk {given.action}: --alias: {name!r}{hint} is no tensor of the files")


def _check_output(action: str, files: Sequence[str], output: Path | None) -> None:
    """Raises UsageError."""
    if output is None:
        if action in ("repair", "convert"):
            raise UsageError(f"mpk {action}: give --output, where to write")
    elif action == "convert":
        check_writable(output)
    elif output == STDOUT:
        raise UsageError(f"mpk {action}: --output - is stdout, and the new files go into a directory; name one")
    elif not _can_be_made(output):
        raise UsageError(f"mpk {action}: --output: {output} is no directory, and cannot be made one")
    elif "-" in files or len({Path(path).name for path in files}) < len(files):
        raise UsageError(f"mpk {action}: new files take the given names, so these must differ and not be stdin")


def _can_be_made(folder: Path) -> bool:
    """Whether files can be written into a directory, which is made if need be."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return there.is_dir() and os.access(there, os.W_OK)


def _all_there(given: _Given, graphs: Sequence[MpkGraph]) -> None:
    ranks = sorted(graph.rank for graph in graphs)
    if ranks != list(range(n_ranks(graphs))):
        raise UsageError(f"mpk {given.action}: the files have ranks {ranks} of {n_ranks(graphs)}; give one a rank")


def _repaired(given: _Given, graphs: list[MpkGraph]) -> tuple[list[MpkGraph], int, ValidationResult]:
    """The graphs with their races ordered; they are written if the proof accepts them. Raises UsageError."""
    from flywheel.interop.mpk.repairing import repair

    _all_there(given, graphs)
    found = repair(graphs, given.workers, given.aliases)
    if found.result.ok:
        _write(given, graphs, found.graphs)
    return list(found.graphs), found.relays, found.result


def _searched(given: _Given, graphs: Sequence[MpkGraph]) -> dict[str, Any]:
    """What a search found. The best graphs are written where --output says. Raises UsageError."""
    from flywheel.search.task_graphs import WORKERS, search_graphs

    _all_there(given, graphs)
    tried = WORKERS if given.workers is None else (given.workers,)
    found = search_graphs(graphs, given.aliases, tried, given.trials, seed=given.seed, context=given.context)
    if given.output is not None:
        _write(given, graphs, found.graphs)
    bounds = [bounds_of(graph, H200, given.context) for graph in graphs]
    slowest = max(bounds, key=lambda each: each.unqueued_us)
    return {
        "search": searched(found),
        "bounds": {"unqueued_us": slowest.unqueued_us, "path_us": slowest.path_us, "load_us": slowest.load_us},
    }


def _converted(given: _Given, graphs: Sequence[MpkGraph]) -> dict[str, Any]:
    """Convert a graph, prove the program and write it; facts about the program.

    Raises UnsupportedModelError, what looking up the model and the GPU raises, and InvalidProgramError where the proof
    rejects the program.
    """
    from flywheel.interop.mpk.converting import convert
    from flywheel.ir import program_pieces, validate
    from flywheel.models.catalog import resolve_model
    from flywheel.models.decoder import DTYPES
    from flywheel.plan import program_id
    from flywheel.search.workload import find_target

    assert given.model is not None and given.output is not None
    spec, target = resolve_model(given.model), find_target(given.gpu)
    program = convert(graphs[0], spec, target, given.context, DTYPES[given.dtype], given.workers or H200.workers)
    proved = validate(program, strict=True)
    if not proved.ok:
        raise InvalidProgramError(f"mpk convert: {proved.errors[0].message}")
    write_file(given.output, program_pieces(program))
    return {
        "model": spec.name, "gpu": target.name, "tasks": len(program.tasks), "counters": len(program.counters),
        "batch": program.meta["batch"], "program_id": program_id(program), "path": str(given.output),
    }  # fmt: skip


def _write(given: _Given, graphs: Sequence[MpkGraph], made: Sequence[MpkGraph]) -> None:
    assert given.output is not None
    by_rank = {graph.rank: graph for graph in made}
    try:
        given.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"mpk {given.action}: --output: {given.output}: {error.strerror or error}") from None
    for path, graph in zip(given.files, graphs, strict=True):
        changed = by_rank[graph.rank]
        write_file(given.output / Path(path).name, write_graph(changed.document, changed.layout).decode("utf-8"))


def _read(files: Sequence[str]) -> tuple[list[MpkGraph], ValidationResult]:
    graphs, errors = [], []
    for path in files:
        try:
            graphs.append(read_graph(_bytes(path)))
        except IrFormatError as error:
            errors.append(Finding(UNREADABLE, f"{path}: {error}"))
    return ([], ValidationResult(False, tuple(errors))) if errors else (graphs, ValidationResult(True))


def _bytes(path: str) -> bytes:
    """The file's bytes. Raises IrFormatError where it is unreadable or too large."""
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


def _draw(given: _Given, graph: MpkGraph, timing: Timing) -> None:
    """Write the timeline and its picture, where asked for."""
    from flywheel.report.chrome import chrome_trace
    from flywheel.report.layer import layer
    from flywheel.report.mpk import mpk_slices, mpk_timeline
    from flywheel.report.svg import standalone

    if given.trace is not None:
        facts = {"latency_us": timing.latency_us, "floor_us": timing.floor_us}
        title = f"MPK's task graph, rank {graph.rank}, on an {H200.name}, by the cost model"
        write_file(given.trace, chrome_trace(title, mpk_slices(graph, timing), facts))
        announce_written(given.trace, "; ui.perfetto.dev opens it")
    if given.picture is not None:
        write_file(given.picture, standalone(layer(mpk_timeline(graph, timing, H200.name), place="worker")))
        announce_written(given.picture)
