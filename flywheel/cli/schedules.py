"""`flywheel schedules`: the measured schedules that come with flywheel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from flywheel.cli.options import SharedOption, announce_written, command, json_option, output_option, write_file
from flywheel.cli.text import Command, pairs, show, show_json, show_table, us, us_a_token
from flywheel.errors import UnknownNameError, UsageError
from flywheel.ir.files import parse_json
from flywheel.ir.show import did_you_mean
from flywheel.measure.latency import tokens_per_s
from flywheel.models.catalog import resolve_model
from flywheel.search.workload import find_target, gpus_of
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Shipped, shipped_schedules


@command
@click.argument("name", required=False)
@click.option("--model", cls=SharedOption, metavar="NAME", help="List only schedules of this model.")
@click.option("--gpu", cls=SharedOption, metavar="NAME", help="List only schedules of this GPU; 2xh200 is two.")
@output_option
@json_option
def schedules(name: str | None, model: str | None, gpu: str | None, output: Path | None, as_json: bool) -> None:
    """List the schedules that come with flywheel, or show the schedule NAME.

    Each was measured, and its numbers compared with the oracle's. With NAME, --output writes the file that --config of
    other commands takes.
    """
    wanted = {"model": model, "gpu": gpu}
    narrowed = [option for option, value in wanted.items() if value is not None]
    if name is not None and narrowed:
        raise UsageError(f"schedules: --{narrowed[0]} narrows the list; {name} is one schedule")
    if model is not None:
        wanted["model"] = resolve_model(model).name
    if gpu is not None:
        find_target(gpus_of(gpu)[1])
    if name is not None:
        _give(find_shipped_named(name), output, as_json)
        return
    if output is not None:
        raise UsageError("schedules: --output writes one schedule; give its NAME")
    found = [
        each
        for each in shipped_schedules()
        if all(value is None or getattr(each.schedule, key) == value.lower() for key, value in wanted.items())
    ]
    if as_json:
        show_json({"schedules": [_described(each) for each in found]})
    elif found:
        _list(found)
    else:
        asked = ", ".join(f"{key} {value}" for key, value in wanted.items() if value is not None)
        show(f"no schedule of {asked} comes with flywheel; flywheel search finds one")


def find_shipped_named(name: str) -> Shipped:
    """The shipped schedule of that name, or the only one whose name begins with it. Raises UnknownNameError."""
    found = [each for each in shipped_schedules() if each.stem.startswith(name.removesuffix(".json"))]
    exact = [each for each in found if each.stem == name.removesuffix(".json")]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        raise UnknownNameError(f"schedule {name!r}: the names of {len(found)} shipped schedules begin with it")
    hint = did_you_mean(name, (each.stem for each in shipped_schedules()))
    raise UnknownNameError(f"schedule {name!r}{hint} is not a shipped one; flywheel schedules lists them")


def _give(found: Shipped, output: Path | None, as_json: bool) -> None:
    """Write the schedule's file, or show what it is."""
    if output is not None:
        write_file(output, found.text())
        announce_written(output)
    if as_json:
        show_json(parse_json(found.text()) if output is None else {"path": str(output), **_described(found)})
    elif output is None:
        _show(found)


def _described(found: Shipped) -> dict[str, Any]:
    asked = found.schedule
    return {
        "name": found.stem,
        **{key: getattr(asked, key) for key in ("model", "gpu", "dtype", "weights", "context", "batch", "config_id")},
        "median_us": found.median_us,
        "tokens_per_s": tokens_per_s(found.median_us, asked.batch),
        **{key: getattr(found, key) for key in ("gpu_name", "kernels", "created_at", "campaign", "trial", "table")},
    }


def _list(found: list[Shipped]) -> None:
    headers = ("<!schedule", "<model", "<GPU", "<weights", "context", "batch", "us a step", "tokens/s", "?<measured")
    rows = [
        (
            each.stem, each.schedule.model, each.schedule.gpu, each.schedule.weights, f"{each.schedule.context:,}",
            str(each.schedule.batch), f"{each.median_us:,.1f}",
            f"{tokens_per_s(each.median_us, each.schedule.batch):,.0f}", each.created_at[:10],
        )
        for each in found
    ]  # fmt: skip
    show_table(headers, rows)


def _show(found: Shipped) -> None:
    asked = found.schedule
    work = work_named(asked.model, asked.gpu, asked.dtype, asked.context, asked.batch, asked.weights)
    document = parse_json(found.text())
    show(f"{work}: measured {us_a_token(found.median_us, asked.batch)}")
    show(
        *pairs(
            [
                ("schedule", found.stem),
                ("measured on", f"{found.gpu_name}, {found.created_at[:10]}, kernels {found.kernels}"),
                ("10 % to 90 %", f"{us(document['measured']['p10_us'])} to {us(document['measured']['p90_us'])}"),
                ("config", f"{asked.config_id}, program {asked.program_id}"),
                ("from", f"{found.title} of campaign {found.campaign}, {found.table}"),
                ("file", Command(["flywheel", "schedules", found.stem, "--output", "best.json"])),
            ]
        )
    )
