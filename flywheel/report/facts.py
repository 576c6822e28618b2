"""The facts that a report shows, computed from a campaign's rows by the current version's code."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flywheel.cost_model import MODEL_VERSION, STOCK, Prediction, TaskSpan, predict, timeline
from flywheel.errors import ConfigError, FlywheelError
from flywheel.ir import MegakernelProgram, config_from_dict
from flywheel.lowering.lower import lower
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, tied_with, trials_of
from flywheel.plan import is_another, program_id
from flywheel.search.gains import Gains, gained, workload_of
from flywheel.search.knobs import Choice, Value
from flywheel.search.knowledge.known import Known, best_known
from flywheel.search.sampling.foresight import predict_config
from flywheel.search.space import Dimension, Space, make_space, pins_of
from flywheel.search.workload import Workload
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store


@dataclass(frozen=True, slots=True)
class Knobs:
    """What a campaign searched: its dimensions and each trial's choice.

    `choices` are in the order of trials, and `best` is the best row's choice; a choice is None outside the search
    space. `first` is what a search tries first. `beside` holds predicted latencies in us of the best choice with one
    knob set to another value, by knob and value; None unless the best is a prediction that this version can make again.
    """

    dimensions: tuple[Dimension, ...]
    choices: tuple[Choice | None, ...]
    best: Choice | None
    first: Choice
    beside: Mapping[tuple[str, Value], float] | None


@dataclass(frozen=True, slots=True)
class TimedSchedule:
    """The best trial's program, timed by the cost model. `predictor` is the model's version."""

    program: MegakernelProgram
    spans: tuple[TaskSpan, ...]
    prediction: Prediction
    predictor: str

    @property
    def sms(self) -> int:
        """SMs of all GPUs."""
        target = self.program.target
        return 0 if target is None else target.num_sms * self.program.ranks


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts that a report shows.

    `records` are all rows, and `trials` the rows that are not finals. `tied` are the rows that cannot be distinguished
    from `best`. `gains` says what the search gained. `known` is the measured schedule of the same work that answers a
    search which measured nothing. If `knobs`, `schedule` or `gains` is None, `missing` says why.
    """

    campaign: Campaign
    records: tuple[TrialRecord, ...]
    trials: tuple[TrialRecord, ...]
    best: TrialRecord | None
    tied: tuple[TrialRecord, ...]
    knobs: Knobs | None
    schedule: TimedSchedule | None
    missing: str | None
    gains: Gains | None = None
    known: Known | None = None


def gather(campaign: Campaign, records: Sequence[TrialRecord], store: Store | None = None) -> Facts:
    """The facts of a campaign; `records` are ordered by number. What else was measured of its work is looked up in the
    store, and among what flywheel ships.

    A part is None, without an error, if the model is no longer available or a config now lowers to another program.
    """
    best, trials = best_of(records), tuple(trials_of(records))
    knobs, schedule, missing, gains, known = None, None, None, None, None
    try:
        workload = workload_of(campaign)
        known = None if best is not None and not best.is_predicted else best_known(workload, store)
        space = make_space(workload, pins_of(campaign))
        knobs, gains = _knobs(space, trials, best), gained(space, records)
    except FlywheelError as error:
        missing = str(error)
    else:
        schedule, missing = (None, None) if best is None else _schedule(workload, best)
    missing = "no trial has a latency" if missing is None and schedule is None else missing
    tied = tuple(tied_with(best, records))
    return Facts(campaign, tuple(records), trials, best, tied, knobs, schedule, missing, gains, known)


def _knobs(space: Space, trials: Sequence[TrialRecord], best: TrialRecord | None) -> Knobs:
    choices = tuple(_choice(space, record) for record in trials)
    chosen = None if best is None else _choice(space, best)
    beside = None if best is None or chosen is None or best.predictor != MODEL_VERSION or not best.is_predicted else (
        _beside(space, chosen, trials)
    )
    return Knobs(space.dimensions, choices, chosen, space.known_good()[0], beside)


def _beside(space: Space, chosen: Choice, trials: Sequence[TrialRecord]) -> dict[tuple[str, Value], float]:
    """Predicted latencies of `chosen` with one knob changed. This version's trials answer for what they tried."""
    known = {record.config_id: record.predicted_us for record in trials if record.predictor == MODEL_VERSION}
    found: dict[tuple[str, Value], float] = {}
    for dimension in space.dimensions:
        for value in dimension.values:
            if value != chosen[dimension.name]:
                changed = space.to_config({**chosen, dimension.name: value})
                us = known.get(changed.config_id) or predict_config(changed, space.workload, STOCK)
                found |= {} if us is None else {(dimension.name, value): us}
    return found


def _choice(space: Space, record: TrialRecord) -> Choice | None:
    return space.to_choice(config_from_dict(json.loads(record.config)))


def _schedule(workload: Workload, best: TrialRecord) -> tuple[TimedSchedule | None, str | None]:
    """The best row's schedule, or why this version does not have it."""
    try:
        program = lower(workload.graph, config_from_dict(json.loads(best.config)), workload.target)
    except ConfigError as error:
        return None, f"this version does not run the best schedule, {best.title}: {error}"
    if is_another(best.program_id, program_id(program)):
        return None, f"{best.title}: this version lowers its config to another program"
    return TimedSchedule(program, tuple(timeline(program)), predict(program), MODEL_VERSION), None
