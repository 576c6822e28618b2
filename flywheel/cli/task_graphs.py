"""The results of `flywheel mpk`, as documents and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flywheel.cli.text import ABSENT, pairs, percent, show, show_table, size, us
from flywheel.interop.mpk.graph import MpkGraph
from flywheel.interop.mpk.rescheduling import EVENTS, LAUNCHES, ORDERS
from flywheel.interop.mpk.timing import H200, Bounds, Timing, hand_offs, shares
from flywheel.ir import Finding, ValidationResult
from flywheel.measure.floor import floor_fraction

if TYPE_CHECKING:
    from flywheel.search.task_graphs import Found


def verdict(result: ValidationResult) -> dict[str, Any]:
    """The result of a proof, JSON-ready."""

    def listed(findings: Sequence[Finding]) -> list[dict[str, Any]]:
        return [{"code": each.code, "message": each.message, "task": each.task} for each in findings]

    return {
        "ok": result.ok,
        "errors": listed(result.errors),
        "warnings": listed(result.warnings),
        "stats": dict(result.stats),
    }


def prediction(graph: MpkGraph, timing: Timing, bounds: Bounds) -> dict[str, Any]:
    """A predicted step and where its workers wait, JSON-ready."""
    return {
        "prediction": {
            "rank": graph.rank,
            "latency_us": timing.latency_us,
            "unqueued_us": bounds.unqueued_us,
            "path_us": bounds.path_us,
            "load_us": bounds.load_us,
            "floor_us": timing.floor_us,
            "floor_fraction": floor_fraction(timing.floor_us, timing.latency_us),
            "gpu": H200.name,
        },
        "types": [
            {"type": share.name, "tasks": share.tasks, "bytes": share.nbytes,
             "waited_us": share.waited_us, "ran_us": share.ran_us}
            for share in shares(graph, timing)
        ],
        "hand_offs": [
            {"type": each.name, "after": list(each.after), "tasks": each.tasks, "waited": each.waited,
             "median_us": each.median_us, "max_us": each.max_us}
            for each in hand_offs(graph, timing)
        ],
    }  # fmt: skip


def searched(found: Found) -> dict[str, Any]:
    """The trials of a search, JSON-ready. `best_us` of a knob's value is the least time of the trials with that
    value."""
    accepted = [(each.schedule, each.latency_us) for each in found.trials if each.latency_us is not None]
    knobs = [
        {"knob": knob, "value": value,
         "best_us": min((time_us for schedule, time_us in accepted if getattr(schedule, knob) == value), default=None)}
        for knob in ("order", "events", "launch", "workers")
        for value in sorted({getattr(each.schedule, knob) for each in found.trials})
    ]  # fmt: skip
    return {
        "given": asdict(found.trials[0]),
        "best": asdict(found.best),
        "knobs": knobs,
        "trials": [asdict(each) for each in found.trials],
    }


def show_results(document: Mapping[str, Any]) -> None:
    """Show a document as text, after its verdict."""
    if "relays" in document:
        show(*pairs([("added", f"{document['relays']} relays")]))
    for graph in document.get("graphs", ()):
        show(*pairs([(name, str(value)) for name, value in graph.items() if name != "types"]))
        rows = [(row["type"], f"{row['tasks']:,}", size(row["bytes"])) for row in graph["types"]]
        show_table(("<type", "tasks", "lists"), rows, indent="  ", gap=True)
    if "prediction" in document:
        _show_prediction(document)
    if "program" in document:
        made = document["program"]
        batch = f"{made['batch']} sequences" if made["batch"] > 1 else "one sequence"
        show(
            *pairs(
                [
                    ("converted", f"{made['tasks']:,} tasks and {made['counters']:,} counters, for {batch}, proved"),
                    ("program", f"{made['program_id']} of {made['model']} on {made['gpu']}"),
                    ("written", made["path"]),
                ]
            )
        )
    if "search" in document:
        _show_search(document["search"], document["bounds"])


def _show_prediction(document: Mapping[str, Any]) -> None:
    predicted, ranks = document["prediction"], document["ranks"]
    where = f"on one {predicted['gpu']}"
    if len(ranks) > 1:
        listed = ", ".join(f"{row['rank']}: {us(row['latency_us'])}" for row in ranks)
        where = f"by rank {predicted['rank']}, the slowest, on an {predicted['gpu']} ({listed})"
    show(
        *pairs(
            [
                ("predicted", f"{us(predicted['latency_us'])} {where}"),
                ("unqueued", f"{us(predicted['unqueued_us'])} with a worker for every task: what an order can gain"),
                ("critical path", f"{us(predicted['path_us'])} if every task had the GPU to itself"),
                ("load", f"{us(predicted['load_us'])} with the load spread evenly over all workers"),
                ("floor", us(predicted["floor_us"])),
                ("reached", f"{percent(predicted['floor_fraction'])} of the floor"),
            ]
        )
    )
    total = sum(row["waited_us"] + row["ran_us"] for row in document["types"])
    rows = [
        (row["type"], f"{row['tasks']:,}", size(row["bytes"]), percent(row["waited_us"] / total),
         percent(row["ran_us"] / total))
        for row in document["types"]
    ]  # fmt: skip
    show_table(("<type", "tasks", "bytes", "waits", "runs"), rows, indent="  ", gap=True)
    rows = [
        (row["type"], ", ".join(row["after"]) or "the start", f"{row['waited']:,} of {row['tasks']:,}",
         ABSENT if row["median_us"] is None else f"{row['median_us']:,.2f}",
         ABSENT if row["max_us"] is None else f"{row['max_us']:,.2f}")
        for row in document["hand_offs"]
    ]  # fmt: skip
    show_table(("<hand-off to", "<after", "waited", "median us", "max us"), rows, indent="  ", gap=True)


def _show_search(found: Mapping[str, Any], bounds: Mapping[str, Any]) -> None:
    given, best = found["given"], found["best"]
    if best["latency_us"] is None:
        show(*pairs([("best", f"none of {len(found['trials'])} schedules is safe")]))
        return
    gain = 1 - best["latency_us"] / given["latency_us"]
    show(
        *pairs(
            [
                ("given", f"{us(given['latency_us'])} with {given['schedule']['workers']} workers"),
                ("best", f"{us(best['latency_us'])}, {gain * 100:.2f} % less, of {len(found['trials'])} schedules, "
                         "all proved"),
                ("schedule", _words(best["schedule"])),
                ("unqueued", f"{us(bounds['unqueued_us'])} with a worker for every task: what an order can gain"),
            ]
        )
    )  # fmt: skip
    rows = [(row["knob"], str(row["value"]), ABSENT if row["best_us"] is None else us(row["best_us"]))
            for row in found["knobs"]]  # fmt: skip
    show_table(("<knob", "<value", "best"), rows, indent="  ", gap=True)


def _words(schedule: Mapping[str, Any]) -> str:
    """`order as in the file; events as in the file; launched all at the start; 128 workers`."""
    return (
        f"order {ORDERS[schedule['order']]}; events {EVENTS[schedule['events']]}; launched "
        f"{LAUNCHES[schedule['launch']]}; {schedule['workers']} workers"
    )
