"""Which of the schedules that come with flywheel fits a piece of work, and as what config."""

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
from flywheel.search.workload import Workload
from flywheel.store.shipped import Shipped, shipped_schedules

_NO_SHAPES: Final = ("name", "family", "rope_theta", "norm_eps", "max_position", "rope_scaling")
"""Fields of a spec that no schedule depends on."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A config for a workload and the schedule that it comes from; `exact` where that was found for the same work."""

    config: ScheduleConfig
    shipped: Shipped
    exact: bool


def find_shipped(workload: Workload) -> Fit | None:
    """The schedule of the same model (by its shapes), GPU, dtype and format of weights that is nearest in batch and
    context, carried into the workload's space where it is another context or batch; None where there is none, or none
    that this version's space can hold."""
    near = [
        (_off(source.batch, workload.batch), _off(source.context, workload.context), each.name, each, source)
        for each, source in _sources()
        if source.target.name == workload.target.name
        and (source.dtype, source.weights) == (workload.dtype, workload.weights)
        and _shapes(source.spec) == _shapes(workload.spec)
    ]
    if not near:
        return None
    off_batch, off_context, _, shipped, source = min(near, key=lambda found: found[:3])
    if not (off_batch or off_context):
        return Fit(shipped.schedule.config, shipped, True)
    try:
        return Fit(_carried(shipped, source, make_space(workload)), shipped, False)
    except ConfigError:
        return None


def shipped_starts(space: Space, most: int, known: Collection[str]) -> list[WarmStart]:
    """Up to `most` schedules for the space's GPU, of the works nearest to its own first, carried into the space; none
    that becomes a config of `known`, by id, there."""
    workload = space.workload
    near = sorted(
        (
            (distance(source, workload), each.name, each, source)
            for each, source in _sources()
            if source.target.name == workload.target.name
        ),
        key=lambda found: found[:2],
    )
    starts: dict[str, WarmStart] = {}
    for apart, _, each, source in near:
        asked, config = each.schedule, _carried(each, source, space)
        where = asked.model, asked.gpu, asked.dtype, asked.context, each.campaign, each.trial
        if config.config_id not in known:
            starts.setdefault(config.config_id, WarmStart(*where, apart, config))
    return list(starts.values())[:most]


def _carried(shipped: Shipped, source: Workload, space: Space) -> ScheduleConfig:
    """Raises ConfigError where the work that it was found for has no space today."""
    return space.to_config(carry(make_space(source).nearest(shipped.schedule.config), source, space))


def _sources() -> Iterator[tuple[Shipped, Workload]]:
    """The schedules whose model and GPU are known, with the work that they were found for."""
    for each in shipped_schedules():
        asked = each.schedule
        if asked.model in CATALOG and asked.gpu in TARGETS:
            spec, target = CATALOG[asked.model], TARGETS[asked.gpu]
            yield each, Workload(asked.model, spec, target, asked.dtype, asked.context, asked.batch, asked.weights)


def _off(one: int, other: int) -> float:
    """How many factors of 2 lie between two numbers."""
    return abs(log2(one / other))


def _shapes(spec: DecoderSpec) -> dict[str, Any]:
    return {name: value for name, value in asdict(spec).items() if name not in _NO_SHAPES}
