"""`flywheel simulate`: a program's counters, its worst-case orders, and its predicted latency."""

from __future__ import annotations

from collections import Counter
from typing import Any

import click

from flywheel.cli.exits import REJECTED
from flywheel.cli.files import load_program
from flywheel.cli.inspect import operation, predict_latency
from flywheel.cli.options import command, json_option
from flywheel.cli.text import escaped, pairs, percent, show, show_json, size, table, us
from flywheel.cost_model import MODEL_VERSION, timeline
from flywheel.errors import ConfigError
from flywheel.ir import MegakernelProgram, validate
from flywheel.measure.floor import floor_fraction

SHOWN = 5
"""Stuck tasks and violations that the text shows; JSON has all."""


@command
@click.argument("file", metavar="FILE")
@click.option("--seeds", type=click.IntRange(min=0), default=16, show_default=True, help="Worst-case orders to try.")
@json_option
@click.pass_context
def simulate(ctx: click.Context, file: str, seeds: int, as_json: bool) -> None:
    """Run a program's counters, look for races in adversarial orders, and predict its latency; `-` is stdin.

    Exit code 3 if a task never fires, a race shows or the program is not valid.
    """
    program = load_program(file)
    document = run_program(program, seeds)
    if as_json:
        show_json(document)
    else:
        _show(file, document)
    if document["errors"] or document["stuck"] or document["violations"]:
        ctx.exit(REJECTED)


def run_program(program: MegakernelProgram, seeds: int) -> dict[str, Any]:
    """What the simulations say, JSON-ready.

    Races are not looked for in a malformed program. Without validity, target or SMs there is no prediction.
    """
    result = validate(program)
    order, stuck = program.simulate_counters()
    sound = result.ok or {finding.code for finding in result.errors} <= _SIMULATED
    document: dict[str, Any] = {
        "valid": result.ok,
        "errors": [str(finding) for finding in result.errors],
        "fired": len(order),
        "stuck": stuck,
        "seeds": seeds if sound else 0,
        "violations": program.simulate_adversarial(seeds) if sound else [],
        "prediction": None,
        "operations": [],
    }
    if result.ok and not stuck:
        try:
            return document | _predicted(program)
        except ConfigError as error:
            document["unpredicted"] = str(error)
    return document


_SIMULATED = frozenset({"cycle", "queue-deadlock", "partial-join", "race-read", "race-write", "unwritten-read"})
"""What is wrong with programs that are well-formed: firing orders can show it."""


def _predicted(program: MegakernelProgram) -> dict[str, Any]:
    prediction = predict_latency(program)
    running: Counter[str] = Counter()
    names = {task.id: operation(task.label) for task in program.tasks}
    for span in timeline(program):
        running[names[span.task]] += span.end_us - span.start_us  # type: ignore[assignment]  # a Counter adds floats, too
    total = sum(running.values())
    n_tasks = Counter(names.values())
    n_bytes: Counter[str] = Counter()
    for task in program.tasks:
        n_bytes[names[task.id]] += task.est_bytes
    finish = sum(prediction.finish_us)
    return {
        "prediction": {
            "latency_us": prediction.latency_us,
            "floor_us": prediction.floor_us,
            "floor_fraction": floor_fraction(prediction.floor_us, prediction.latency_us),
            "predictor": MODEL_VERSION,
            "busy": sum(prediction.busy_us) / finish,
            "blocked": sum(prediction.blocked_us) / finish,
            "starved": sum(prediction.starved_us) / finish,
        },
        "operations": [
            {"operation": name, "tasks": n_tasks[name], "bytes": n_bytes[name], "time_share": running[name] / total}
            for name in n_tasks
        ],
    }


def _show(file: str, document: dict[str, Any]) -> None:
    prediction = document["prediction"]
    shares = None
    if prediction is not None:
        shares = ", ".join(f"{name} {percent(prediction[name])}" for name in ("busy", "blocked", "starved"))
    stuck = document["stuck"]
    show(f"{escaped(file)}: {'valid' if document['valid'] else 'NOT VALID'}")
    show(
        pairs(
            [
                *(("error", error) for error in document["errors"][:SHOWN]),
                ("counters", f"{document['fired']:,} tasks fire, {len(stuck):,} stuck{_some(stuck)}"),
                ("orders", f"{document['seeds']} worst-case, {len(document['violations'])} violations"),
                *(("violation", violation) for violation in document["violations"][:SHOWN]),
                ("predicted", prediction and f"{us(prediction['latency_us'])} by the cost model "
                                             f"(version {prediction['predictor']})"),
                ("floor", prediction and us(prediction["floor_us"])),
                ("reached", prediction and f"{percent(prediction['floor_fraction'])} of the floor"),
                ("an SM is", shares),
                ("predicted", document.get("unpredicted") and f"no: {document['unpredicted']}"),
            ]
        )
    )  # fmt: skip
    if document["operations"]:
        rows = [
            (row["operation"], f"{row['tasks']:,}", size(row["bytes"]), percent(row["time_share"]))
            for row in sorted(document["operations"], key=lambda row: -row["time_share"])
        ]
        show("\n" + table(("<operation", "tasks", "bytes", "SM time"), rows, indent="  "))


def _some(stuck: list[int]) -> str:
    shown = ", ".join(map(str, stuck[:SHOWN]))
    return f": tasks {shown}{', ...' if len(stuck) > SHOWN else ''}" if stuck else ""
