"""Which schedule a command takes for each workload: a file's, the store's best, or the one that comes with flywheel."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from flywheel.cli.options import DEFAULT_STORE
from flywheel.cli.text import note
from flywheel.errors import UnknownNameError
from flywheel.ir import ScheduleConfig
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Schedule

if TYPE_CHECKING:
    from flywheel.decode.notes import Note
    from flywheel.decode.source import Source
    from flywheel.search.workload import Workload
    from flywheel.store.campaign import Campaign
    from flywheel.store.sql import Store


@dataclass(frozen=True, slots=True)
class Chosen:
    """A schedule for one workload. `origin` says where the schedule is from, JSON-ready."""

    workload: Workload
    config: ScheduleConfig
    origin: Mapping[str, Any]
    notes: tuple[Note, ...] = ()


def store_here(ctx: click.Context) -> str | None:
    """The store that `--store` or its variable names, else the default one where its file exists, else None."""
    store: str = ctx.params["store"]
    named = ctx.get_parameter_source("store") is not ParameterSource.DEFAULT
    return store if named or Path(store).exists() else None


def from_file(workload: Workload, given: Schedule | ScheduleConfig, path: str) -> Chosen:
    """A file's schedule, applied to `workload` whatever it was found for."""
    config = given.config if isinstance(given, Schedule) else given
    origin: dict[str, Any] = {"file": path, "config_id": config.config_id}
    if isinstance(given, Schedule):
        work = ("model", "gpu", "dtype", "weights", "context", "batch")
        origin["found_for"] = {name: getattr(given, name) for name in work}
    return Chosen(workload, config, origin)


def notes_of_works(
    workloads: Sequence[Workload], source: Source, given: Schedule | Campaign | None, seed: int, **asked: object
) -> tuple[Note, ...]:
    """The notes of a model's workloads on one GPU, whose schedule or campaign may be `given`. `asked` are the options
    gpu, dtype and context, None where not given. Raises as `load_spec`."""
    from flywheel.decode.notes import notes_of_defaults, notes_of_source
    from flywheel.models.decoder import DTYPES
    from flywheel.search.workload import notes_of_another

    first, contexts = workloads[0], dict.fromkeys(str(each.context) for each in workloads)
    settled = {"gpu": first.target.name, "dtype": first.dtype, "context": " and ".join(contexts)}
    defaults = () if given is not None else notes_of_defaults(settled, asked)
    another = notes_of_another(given if isinstance(given, Schedule) else None, first.spec)
    return (*notes_of_source(source, DTYPES[first.dtype], seed), *defaults, *another)


def campaign_named(url: str, name: str | None) -> Campaign:
    """The campaign that `find_campaign` returns. Without a name, its name is announced."""
    from flywheel.search.provenance import find_campaign
    from flywheel.store.sql import open_store

    with open_store(url, create=False) as store:
        found = find_campaign(store, name)
    if name is None:
        note(f"flywheel: the newest campaign, {found.name}")
    return found


def known(workloads: Sequence[Workload], url: str | None, campaign: str | None) -> list[Chosen]:
    """The best known schedule of each workload, by `best_known`, of one campaign of the store or of all.

    Where nothing was measured and no campaign is named, it is the shipped one of another context or batch. Raises
    StoreError, and UnknownNameError with the search to run where there is no schedule.
    """
    from flywheel.store.sql import open_store

    if url is None:
        return [_known(workload, None, None) for workload in workloads]
    with open_store(url, create=False) as store:
        return [_known(workload, store, campaign) for workload in workloads]


def _known(workload: Workload, store: Store | None, campaign: str | None) -> Chosen:
    from flywheel.decode.notes import Note
    from flywheel.measure.record import TrialRecord
    from flywheel.search.knowledge.known import best_known
    from flywheel.search.knowledge.shipped import find_shipped

    told: list[str] = []
    found = best_known(workload, store, campaign=campaign, tell=told.append)
    fit = None if campaign is not None else find_shipped(workload)
    origin: dict[str, Any]
    if found is not None and isinstance(row := found.origin, TrialRecord):
        assert store is not None
        config, columns = found.config, ("campaign", "trial", "config_id", "latency_us", "program_id", "imported_from",
                                         "created_at")  # fmt: skip
        origin = {"title": row.title, **{name: getattr(row, name) for name in columns}}
    elif fit is not None:
        config, why = fit.config, "" if told else "the store has no measurement; "
        told.append(f"{why}taking the shipped schedule {fit.shipped.name}")
        origin = {"file": f"shipped {fit.shipped.name}", "config_id": fit.config.config_id, "exact": fit.exact,
                  "table": fit.shipped.table}  # fmt: skip
    else:
        raise _nothing_known(workload, DEFAULT_STORE if store is None else store.name, campaign, told)
    work = f"context {workload.context}, batch {workload.batch}"
    return Chosen(workload, config, origin, tuple([Note("schedule", f"{work}: {line}") for line in told]))


def _nothing_known(workload: Workload, store: str, campaign: str | None, told: Sequence[str]) -> UnknownNameError:
    model, gpu, dtype, context, batch = (
        workload.model, workload.gpu, workload.dtype, workload.context, workload.batch,
    )  # fmt: skip
    search = ["flywheel", "search", "--model", model, "--gpu", gpu, "--dtype", dtype, "--context", str(context)]
    search += [] if workload.weights is None else ["--weights", workload.weights]
    search += [*(["--batch", str(batch)] if batch > 1 else []), "--measure", "cuda"]
    where = f"store {store}" + ("" if campaign is None else f", campaign {campaign!r}")
    work = work_named(model, gpu, dtype, context, batch, workload.weights)
    return UnknownNameError(
        f"{where}: no measured schedule of {work}{''.join(f' ({line})' for line in told)}; "
        f"find one with: {shlex.join(search)}, or give another's with --config"
    )
