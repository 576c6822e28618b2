"""The piece of work that decodes a model, and the schedule for it unless somebody names one."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

from flywheel.decode.notes import Note, notes_of_defaults
from flywheel.decode.source import Source
from flywheel.errors import ConfigError, UnknownNameError
from flywheel.ir import ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES
from flywheel.search.knowledge.shipped import find_shipped
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, default_context, find_target, gpus_of, with_ranks
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Schedule, Shipped

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
    """The best known schedule of the workload in a store (a URL or file) or shipped, by `best_known`, else the shipped
    one of another context or batch, else the schedule that a search tries first. The words say what was passed over.
    Raises StoreError."""
    told: list[str] = []
    known = _best_known(workload, store, told)
    shipped = _shipped(workload) if known is None else None
    if known is not None:
        chosen = known
    elif shipped is not None and _lowers(shipped, workload, told):
        chosen = shipped
    else:
        space = make_space(workload)
        chosen = ChosenConfig(space.to_config(space.known_good()[0]), TRIED_FIRST)
    return replace(chosen, words="; ".join([chosen.words, *told]))


def choose_shipped(workload: Workload) -> ChosenConfig:
    """The shipped schedule of the workload. Raises UnknownNameError where none is shipped."""
    shipped = _shipped(workload)
    if shipped is None:
        work = workload.model, workload.gpu, workload.dtype, workload.context, workload.batch, workload.weights
        raise UnknownNameError(f"no schedule is shipped for {work_named(*work)}; flywheel search finds one")
    return shipped


def _shipped(workload: Workload) -> ChosenConfig | None:
    fit = find_shipped(workload)
    if fit is None:
        return None
    found = f"measured {fit.shipped.median_us:,.1f} us where it was found"
    return ChosenConfig(fit.config, f"shipped schedule {fit.shipped.stem}, {found}")


def _best_known(workload: Workload, url: str | None, told: list[str]) -> ChosenConfig | None:
    from flywheel.search.knowledge.known import best_known
    from flywheel.store.sql import open_store

    with nullcontext() if url is None else open_store(url, create=False) as store:
        known = best_known(workload, store, tell=told.append)
    if known is None:
        return None
    where = " where it was found" if isinstance(known.origin, Shipped) else ""
    return ChosenConfig(known.config, f"{known.words}, measured {known.latency_us:,.1f} us{where}")


def _lowers(shipped: ChosenConfig, workload: Workload, told: list[str]) -> bool:
    """Whether a shipped schedule that was carried over is lowered; why not is told."""
    try:
        lower(workload.graph, shipped.config, workload.target)
    except ConfigError as error:
        told.append(f"the {shipped.words.partition(',')[0]} does not fit: {error}")
        return False
    return True
