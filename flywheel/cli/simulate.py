"""`flywheel simulate`: run a program's counters, fire its tasks in adversarial orders, and predict its latency."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import click

from flywheel.cli.exits import REJECTED
from flywheel.cli.files import load_program
from flywheel.cli.inspect import predict_latency
from flywheel.cli.options import (
    OutputFile,
    announce_written,
    check_writable,
    command,
    document_option,
    give,
    json_option,
    write_file,
)
from flywheel.cli.text import pairs, percent, predicted, show, show_table, size, us
from flywheel.cli.warming import announce_compiling
from flywheel.cost_model import STOCK, Predictor, State, open_predictor, state_shares, timeline
from flywheel.errors import ConfigError, InvalidProgramError, UsageError
from flywheel.ir import GpuTarget, MegakernelProgram, simulate_counters, try_orders, validate
from flywheel.measure.floor import floor_fraction
from flywheel.measure.latency import band_of
from flywheel.report.layer import operation

SHOWN = 5
"""How many stuck tasks and violations the text shows; JSON has all."""


@command
@click.argument("file", metavar="FILE")
@click.option("--orders", type=click.IntRange(min=0), default=16, show_default=True, metavar="N",
              help="Adversarial orders to try; fewer where a buffer is rewritten thousands of times.")
@click.option("--trace", type=OutputFile(), metavar="FILE.json",
              help="Write the predicted timeline, for ui.perfetto.dev or chrome://tracing.")
@click.option("--machine", metavar="FILE", help="Predict with the constants that flywheel calibrate wrote to FILE.")
@document_option
@json_option
@click.pass_context
def simulate(
    ctx: click.Context, file: str, orders: int, trace: Path | None, machine: str | None, output: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Run a program's counters, fire its tasks in adversarial orders to find races, and predict its latency; `-` is
    stdin.

    Exit code 3 if a task never fires, an order shows a race, or the program is not valid.
    """
    program = load_program(file)
    for path in (trace, output):
        if path is not None:
            check_writable(path)
    predictor = STOCK
    if machine is not None and program.target is not None:
        predictor = open_predictor(machine, program.target)
    announce_compiling()
    document = run_program(program, orders, predictor)
    give(document, output, as_json, lambda: _show(file, document, program.target))
    if document["errors"] or document["stuck"] or document["violations"]:
        ctx.exit(REJECTED)
    if trace is not None:
        _write_trace(program, document, trace, predictor)


def _write_trace(program: MegakernelProgram, document: dict[str, Any], path: Path, predictor: Predictor) -> None:
    """Write the predicted timeline. Raises UsageError for a program without a prediction."""
    from flywheel.report.chrome import chrome_trace, predicted_slices
    from flywheel.report.layer import BY_MODEL

    if document["prediction"] is None:
        raise UsageError(f"{path}: not written: the program has no prediction: {document['unpredicted']}")
    name = str(program.meta.get("model", "a program"))
    on = f" on {program.target.name}" if program.target is not None else ""
    slices = predicted_slices(program.tasks, timeline(program, predictor.machine))
    write_file(path, chrome_trace(f"{name}{on}, {BY_MODEL}", slices, document["prediction"]))
    announce_written(path, "; ui.perfetto.dev opens it")


def run_program(program: MegakernelProgram, seeds: int, predictor: Predictor = STOCK) -> dict[str, Any]:
    """What the simulations show, JSON-ready.

    A malformed program is not tested for races. A program that is invalid, has no target or SMs, or that no kernels
    run, gets no prediction.
    """
    result = validate(program)
    order, stuck = simulate_counters(program)
    sound = result.ok or {finding.code for finding in result.errors} <= _SIMULATED
    early, orders = try_orders(program, seeds) if sound else ([], 0)
    document: dict[str, Any] = {
        "valid": result.ok,
        "errors": [str(finding) for finding in result.errors],
        "fired": len(order),
        "stuck": stuck,
        "seeds": orders,
        "violations": early,
        "prediction": None,
        "operations": [],
    }
    if result.ok and not stuck:
        try:
            return document | _predicted(program, predictor)
        except (ConfigError, InvalidProgramError) as error:
            document["unpredicted"] = str(error)
    return document


_SIMULATED = frozenset({"cycle", "queue-deadlock", "partial-join", "race-read", "race-write", "unwritten-read"})
"""Findings in well-formed programs that a firing order can show."""


def _predicted(program: MegakernelProgram, predictor: Predictor) -> dict[str, Any]:
    prediction = predict_latency(program, predictor.machine)
    running: Counter[str] = Counter()
    names = {task.id: operation(task.label) for task in program.tasks}
    spans = timeline(program, predictor.machine)
    for span in spans:
        running[names[span.task]] += span.end_us - span.start_us  # type: ignore[assignment]  # a Counter adds floats, too
    total = sum(running.values())
    n_tasks = Counter(names.values())
    n_bytes: Counter[str] = Counter()
    for task in program.tasks:
        n_bytes[names[task.id]] += task.est_bytes
    assert program.target is not None  # it has a prediction
    last = max(span.end_us for span in spans)
    states = state_shares(spans, program.target.num_sms * program.ranks, 0.0, last)
    return {
        "prediction": {
            "latency_us": prediction.latency_us,
            "floor_us": prediction.floor_us,
            "floor_fraction": floor_fraction(prediction.floor_us, prediction.latency_us),
            "predictor": predictor.version,
            **{state.value: share for state, share in states.items()},
        },
        "operations": [
            {"operation": name, "tasks": n_tasks[name], "bytes": n_bytes[name], "time_share": running[name] / total}
            for name in n_tasks
        ],
    }


def _show(file: str, document: dict[str, Any], target: GpuTarget | None) -> None:
    prediction = document["prediction"]
    band = None if prediction is None or target is None else band_of(target.name, prediction["predictor"])
    shares = None
    if prediction is not None:
        shares = ", ".join(f"{name} {percent(prediction[name])}" for name in State)
    stuck = document["stuck"]
    show(f"{file}: {'valid' if document['valid'] else 'NOT VALID'}")
    show(
        *pairs(
            [
                *(("error", error) for error in document["errors"][:SHOWN]),
                ("counters", f"{document['fired']:,} tasks fire, {len(stuck):,} stuck{_some(stuck)}"),
                ("orders", f"{document['seeds']} worst-case, {len(document['violations'])} violations"),
                *(("violation", violation) for violation in document["violations"][:SHOWN]),
                ("predicted", prediction and f"{predicted(prediction['latency_us'], band)}, by the cost model "
                                             f"(version {prediction['predictor']})"),
                ("floor", prediction and us(prediction["floor_us"])),
                ("reached", prediction and f"{percent(prediction['floor_fraction'])} of the floor"),
                ("an SM", shares),
                ("predicted", document.get("unpredicted") and f"no: {document['unpredicted']}"),
            ]
        )
    )  # fmt: skip
    if document["operations"]:
        rows = [
            (row["operation"], f"{row['tasks']:,}", size(row["bytes"]), percent(row["time_share"]))
            for row in sorted(document["operations"], key=lambda row: -row["time_share"])
        ]
        show_table(("<operation", "tasks", "bytes", "SM time"), rows, indent="  ", gap=True)


def _some(stuck: list[int]) -> str:
    shown = ", ".join(map(str, stuck[:SHOWN]))
    return f": tasks {shown}{', ...' if len(stuck) > SHOWN else ''}" if stuck else ""
