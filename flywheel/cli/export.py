"""`flywheel export`: the best schedule, its program, or the trials, as files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from flywheel.cli.files import announce, as_stored
from flywheel.cli.options import (
    DEFAULTS,
    STDOUT,
    NameOf,
    announce_written,
    batch_option,
    check_writable,
    command,
    json_option,
    output_option,
    store_option,
    workload_options,
    write_file,
)
from flywheel.cli.text import note, show_json, us, us_of
from flywheel.errors import FlywheelError, StoreError, UnknownNameError, UsageError
from flywheel.interop.t4 import dump_t4, to_t4
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.measure.latency import band_of
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import disturbed, trials_of
from flywheel.models.catalog import resolve_model
from flywheel.models.formats import weights_name
from flywheel.search.provenance import find_campaign, origin_text
from flywheel.store.schedule import Shipped
from flywheel.store.tsv import to_csv, to_tsv

if TYPE_CHECKING:
    from flywheel.search.workload import Workload
    from flywheel.store.sql import Store

FORMATS = ("schedule", "program", "bundle", "tsv", "csv", "t4", "optuna")
_OF_CAMPAIGN = ("schedule", "program", "bundle", "optuna")
"""Formats that take the newest campaign where the user names nothing."""


@command
@click.option("--format", "form", type=NameOf(FORMATS), required=True,
              help="schedule: the best trial's config, numbers and provenance. program: the program of that trial. "
                   "bundle: a directory with the compiled program, which decodes a checkpoint without torch. "
                   "tsv, csv: all trials. t4: trials of one model and GPU in Kernel Tuner's format. "
                   "optuna: a campaign as a study in a SQLite file, for optuna-dashboard.")  # fmt: skip
@click.option(
    "--config",
    "schedule_file",
    metavar="FILE|shipped",
    help="With --format bundle: bundle an exported or the shipped schedule instead of a trial.",
)
@click.option("--campaign", metavar="NAME", help="Only trials of this campaign; a unique prefix is enough.")
@workload_options
@batch_option
@click.option(
    "--measured/--predicted",
    default=None,
    help="Only trials with this kind of latency.  [default: measured if there are any]",
)
@store_option
@output_option
@json_option
@click.pass_context
def export(
    ctx: click.Context,
    form: str,
    schedule_file: str | None,
    campaign: str | None,
    model: str | None,
    gpu: str | None,
    dtype: str | None,
    weights: str | None,
    context: int | None,
    batch: int | None,
    measured: bool | None,
    store: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write the best trial of a campaign, or of a model on a GPU, or all trials, to stdout or a file.

    Without --campaign, --model and --gpu, a schedule, program, bundle or study comes from the newest campaign. A
    measured schedule of the same work, in the store or shipped, goes before a prediction, unless --predicted asks.

    The output depends only on the stored trials: repeating the command gives the same bytes.
    """
    from flywheel.cli.bundling import bundle_answer, bundle_file
    from flywheel.store.sql import open_store

    named = {"campaign": campaign, **as_stored(model, gpu), "dtype": dtype, "context": context, "batch": batch,
             "weights": None if weights is None else weights_name(weights, dtype or DEFAULTS["dtype"])}  # fmt: skip
    facts: dict[str, Any]
    if schedule_file is not None:
        given = {"model": model, "gpu": gpu, "dtype": dtype, "context": context, "batch": batch, "weights": weights}
        _show_bundle(bundle_file(schedule_file, form, given, output), output, as_json)
        return
    if output is not None and form != "bundle":
        check_writable(output)
    with open_store(store, create=False) as opened:
        if campaign is not None or (form in _OF_CAMPAIGN and not any((model, gpu))):
            named["campaign"] = find_campaign(opened, campaign).name
        wanted = _wanted(ctx, named)
        if form == "optuna":
            _write_study(opened, wanted, output, as_json)
            return
        if form == "bundle":
            answer = _answer(opened, wanted, measured, campaign)
            _show_bundle(bundle_answer(opened, answer, output), output, as_json)
            return
        if form in ("tsv", "csv"):
            records = _rows(opened, wanted, measured)
            text: str | Iterable[str] = to_tsv(records) if form == "tsv" else to_csv(records)
            facts = {"trials": [asdict(record) for record in records]} if output is None else {"trials": len(records)}
        elif form == "t4":
            document = _t4(_rows(opened, wanted, None), measured)
            text, facts = dump_t4(document), {"trials": len(document["results"])}
        else:
            text, facts = _one(form, opened, _answer(opened, wanted, measured, campaign))
    _hand_out(form, text, facts, output, as_json)


def _hand_out(
    form: str, text: str | Iterable[str], facts: Mapping[str, Any], output: Path | None, as_json: bool
) -> None:
    """Write a text, or its pieces, to `output`, or to stdout."""
    if output is not None:
        write_file(output, text)
        announce_written(output)
    if as_json and (output is not None or form in ("tsv", "csv")):
        show_json({"format": form, "path": None if output is None else str(output), **facts})
    elif output is None:
        write_file(STDOUT, text)


def _show_bundle(facts: Mapping[str, Any], output: Path | None, as_json: bool) -> None:
    if as_json:
        show_json({"format": "bundle", "path": str(output), **facts})


def _write_study(store: Store, wanted: Mapping[str, Any], output: Path | None, as_json: bool) -> None:
    """Write the trials of one campaign as an Optuna study. Raises UsageError without a campaign or a new file."""
    from flywheel.search.knowledge.optuna_file import write_study

    if "campaign" not in wanted or output is None:
        raise UsageError("export: --format optuna needs one --campaign and --output FILE")
    if output == STDOUT:
        raise UsageError("export: --output - is stdout, and --format optuna writes a database; name a file")
    check_writable(output)
    campaign = find_campaign(store, wanted["campaign"])
    trials = write_study(campaign, store.trials(campaign.name), output)
    note(f"wrote {output}: study {campaign.name!r} of {trials:,} trials; optuna-dashboard sqlite:///{output} shows it")
    if as_json:
        show_json({"format": "optuna", "path": str(output), "campaign": campaign.name, "trials": trials})


def _wanted(ctx: click.Context, names: Mapping[str, Any]) -> dict[str, Any]:
    """Columns and the values that rows must have there.

    With --campaign, options from the environment do not count: they may describe another campaign.
    """
    return {
        name: value
        for name, value in names.items()
        if value is not None
        and (
            names["campaign"] is None
            or name == "campaign"
            or ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        )
    }


def _rows(store: Store, wanted: Mapping[str, Any], measured: bool | None) -> list[TrialRecord]:
    kept = None if measured is None else "measured" if measured else "predicted"
    return [
        record
        for summary in store.campaigns()
        for record in (
            store.trials(summary.campaign.name) if wanted.get("campaign") in (None, summary.campaign.name) else []
        )
        if all(getattr(record, name) == value for name, value in wanted.items()) and kept in (None, record.outcome)
    ]


def _t4(records: list[TrialRecord], measured: bool | None) -> dict[str, Any]:
    """The trials in the format T4. Raises UnknownNameError where no trial has a latency of the kind wanted."""
    if measured is None:
        measured = any(record.outcome == "measured" for record in records)
    kind = "measured" if measured else "predicted"
    if not any(record.outcome == kind for record in records):
        raise UnknownNameError(f"export: no {kind} trial; flywheel campaigns shows what there is")
    document = to_t4(records, measured=measured)
    kept = document["results"]
    valid = sum(result["invalidity"] == "correct" for result in kept)
    rest = len(trials_of(records)) - len(kept)
    left = f"; left out {rest} whose latency is of another kind or whose config is another trial's" if rest else ""
    note(f"{len(kept)} configs, {valid} of them {kind}{left}")
    return document


def _answer(
    store: Store, wanted: Mapping[str, Any], measured: bool | None, campaign: str | None
) -> TrialRecord | Shipped:
    """The measured schedule that answers for the row of `_best`: of the `campaign` that the user named, else the best
    that is known of the row's work. A prediction is the answer where predictions were asked for, or nothing was
    measured. Raises as `_best` and, where this version lowers no such row, UnknownNameError."""
    from flywheel.search.knowledge.known import answer_of, best_known
    from flywheel.search.knowledge.lowered import best_of_work

    record = _best(store, wanted, measured)
    try:
        work = _work_of(record)
    except FlywheelError:  # its checkpoint is not on this machine, so nothing else is known of its work
        return record
    if record.is_predicted:
        known = None if measured is False else best_known(work, store, tell=announce)
    elif campaign is None and "campaign" in wanted:
        known = answer_of(work, store, wanted["campaign"], best_known(work, store, tell=announce))
    else:
        known = best_known(work, store, campaign=campaign, tell=announce)
    if known is not None and record.is_predicted:
        note(f"{known.words}, measured {us(known.latency_us)} on {known.measured_on}, goes before the prediction of "
             f"{record.campaign}, {us_of(record)}; --predicted exports that")  # fmt: skip
    if known is not None:
        return known.origin
    own = wanted.get("campaign")
    row = best_of_work(store, work, measured=False, campaign=own, predictor=record.predictor, tell=announce)
    if row is None or not record.is_predicted:
        raise UnknownNameError(f"export: this version lowers no {record.kind} schedule of {record.campaign}")
    return row


def _one(form: str, store: Store, answer: TrialRecord | Shipped) -> tuple[str | Iterable[str], dict[str, Any]]:
    """One schedule as a schedule file or a program, and facts about it."""
    if isinstance(answer, TrialRecord):
        text = origin_text(answer, store) if form == "schedule" else _program(answer)
        said = f"{answer.campaign}, {answer.title}: {answer.kind} {us_of(answer)}"
        if answer.is_predicted and answer.predicted_us is not None:
            said += f", {band_of(answer.gpu, answer.predictor or '').words(answer.predicted_us)}"
        note(said)
        return text, {"campaign": answer.campaign, "trial": answer.trial, "program_id": answer.program_id}
    from flywheel.cli.bundling import work_of

    asked = answer.schedule
    text = origin_text(answer, store) if form == "schedule" else _lowered(work_of(answer), asked.config)
    return text, {"shipped": answer.stem, "program_id": asked.program_id}


def _best(store: Store, wanted: Mapping[str, Any], measured: bool | None) -> TrialRecord:
    """The fastest row that `wanted` matches.

    An imported row counts only where this store measured none. Of predicted rows, this version's cost model goes first.

    Raises UsageError where rows of different work would compete, UnknownNameError where no row matches.
    """
    from flywheel.cost_model import MODEL_VERSION

    if "campaign" not in wanted:
        for name in ("model", "gpu"):
            if name not in wanted:
                raise UsageError(f"export: --{name} is missing; give --campaign, or --model and --gpu")
        usual = {**{name: DEFAULTS[name] for name in ("dtype", "batch")}, "context": _usual_context(wanted["model"])}
        wanted = {**usual, **wanted}
        wanted = {"weights": wanted["dtype"], **wanted}
    best = None
    if measured is not False:
        best = store.best(measured=True, **wanted)
    if best is None and measured is not True:
        best = store.best(measured=False, predictor=MODEL_VERSION, **wanted) or store.best(measured=False, **wanted)
    if best is None:
        kind = {None: "measured or predicted", True: "measured", False: "predicted"}[measured]
        what = ", ".join(f"{name} {value}" for name, value in wanted.items())
        raise UnknownNameError(f"store {store.name}: no {kind} trial of {what}; flywheel campaigns shows what there is")
    if best.is_doubtful:
        note(f"flywheel: {best.title} of {best.campaign}: {disturbed(best)}; no row was measured on a quiet GPU")
    return best


def _usual_context(model: str) -> int:
    """The context of a search that names none."""
    from flywheel.search.workload import default_context

    try:
        return default_context(resolve_model(model))
    except FlywheelError:  # its checkpoint is not on this machine, so its longest context is not known
        return int(DEFAULTS["context"])


def _work_of(record: TrialRecord) -> Workload:
    from flywheel.search.workload import make_workload

    return make_workload(record.model, record.gpu, record.dtype, record.context, record.batch, record.weights)


def _program(record: TrialRecord) -> Iterable[str]:
    """Lower the row's config again. Raises StoreError where this version makes another program of it."""
    return _lowered(_work_of(record), config_from_dict(json.loads(record.config)), record)


def _lowered(workload: Workload, config: ScheduleConfig, record: TrialRecord | None = None) -> Iterable[str]:
    """The program of a config as text. Raises StoreError where it is not the one of its row."""
    from flywheel.ir import program_pieces
    from flywheel.lowering.lower import lower
    from flywheel.plan import is_another, program_id

    program = lower(workload.graph, config, workload.target)
    made = program_id(program)
    if record is not None and is_another(record.program_id, made):
        raise StoreError(
            f"{record.title} of campaign {record.campaign!r}: this version lowers its config to program {made}, "
            f"the row has {record.program_id}; search again with --fresh"
        )
    return chain(program_pieces(program), "\n")
