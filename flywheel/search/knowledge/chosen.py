"""The piece of work that decodes a model, and the schedule for it unless somebody names one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from flywheel.decode.notes import Note, notes_of_defaults
from flywheel.decode.source import Source
from flywheel.errors import ConfigError, UnknownNameError
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES
from flywheel.search.knowledge.shipped import find_shipped
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, default_context, find_target, gpus_of, with_ranks
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Schedule

TRIED_FIRST: Final = "what a search tries first"


@dataclass(frozen=True, slots=True)
class ChosenConfig:
    """A config, and its origin in words."""

    config: ScheduleConfig
    words: str


def settle_work(
    source: Source,
    schedule: Schedule | None,
    here: str,
    *,
    gpu: str | None = None,
    dtype: str | None = None,
    context: int | None = None,
    batch: int | None = None,
    weights: str | None = None,
    ranks: int | None = None,
) -> Workload:
    """A model's piece of work.

    Each property is the argument's, else the schedule's, else a default: one GPU `here`, the checkpoint's dtype (bf16
    without a checkpoint) and formats of weights, a context of `default_context`, and one sequence. Raises
    UnknownNameError for an unknown name, and ConfigError for a context that the model does not have.
    """
    fallback: dict[str, Any] = {
        "gpu": here, "dtype": source.dtype or "bf16", "context": default_context(source.spec), "batch": 1,
    }  # fmt: skip
    settled: dict[str, Any] = {
        name: value if value is not None else getattr(schedule, name, fallback[name])
        for name, value in (("gpu", gpu), ("dtype", dtype), ("context", context), ("batch", batch))
    }
    if schedule is not None and weights is None and schedule.weights != schedule.dtype:
        weights = schedule.weights
    if weights is None and source.scheme is not None and settled["dtype"] in DTYPES:
        weights = source.formats(DTYPES[settled["dtype"]]).name(settled["dtype"])
    count, gpu = gpus_of(with_ranks(settled.pop("gpu"), ranks))
    return Workload(source.known_as, source.spec, find_target(gpu), **settled, weights=weights, ranks=count)


def notes_of_work(workload: Workload, schedule: Schedule | None, **asked: object) -> tuple[Note, ...]:
    """The note of the properties that `settle_work` took by default. `asked` are its arguments gpu, dtype and
    context."""
    settled = {"gpu": workload.gpu, "dtype": workload.dtype, "context": workload.context}
    return () if schedule is not None else notes_of_defaults(settled, asked)


def choose_schedule(workload: Workload, store: str | None = None) -> ChosenConfig:
    """The best measured schedule that a store (a URL or file) has of the workload, else the shipped one for it, else
    the schedule that a search tries first. One that this version does not lower gives way to the next. Raises
    StoreError."""
    why = ""
    for known in _known(workload, store):
        try:
            lower(workload.graph, known.config, workload.target)
        except ConfigError as error:
            why += f"; the {known.words.partition(',')[0]} does not fit: {error}"
        else:
            return ChosenConfig(known.config, known.words + why)
    space = make_space(workload)
    return ChosenConfig(space.to_config(space.known_good()[0]), TRIED_FIRST + why)


def choose_shipped(workload: Workload) -> ChosenConfig:
    """The shipped schedule of the workload. Raises UnknownNameError where none is shipped."""
    shipped = _shipped(workload)
    if shipped is None:
        work = workload.model, workload.gpu, workload.dtype, workload.context, workload.batch, workload.weights
        raise UnknownNameError(f"no schedule is shipped for {work_named(*work)}; flywheel search finds one")
    return shipped


def _known(workload: Workload, store: str | None) -> Iterator[ChosenConfig]:
    """Schedules that were measured, in the order in which they are taken."""
    best = None if store is None else _best_of(workload, store)
    if best is not None:
        yield best
    shipped = _shipped(workload)
    if shipped is not None:
        yield shipped


def _shipped(workload: Workload) -> ChosenConfig | None:
    fit = find_shipped(workload)
    if fit is None:
        return None
    found = f"measured {fit.shipped.median_us:,.1f} us where it was found"
    return ChosenConfig(fit.config, f"shipped schedule {fit.shipped.stem}, {found}")


def _best_of(workload: Workload, url: str) -> ChosenConfig | None:
    """The best measured schedule of the workload in a store; None if there is none."""
    from flywheel.search.knowledge.known import best_of_work
    from flywheel.store.sql import open_store

    with open_store(url, create=False) as store:
        row = best_of_work(store, workload, measured=True)
    if row is None:
        return None
    words = f"trial {row.trial} of campaign {row.campaign}, measured {row.latency_us:,.1f} us"
    return ChosenConfig(config_from_dict(json.loads(row.config)), words)
