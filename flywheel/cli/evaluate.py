"""`flywheel evaluate`: predict or measure one schedule in one call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from flywheel.cli.exits import REJECTED
from flywheel.cli.files import announce, announce_notes, read_config
from flywheel.cli.options import (
    SharedOption,
    batch_option,
    command,
    json_option,
    ranks_option,
    store_option,
    workload_options,
)
from flywheel.cli.text import pairs, percent, predicted, predicted_a_token, show, show_json, us, us_a_token
from flywheel.cli.warming import announce_compiling
from flywheel.cost_model import open_predictor
from flywheel.errors import UsageError
from flywheel.measure.latency import band_of
from flywheel.measure.record import row_title
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Schedule

if TYPE_CHECKING:
    from flywheel.api.evaluating import EvaluationResult

SHOWN: Final = 8
"""How many differences from the incumbent the text shows."""


@command
@click.argument("config_file", required=False, metavar="FILE|-")
@click.option("--config", "config_option", metavar="FILE|-", help="Same as the argument FILE.")
@workload_options
@batch_option
@ranks_option
@click.option("--measure", cls=SharedOption, type=click.Choice(["auto", "predict", "cuda"]), default="auto",
              show_default=True, help="cuda measures on this machine's GPU; predict uses the cost model; "
                   "auto takes cuda if that is the GPU to schedule for, else predict.")
@click.option("--machine", metavar="FILE", help="Predict with the constants that flywheel calibrate wrote to FILE.")
@store_option
@json_option
@click.pass_context
def evaluate(
    ctx: click.Context,
    config_file: str | None,
    config_option: str | None,
    model: str | None,
    gpu: str | None,
    dtype: str | None,
    weights: str | None,
    context: int | None,
    batch: int | None,
    ranks: int | None,
    measure: str,
    machine: str | None,
    store: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Lower, validate and predict or measure one ScheduleConfig or exported schedule, and compare it with the store's
    best for the same workload.

    The command writes nothing. Exit code 0 with a latency, 3 without one. A schedule names its model, GPU, dtype,
    context and batch; options override them.
    """
    from flywheel.api.evaluating import evaluate_work, settle_evaluation

    if (config_file is None) == (config_option is None):
        raise UsageError("evaluate: give one config, as FILE or as --config")
    given, unknown = read_config(config_file or config_option or "")
    named = {"model": model, "gpu": gpu, "dtype": dtype, "context": context, "batch": batch,
             "weights": weights}  # fmt: skip
    workload, notes = settle_evaluation(given, unknown, named, announce, ranks)
    predictor = open_predictor(machine, workload.target)
    config = given.config if isinstance(given, Schedule) else given
    announce_compiling()
    missing = ctx.get_parameter_source("store") is ParameterSource.DEFAULT and not Path(store).exists()
    found = evaluate_work(config, workload, measure, None if missing else store, predictor, notes)
    announce_notes(found.notes)
    document = found.document()
    if as_json:
        show_json(document)
    else:
        _show(document, _measured_before(found))
    if document["outcome"] not in ("measured", "predicted"):
        ctx.exit(REJECTED)


def _disturbed(strangers: int | None) -> str | None:
    return f"strangers ({strangers}): others computed on the GPU, so the time is doubtful" if strangers else None


def _measured_before(found: EvaluationResult) -> str | None:
    """The measured schedule that goes before a prediction, in words; None where there is none."""
    known = found.answer
    if known is None:
        return None
    whose = "this schedule" if known.config.config_id == found.config_id else known.words
    return f"{us_a_token(known.latency_us, found.batch)} by {whose}, on {known.measured_on}; no prediction beats that"


def _show(document: dict[str, Any], measured: str | None) -> None:
    latency_us = document["latency_us"] or document["predicted_us"]
    work = work_named(*(document[name] for name in ("model", "gpu", "dtype", "context", "batch", "weights")))
    verdict = document["outcome"].replace("_", " ")
    if document["latency_us"] is not None:
        verdict += f" {us_a_token(latency_us, document['batch'])}"
    elif latency_us is not None:
        band = band_of(document["gpu"], document["predictor"])
        verdict += f" {predicted_a_token(latency_us, document['batch'], band)}"
    if latency_us is not None:
        verdict += f"; weight floor {us(document['floor_us'])}, {percent(document['floor_fraction'])} reached"
    show(f"{work}: {verdict}")
    best, changed = document["incumbent"], document["changed"]
    against = None
    if best is not None:
        best_us = best["latency_us"] or best["predicted_us"]
        shown = predicted if best["latency_us"] is None else us
        against = f"{row_title(best['source'], best['trial'])} of {best['campaign']}, {shown(best_us)}"
        against += ", imported" if best["imported_from"] is not None else ""
        against += f"; this is {best['speedup']:.3f}x as fast" if best["speedup"] is not None else ""
        against += ", by predictions" if best["latency_us"] is None and best["speedup"] is not None else ""
        if best["rival_us"] is not None:
            against += f", in turn, where that took {us(best['rival_us'])}: "
            against += f"{best['gain_low_us']:,.1f} to {best['gain_high_us']:,.1f} us less (99 % interval)"
    knobs = [f"{name} {before} -> {after}" for name, (before, after) in (changed or {}).items()]
    if len(knobs) > SHOWN:
        knobs[SHOWN:] = [f"and {len(knobs) - SHOWN} more"]
    show(
        *pairs(
            [
                ("reason", document["reason"]),
                ("disturbed", _disturbed(document["strangers"])),
                ("config", document["config_id"]),
                ("program", document["program_id"]),
                ("measured", measured),
                ("incumbent", against),
                ("changed", None if changed is None else f"from the incumbent: {', '.join(knobs) or 'nothing'}"),
            ]
        )
    )
