"""What measurements of other works teach a search: rows in coordinates that works share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from typing import Final

import numpy as np

from flywheel.errors import FlywheelError
from flywheel.ir import config_from_dict
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import ranked
from flywheel.search.knobs import KNOBS, Choice, Value, heights_of
from flywheel.search.knowledge.warm import carry, distance, identity_of, work_of
from flywheel.search.sampling.expectation import Coordinates, Lessons, warped
from flywheel.search.sampling.gaussian import Array
from flywheel.search.space import Space, make_space
from flywheel.search.workload import Workload
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store
from flywheel.vm.gpu.sources import kernels_id

_ALIKE: Final = 0.3
"""What any two works have in common, as a fraction of what a work has in common with itself."""

_APART: Final = 3.0
"""Works at this `distance` have 1/e of the rest in common."""

_WITHIN: Final = 0.15
"""A row teaches only if its latency exceeds the best of its campaign by less than this fraction."""

_EACH, _ALL = 60, 900
"""The best rows of a campaign that teach, and the most of all campaigns, the nearest works' first."""

_NAMED: Final = frozenset({"fuse.attention"})
"""Knobs whose numbers are names: each fuses something else."""

_CAMPAIGNS: Final = 2
"""Campaigns of one work that teach, each of one version of the kernels."""

_STARTS: Final = 8
"""Nearest works whose best schedules are among the first candidates."""

NAMES: Final = tuple(knob.name for knob in KNOBS)
"""The knobs whose coordinates works share."""


@dataclass(frozen=True, slots=True)
class Taught:
    """A campaign's measurements, whose latencies can be compared: one work, one version of the kernels."""

    workload: Workload
    rows: Sequence[tuple[Choice, float]]


def axes_of(space: Space) -> dict[str, Coordinates]:
    """Of each knob of a space the coordinates of its values: what a value means for the work's geometry.

    Rows of a tile count as tiles an SM, KV blocks by their number, shared memory as a share of what a block may have;
    sizes by their logarithms, so that 1 is a factor of 2.
    """
    ordered = {knob.name: knob.ordered and knob.name not in _NAMED for knob in KNOBS}
    found = {}
    for each in space.dimensions:
        places = tuple([_coordinate(space, each.name, value) for value in each.values])
        found[each.name] = Coordinates(places, ordered[each.name])
    return found


def _coordinate(space: Space, name: str, value: Value) -> float:
    if isinstance(value, str):
        return float(next(knob for knob in KNOBS if knob.name == name).values(space.workload).index(value))
    if name in space.rows:
        return log2(sum(heights_of(space.workload, space.rows[name])) / value / space.workload.target.num_sms)
    if name == "kv_block":
        return log2(max(_attended(space.workload) / value, 1.0))
    if name == "smem":
        return 8.0 * value / space.workload.target.smem_bytes_per_block_optin
    if name.startswith("fuse."):
        return float(value)
    return log2(1 + value) if name == "depth" else log2(value) if value > 0 else -1.0  # one step below 1


def _attended(work: Workload) -> int:
    graph = work.graph
    return (graph.ranks[0] if graph.ranks else graph).most_attended


def lessons_for(space: Space, taught: Sequence[Taught]) -> Lessons | None:
    """What campaigns teach a search of the space; None where they teach nothing. Of one work, the first campaigns
    count."""
    kept: list[Taught] = []
    places: list[list[float]] = []
    losses: list[Array] = []
    starts: dict[str, Choice] = {}
    counts = Counter[str]()
    for each in sorted(taught, key=lambda each: distance(each.workload, space.workload)):
        rows = sorted(each.rows, key=_latency)[:_EACH]
        rows = [row for row in rows if row[1] < rows[0][1] * (1.0 + _WITHIN)]
        identity = identity_of(each.workload)
        many = counts[identity] == _CAMPAIGNS or len(places) + len(rows) > _ALL
        if many or len(rows) < 2 or (source := _space(each.workload)) is None:
            continue
        kept.append(each)
        counts[identity] += 1
        places += [[_coordinate(source, name, choice[name]) for name in NAMES] for choice, _ in rows]
        logs = warped(np.log([latency_us for _, latency_us in rows]))
        losses.append(logs - logs.min())
        if len(starts) < _STARTS:
            starts.setdefault(identity, carry(rows[0][0], each.workload, space))
    if not kept:
        return None
    works = [each.workload for each in kept]
    return Lessons(
        starts=tuple(starts.values()),
        axes=axes_of(space),
        names=NAMES,
        places=np.array(places),
        losses=np.concatenate(losses),
        campaign=np.repeat(np.arange(len(kept)), [len(each) for each in losses]),
        likeness=np.array([likeness(work, space.workload) for work in works]),
        between=np.array([[likeness(one, other) for other in works] for one in works]),
    )


def taught_by(store: Store, work: Workload, before: str) -> list[Taught]:
    """What the measurements in a store, made before a time, teach a search of the work.

    Rows of the very same work teach if other kernels were measured: a search with another seed is independent of those
    with today's. Campaigns of works that this version does not know are passed over. Raises StoreError.
    """
    found = [each.campaign for each in store.campaigns() if each.campaign.created_at < before]
    works = [(each, work_of(each)) for each in sorted(found, key=_made, reverse=True) if each.measure == "cuda"]
    near = sorted(
        ((distance(source, work), place, campaign, source)
         for place, (campaign, source) in enumerate(works) if source is not None),
        key=lambda each: each[:2],
    )  # fmt: skip
    taught: list[Taught] = []
    for _, _, campaign, source in near:
        rows = [row for row in ranked(store.trials(campaign.name)) if row.created_at < before]
        taught += _taught(source, rows, identity_of(source) == identity_of(work))
        if sum(len(each.rows) for each in taught) >= 2 * _ALL:
            break
    return taught


def _taught(work: Workload, records: Sequence[TrialRecord], same: bool) -> list[Taught]:
    """What a campaign's rows teach, by the kernels that were measured: of the `same` work not today's."""
    by_kernels: dict[str, list[tuple[Choice, float]]] = {}
    space = _space(work) if records else None
    if space is None:
        return []
    for record in records:
        kernels = record.kernels or ""
        full = len(by_kernels.get(kernels, ())) == _EACH
        if record.latency_us is None or record.is_doubtful or full or (same and kernels == kernels_id()):
            continue
        choice = space.to_choice(config_from_dict(json.loads(record.config)))
        if choice is not None:
            by_kernels.setdefault(kernels, []).append((choice, record.latency_us))
    return [Taught(work, rows) for rows in by_kernels.values()]


def _space(work: Workload) -> Space | None:
    """The space of a work of any version; None where this version has none."""
    try:
        return make_space(work)
    except FlywheelError:
        return None


def _made(campaign: Campaign) -> str:
    return campaign.created_at


def _latency(row: tuple[Choice, float]) -> float:
    return row[1]


def likeness(one: Workload, other: Workload) -> float:
    """How much two works have in common, 0..1."""
    return _ALIKE + (1.0 - _ALIKE) * float(np.exp(-distance(one, other) / _APART))
