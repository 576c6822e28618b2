"""Finds schedules that come with flywheel for a piece of work, and carries them into its space."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from math import log2
from typing import Any, Final

from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, ScheduleConfig
from flywheel.models.catalog import CATALOG
from flywheel.models.spec import DecoderSpec
from flywheel.search.knowledge.warm import WarmStart, carry, distance
from flywheel.search.space import Space, make_space
from flywheel.search.workload import Workload, gpus_of
from flywheel.store.schedule import Shipped, shipped_schedules

_NO_SHAPES: Final = (
    "name", "family", "rope_theta", "norm_eps", "max_position", "rope_scaling", "local_rope", "window", "windowed"
)  # fmt: skip
"""Fields of a spec that no schedule depends on."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A config for a workload, and the shipped schedule that it comes from. `exact` says that both are of one work."""

    config: ScheduleConfig
    shipped: Shipped
    exact: bool


def find_shipped(workload: Workload) -> Fit | None:
    """The shipped schedule that is nearest to the workload in GPUs, batch and context; None where none fits.

    Its model's shapes, kind of GPU, dtype and format of weights must be the workload's. A schedule of another number of
    GPUs, batch or context is carried into the workload's space; where this version has no such space, nothing fits.
    """
    near = [
        (_apart(source, workload), each.name, each, source)
        for each, source in _sources()
        if source.target.name == workload.target.name
        and (source.dtype, source.weights) == (workload.dtype, workload.weights)
        and _shapes(source.spec) == _shapes(workload.spec)
    ]
    if not near:
        return None
    apart, _, shipped, source = min(near, key=lambda found: found[:2])
    if not any(apart):
        return Fit(shipped.schedule.config, shipped, True)
    try:
        return Fit(_carried(shipped, source, make_space(workload)), shipped, False)
    except ConfigError:
        return None


def nearest_shipped(workload: Workload) -> Shipped | None:
    """The shipped schedule of the most similar work on the workload's GPU; None where none is for that GPU."""
    near = (
        (distance(source, workload), each.name, each)
        for each, source in _sources()
        if source.target.name == workload.target.name
    )
    return min(near, key=lambda found: found[:2], default=(0.0, "", None))[2]


def shipped_starts(space: Space, most: int, known: Collection[str]) -> list[WarmStart]:
    """Shipped schedules for the space's GPU, carried into the space: up to `most`, those of the nearest works first.

    The one for the space's own work comes before them, and comes even if `most` is 0. Schedules whose config in the
    space has an id in `known` are left out.
    """
    workload = space.workload
    fit = find_shipped(workload)
    own = fit.shipped.name if fit is not None and fit.exact else None
    near = sorted(
        (
            (each.name != own, distance(source, workload), each.name, each, source)
            for each, source in _sources()
            if source.target.name == workload.target.name
        ),
        key=lambda found: found[:3],
    )
    starts: dict[str, WarmStart] = {}
    for other, apart, _, each, source in near:
        asked, config = each.schedule, _carried(each, source, space)
        where = asked.model, asked.gpu, asked.dtype, asked.context, each.campaign, each.trial
        if config.config_id not in known and (len(starts) < most or not other):
            starts.setdefault(config.config_id, WarmStart(*where, apart, config, asked.weights))
    return list(starts.values())


def _carried(shipped: Shipped, source: Workload, space: Space) -> ScheduleConfig:
    """A shipped schedule as a config of `space`. Raises ConfigError where its own work `source` has no space today."""
    return space.to_config(carry(make_space(source).nearest(shipped.schedule.config), source, space))


def _sources() -> Iterator[tuple[Shipped, Workload]]:
    """The shipped schedules whose model and GPU are known here, each with the work that it was found for."""
    for each in shipped_schedules():
        asked = each.schedule
        ranks, gpu = gpus_of(asked.gpu)
        if asked.model in CATALOG and gpu in TARGETS:
            work = asked.dtype, asked.context, asked.batch, asked.weights, ranks
            yield each, Workload(asked.model, CATALOG[asked.model], TARGETS[gpu], *work)


def _apart(one: Workload, other: Workload) -> tuple[float, float, float]:
    """The distance of two workloads in GPUs, batch and context."""
    return _off(one.ranks, other.ranks), _off(one.batch, other.batch), _off(one.context, other.context)


def _off(one: int, other: int) -> float:
    """The distance of two positive numbers in powers of 2."""
    return abs(log2(one / other))


def _shapes(spec: DecoderSpec) -> dict[str, Any]:
    return {name: value for name, value in asdict(spec).items() if name not in _NO_SHAPES}
