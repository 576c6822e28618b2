"""`flywheel import`: read trials, or schedules to try first, from a file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from flywheel.cli.files import as_stored, read_argument, settle_work
from flywheel.cli.options import (
    DEFAULT_STORE,
    DEFAULTS,
    SharedOption,
    batch_option,
    command,
    json_option,
    store_option,
    workload_options,
)
from flywheel.cli.text import counts, note, pairs, show, show_json
from flywheel.errors import IrFormatError, StoreError, UsageError
from flywheel.interop.amk import MARK, PriorTable, read_results
from flywheel.ir import ScheduleConfig
from flywheel.ir.files import json_of, read_text
from flywheel.ir.show import listed
from flywheel.measure.standing import trials_of
from flywheel.models.decoder import MAX_BATCH
from flywheel.models.formats import weights_name
from flywheel.search.provenance import search_command
from flywheel.search.spec import DEFAULT_TRIALS, check_name
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Schedule, schedule_from_document
from flywheel.store.tsv import is_table, names_batch, read_table

if TYPE_CHECKING:
    from flywheel.store.campaign import Campaign
    from flywheel.store.sql import Store

PRIORS: Final = 10
"""How many schedules of a foreign table a search tries first, unless --best says otherwise."""


@partial(command, name="import")
@click.argument("path", metavar="FILE|-")
@click.option("--name", required=True, metavar="NAME", help="Name of the new campaign.")
@click.option("--campaign", metavar="NAME", help="Take only this campaign's trials from a table of several.")
@workload_options
@batch_option
@click.option("--measure", cls=SharedOption, type=click.Choice(["auto", "predict", "cuda"]), default="auto",
              show_default=True, help="For imported schedules: how the new campaign's search gets latencies.")
@click.option("--corpus", type=click.Path(path_type=Path), metavar="FILE.jsonl",
              help="AutoMegaKernel's corpus, which has the schedules that its table names by id.")
@click.option("--best", type=click.IntRange(1), default=PRIORS, show_default=True, metavar="N",
              help="Take the N best schedules of a foreign table.")
@store_option
@json_option
def import_file(
    path: str,
    name: str,
    campaign: str | None,
    batch: int | None,
    measure: str,
    corpus: Path | None,
    best: int,
    store: str,
    as_json: bool,
    **work: Any,
) -> None:  # fmt: skip
    """Make a campaign from a file.

    From a table that flywheel export wrote as TSV or CSV, or pandas or a spreadsheet as CSV, the campaign takes the
    trials, marked as imported: all or none. Repeating the command adds what is missing. If the table has no column
    batch, --batch says how many sequences a step had.

    From an AutoMegaKernel results.tsv or an exported schedule, the campaign takes schedules and no trials. Its search
    tries those schedules first. The file's numbers only order them, and never count as results.
    """
    from flywheel.store.sql import open_store

    check_name("import", name)
    if batch is not None and not 1 <= batch <= MAX_BATCH:
        raise UsageError(f"import: --batch {batch} is not in 1..{MAX_BATCH}")
    work["batch"] = batch
    text = read_argument(path, newlines=False)
    first = text.partition("\n")[0].rstrip("\r").split("\t")
    with open_store(store) as opened:
        is_schedule = text.lstrip().startswith("{")
        if campaign is not None and (is_schedule or MARK in first):
            raise UsageError(f"{path}: has no campaigns; --campaign goes with flywheel's tables")
        if corpus is not None and (is_schedule or MARK not in first):
            raise UsageError(f"{path}: names no schedules by id; --corpus goes with AutoMegaKernel's tables")
        if is_schedule:
            schedule = _schedule(json_of(text, path), path)
            settled = settle_work("import", work, schedule)
            document = _priors(opened, name, settled, measure, [schedule.config])
        elif MARK in first:
            settled = settle_work("import", work, None)
            table = _foreign(text, read_text(corpus) if corpus is not None else "", path)
            document = _priors(opened, name, settled, measure, table.configs[:best]) | {"skipped": dict(table.skipped)}
        elif is_table(text):
            work |= as_stored(work["model"], work["gpu"])
            document = _trials(opened, name, text, path, {"campaign": campaign, **work})
        else:
            raise UsageError(f"{path}: is no table of flywheel's or AutoMegaKernel's trials and no exported schedule")
    if store != DEFAULT_STORE:
        document["command"] += f" --store {shlex.quote(document['store'])}"
    if as_json:
        show_json(document)
    else:
        _show(document)


def _trials(store: Store, name: str, text: str, path: str, wanted: dict[str, Any]) -> dict[str, Any]:
    from flywheel.search.knowledge.importing import import_trials

    asked = {column: value for column, value in wanted.items() if value is not None}
    if "weights" in asked:
        asked["weights"] = weights_name(asked["weights"], asked.get("dtype", DEFAULTS["dtype"]))
    if "batch" not in asked and not names_batch(text):
        raise UsageError(f"{path}: has no column batch; give --batch, the number of sequences in a step of its trials")
    try:
        table = read_table(text, asked.get("batch"))
    except StoreError as error:
        raise UsageError(f"{path}: {error}") from None
    if table.ignored:
        note(f"{path}: ignored columns, which are none of a trial's: {listed(map(repr, table.ignored))}")
    kept = [each for each in table.records if all(getattr(each, column) == value for column, value in asked.items())]
    if not kept:
        what = ", ".join(f"{column} {value}" for column, value in asked.items())
        raise UsageError(f"{path}: no trials{f' of {what}' if what else ''}")
    try:
        made, new = import_trials(store, name, kept)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    trials = len(trials_of(store.trials(made.name)))
    return {**_document(store, made, trials), "trials": len(trials_of(kept)), "new_trials": new, "priors": 0}


def _schedule(parsed: object, path: str) -> Schedule:
    try:
        return schedule_from_document(parsed, path)
    except StoreError as error:
        raise UsageError(str(error)) from None


def _foreign(text: str, corpus: str, path: str) -> PriorTable:
    try:
        table = read_results(text, corpus)
    except IrFormatError as error:
        raise IrFormatError(f"{path}: {error}") from None
    if table.ignored:
        note(f"{path}: ignored columns, which describe no schedule: {listed(table.ignored)}")
    if table.skipped:
        note(f"{path}: skipped rows, which have no schedule to try: {counts(table.skipped)}")
    if not table.configs:
        raise UsageError(f"{path}: no row has a schedule; if rows name schedules by id, give their file as --corpus")
    return table


def _priors(
    store: Store, name: str, work: dict[str, Any], measure: str, configs: Sequence[ScheduleConfig]
) -> dict[str, Any]:
    from flywheel.measure.environment import capture_environment
    from flywheel.search.knowledge.importing import import_priors
    from flywheel.search.trials.device import missing_modules, settle_measure
    from flywheel.search.workload import make_workload

    workload = make_workload(**work)
    settled = settle_measure(measure, workload.target, capture_environment().device, missing_modules())
    made = import_priors(store, name, workload, settled, configs)
    return {**_document(store, made, 0), "trials": 0, "new_trials": 0, "priors": len(configs)}


def _document(store: Store, campaign: Campaign, trials: int) -> dict[str, Any]:
    """The facts of a campaign with that many trials, and the command that makes DEFAULT_TRIALS more."""
    return {
        "campaign": campaign.name,
        "model": campaign.model,
        "gpu": campaign.gpu,
        "dtype": campaign.dtype,
        "context": campaign.context,
        "batch": campaign.batch,
        "weights": campaign.weights,
        "measure": campaign.measure,
        "store": store.name,
        "command": search_command(campaign, trials + DEFAULT_TRIALS),
    }


def _show(document: dict[str, Any]) -> None:
    work = work_named(*(document[name] for name in ("model", "gpu", "dtype", "context", "batch", "weights")))
    brought = f"{document['trials']:,} imported trials, {document['new_trials']:,} of them new"
    if document["priors"]:
        brought = f"{document['priors']} schedules to try first, no trials"
    show(f"{document['campaign']}: {work}: {brought}")
    show(*pairs([("store", document["store"]), ("next", document["command"])]))
