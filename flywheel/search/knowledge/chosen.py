"""The piece of work that decodes a model, and the schedule for it unless somebody names one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from flywheel.decode.source import Source
from flywheel.errors import ConfigError
from flywheel.ir import ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES
from flywheel.search.knowledge.shipped import find_shipped
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, default_context, find_target, gpus_of, with_ranks
from flywheel.store.schedule import Schedule

TRIED_FIRST: Final = "what a search tries first"


@dataclass(frozen=True, slots=True)
class Chosen:
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
    return Workload(source.name, source.spec, find_target(gpu), **settled, weights=weights, ranks=count)


def choose_schedule(workload: Workload) -> Chosen:
    """The shipped schedule for the workload if one fits and lowers, else the schedule that a search tries first."""
    fit, why = find_shipped(workload), ""
    if fit is not None:
        try:
            lower(workload.graph, fit.config, workload.target)
        except ConfigError as error:
            why = f"; the shipped schedule {fit.shipped.name} does not fit: {error}"
        else:
            found = f"measured {fit.shipped.median_us:,.1f} us where it was found"
            return Chosen(fit.config, f"shipped schedule {fit.shipped.name}, {found}")
    space = make_space(workload)
    return Chosen(space.to_config(space.known_good()[0]), TRIED_FIRST + why)
