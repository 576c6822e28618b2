"""`flywheel evaluate`: predict or measure one schedule in one call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from click.core import ParameterSource

from flywheel.cli.exits import REJECTED
from flywheel.cli.files import load_config, settle_work
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
from flywheel.cost_model.band import band_of
from flywheel.errors import UsageError
from flywheel.measure.floor import floor_fraction
from flywheel.measure.outcome import Measured, Predicted, Rejected
from flywheel.measure.record import TrialRecord
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Schedule

if TYPE_CHECKING:
    from flywheel.search.appraise import Appraisal
    from flywheel.search.noise import Gain
    from flywheel.search.workload import Workload

SHOWN: Final = 8
"""How many differences from the incumbent the text shows."""
_NUMBERS: Final = ("predicted_us", "predictor", "latency_us", "p10_us", "p90_us", "samples", "throttle", "strangers")
"""Columns of the document beside outcome and reason; null where absent."""


@command
@click.argument("config_file", required=False, metavar="CONFIG|-")
@click.option("--config", "config_option", metavar="FILE|-", help="Same as the argument CONFIG.")
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
    from flywheel.search.appraise import appraise
    from flywheel.search.workload import make_workload, with_ranks
    from flywheel.store.sql import open_store

    if (config_file is None) == (config_option is None):
        raise UsageError("evaluate: give one config, as CONFIG or as --config")
    given = load_config(config_file or config_option or "")
    schedule = given if isinstance(given, Schedule) else None
    named = {"model": model, "gpu": gpu, "dtype": dtype, "context": context, "batch": batch,
             "weights": weights}  # fmt: skip
    settled = settle_work("evaluate", named, schedule)
    settled["gpu"] = with_ranks(settled["gpu"], ranks)
    workload = make_workload(**settled)
    predictor = open_predictor(machine, workload.target)
    config = given.config if isinstance(given, Schedule) else given
    announce_compiling()
    if ctx.get_parameter_source("store") is ParameterSource.DEFAULT and not Path(store).exists():
        found = appraise(config, workload, measure, None, predictor)
    else:
        with open_store(store, create=False) as opened:
            found = appraise(config, workload, measure, opened, predictor)
    document = _document(workload, config.config_id, found)
    if as_json:
        show_json(document)
    else:
        _show(document)
    if not isinstance(found.outcome, Measured | Predicted):
        ctx.exit(REJECTED)


def _document(workload: Workload, config_id: str, found: Appraisal) -> dict[str, Any]:
    from flywheel.search.rows import result_columns

    evaluation, outcome = found.evaluation, found.outcome
    columns = result_columns(outcome)
    latency_us = columns.get("latency_us", columns.get("predicted_us"))
    floor_us = evaluation.floor_us
    return {
        "model": workload.model,
        "gpu": workload.gpu,
        "dtype": workload.dtype,
        "context": workload.context,
        "batch": workload.batch,
        "weights": workload.stored,
        "measure": found.measure,
        "outcome": columns["outcome"],
        "codes": list(outcome.codes) if isinstance(outcome, Rejected) else [],
        "reason": columns.get("reason"),
        **{name: columns.get(name) for name in _NUMBERS},
        "floor_us": floor_us,
        "floor_fraction": None if floor_us is None or latency_us is None else floor_fraction(floor_us, latency_us),
        "config_id": config_id,
        "program_id": evaluation.program_id,
        "tasks": evaluation.tasks,
        "incumbent": None if found.incumbent is None else _incumbent(found.incumbent, latency_us, found.gained),
        "changed": None if found.incumbent is None else {name: list(pair) for name, pair in found.changed.items()},
    }


def _incumbent(record: TrialRecord, latency_us: float | None, gained: Gain | None) -> dict[str, Any]:
    best_us = record.objective_us if gained is None else gained.rival_us
    assert best_us is not None
    return {
        "campaign": record.campaign,
        "trial": record.trial,
        "config_id": record.config_id,
        "outcome": record.outcome,
        "imported_from": record.imported_from,
        "latency_us": record.latency_us,
        "predicted_us": record.predicted_us,
        "rival_us": None if gained is None else gained.rival_us,
        "gain_low_us": None if gained is None else gained.low_us,
        "gain_high_us": None if gained is None else gained.high_us,
        "speedup": None if latency_us is None else best_us / latency_us,
    }


def _disturbed(strangers: int | None) -> str | None:
    return f"strangers ({strangers}): others computed on the GPU, so the time is doubtful" if strangers else None


def _show(document: dict[str, Any]) -> None:
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
        against = f"trial {best['trial']} of {best['campaign']}, {shown(best_us)}"
        against += ", imported" if best["imported_from"] is not None else ""
        against += f"; this is {best['speedup']:.3f}x as fast" if best["speedup"] is not None else ""
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
                ("incumbent", against),
                ("changed", None if changed is None else f"from the incumbent: {', '.join(knobs) or 'nothing'}"),
            ]
        )
    )
