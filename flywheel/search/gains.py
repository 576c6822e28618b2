"""What a search gained: its best schedule beside those that were known before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flywheel.measure.latency import RESOLUTION
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, ranked, tied_with
from flywheel.search.space import Space, make_space, pins_of
from flywheel.search.workload import Workload, make_workload
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store


@dataclass(frozen=True, slots=True, repr=False)
class Gains:
    """What a campaign gained. `start` is the row of the schedule that any search of this work tries first, and `seed`
    the fastest row of the schedules that were known before, `start` among them; None where the campaign did not try
    one. All rows have a latency of the kind of `best`.

    `sure` says whether the final could tell `best` from `seed`; None where no final compared the two.
    """

    start: TrialRecord | None
    seed: TrialRecord | None
    best: TrialRecord
    sure: bool | None

    @property
    def over_start(self) -> float | None:
        """How much faster `best` is than `start`, as `faster` says it; None without a `start`."""
        return None if self.start is None else faster(self.best, self.start)

    @property
    def over_seed(self) -> float | None:
        """How much faster `best` is than `seed`; None without a `seed`."""
        return None if self.seed is None else faster(self.best, self.seed)

    def __repr__(self) -> str:
        return f"<Gains: {gains_in_words(self) or 'no schedule that was known before has a latency'}>"


def gains_of(campaign: Campaign, records: Sequence[TrialRecord]) -> Gains | None:
    """As `gained`, of a campaign with these rows. Raises as `make_workload`, where its model is not on this machine."""
    return gained(make_space(workload_of(campaign), pins_of(campaign)), records)


def gains_in(store: Store, campaign: Campaign) -> Gains | None:
    """As `gains_of`, of a campaign of the store, from few of its rows. Raises StoreError, too."""
    space = make_space(workload_of(campaign), pins_of(campaign))
    return gained(space, store.landmarks(campaign.name, _known(space)))


def workload_of(campaign: Campaign) -> Workload:
    """What a campaign searches for. Raises as `make_workload`, where its model is not on this machine."""
    asked = campaign.model, campaign.gpu, campaign.dtype, campaign.context, campaign.batch, campaign.weights
    return make_workload(*asked)


def gained(space: Space, records: Sequence[TrialRecord]) -> Gains | None:
    """What a campaign in that space gained by its rows, which are ordered by number; None where none has a latency."""
    best = best_of(records)
    if best is None:
        return None
    seeds = {record.config_id for record in records if record.source == "seed"} | _known(space)
    rows = {record.config_id: record for record in ranked(records) if record.kind == best.kind}
    known = [record for identity, record in rows.items() if identity in seeds]
    seed = min(known, key=_latency, default=None)
    sure = None
    if best.source == "final" and seed is not None and seed.created_at == best.created_at:  # rows of one final
        sure = seed.program_id not in {record.program_id for record in (best, *tied_with(best, records))}
    start = min([rows[each] for each in _firsts(space) if each in rows], key=_latency, default=None)
    return Gains(start, seed, best, sure)


def _firsts(space: Space) -> set[str]:
    """The ids of what a search of this work tries first: today, and where GPUs sent each other summands of 32 bits."""
    config = space.to_config(space.known_good()[0])
    tiling = {name: own for name, own in config.tiling.items() if name != "exchange"}
    return {config.config_id, replace(config, tiling=tiling).config_id}


def _known(space: Space) -> set[str]:
    """The ids of the schedules that are known for any work. The row of one that an earlier search of the store has
    tried says that the store answered it, not that it is a seed."""
    return _firsts(space) | {space.to_config(choice).config_id for choice in space.known_good()}


def faster(best: TrialRecord, than: TrialRecord) -> float:
    """How much faster a row is than another one: 0.1 if it makes a tenth more tokens in the same time; 0 for
    predictions that differ by less than they can tell."""
    gain = _latency(than) / _latency(best) - 1.0
    return 0.0 if best.is_predicted and abs(gain) < RESOLUTION else gain


def gains_in_words(gains: Gains) -> str | None:
    """What was gained, for people; None where the campaign tried no schedule that was known before."""
    seed, start, best = gains.seed, gains.start, gains.best
    if seed is None:
        return None
    if seed.config_id == best.config_id:
        said = "nothing over the best schedule that was known"
    elif best.is_predicted and faster(best, seed) == 0.0:
        said = f"nothing that predictions can tell over {_named(seed, 'the best schedule that was known')}"
    else:
        noise = {None: "", True: ", beyond the noise", False: ", within the noise"}[gains.sure]
        said = f"{_over(best, seed, 'the best schedule that was known')}{noise}"
    if start is None or start.config_id == seed.config_id:
        return said
    return f"{said}; {_over(best, start, 'the one that a search tries first')}"


def _over(best: TrialRecord, other: TrialRecord, what: str) -> str:
    return f"{faster(best, other) * 100:.1f} % over {_named(other, what)}"


def _named(row: TrialRecord, what: str) -> str:
    return f"{what} ({row.took_us} us, config {row.config_id})"


def gains_document(gains: Gains | None) -> dict[str, float | bool | None] | None:
    """The same, JSON-ready: latencies in us, and how much faster the best is as a fraction."""
    if gains is None:
        return None
    start, seed, best = gains.start, gains.seed, gains.best
    return {
        "start_us": None if start is None else _latency(start),
        "seed_us": None if seed is None else _latency(seed),
        "best_us": _latency(best),
        "over_start": gains.over_start,
        "over_seed": gains.over_seed,
        "sure": gains.sure,
    }


def _latency(record: TrialRecord) -> float:
    assert record.objective_us is not None  # rows without one are left out
    return record.objective_us
