"""A campaign: ask, evaluate, append, tell, until a budget is spent.

The store is the truth; the study is rebuilt from it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from math import prod
from time import perf_counter

from flywheel.cost_model import MODEL_VERSION, STOCK, Predictor
from flywheel.errors import StoreError, TrialExistsError, UsageError
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.measure.environment import Environment
from flywheel.measure.outcome import LASTING_OUTCOMES, Measured
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, tied_with, trials_of
from flywheel.search.engine import Engine
from flywheel.search.evaluate import Evaluation
from flywheel.search.finals import finalists, measure_again
from flywheel.search.foresight import Foreseen, Foresight
from flywheel.search.importing import priors_of
from flywheel.search.knobs import Choice, Value
from flywheel.search.noise import gain
from flywheel.search.prefilter import Prefilter
from flywheel.search.rows import to_record
from flywheel.search.space import Space
from flywheel.search.spec import CampaignSpec, constants_of, to_campaign
from flywheel.search.study import NOT_TRIED, Ask, CampaignStudy, Told
from flywheel.search.warm import choose_starts, described, starts_of
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store


@dataclass(frozen=True, slots=True)
class Progress:
    """A finished trial and where the campaign stands. `elapsed_s` and `new_trials` are this run's."""

    record: TrialRecord
    best: TrialRecord | None
    outcomes: dict[str, int]
    trials: int
    new_trials: int
    elapsed_s: float
    improved: bool


@dataclass(frozen=True, slots=True)
class CampaignResult:
    """How a run of a campaign ended. `stopped` is trials, time, until, patience, exhausted or interrupted.

    `tied` are rows that `best` cannot be told from, where it was measured in a final. `foreseen` is what this run
    predicted to choose what to measure; none of it is a trial.
    """

    name: str
    best: TrialRecord | None
    outcomes: dict[str, int]
    trials: int
    new_trials: int
    elapsed_s: float
    stopped: str
    tied: tuple[TrialRecord, ...] = ()
    foreseen: Foreseen = field(default_factory=Foreseen)


Watch = Callable[[Progress], None]


def open_campaign(
    spec: CampaignSpec, space: Space, store: Store, fresh: bool, predictor: str = MODEL_VERSION
) -> str:
    """Name of the campaign to run: the newest of that name, or with `fresh` a new one behind it (`name.2`, ...).

    `predictor` is the version of the cost model that it asks.

    Raises UsageError where the campaign of that name searched something else.
    """
    while (name := _open_or_create(spec, space, store, fresh, predictor)) is None:
        pass
    return name


def _open_or_create(spec: CampaignSpec, space: Space, store: Store, fresh: bool, predictor: str) -> str | None:
    """None where another process took the name in the meantime."""
    assert spec.name is not None
    newest, name = None, spec.name
    while (taken := store.campaign(name)) is not None:
        newest, name = taken, f"{spec.name}.{int(name[len(spec.name) + 1 :] or 1) + 1}"
    if newest is not None and not fresh:
        _check_same(newest, spec, space, predictor)
        return newest.name
    starts = choose_starts(store, space, spec.measure, predictor) if spec.seeds and spec.warm else []
    known = {"decoder": asdict(space.workload.spec), "predictor": predictor, **described(starts)}
    campaign = to_campaign(spec, name, created_at=_now(), **known)
    try:
        store.create_campaign(campaign)
    except StoreError:
        if store.campaign(campaign.name) is None:
            raise
        return None
    return campaign.name


def _check_same(campaign: Campaign, spec: CampaignSpec, space: Space, predictor: str) -> None:
    for option in ("model", "gpu", "dtype", "context", "batch", "measure"):
        before, now = getattr(campaign, option), getattr(spec, option)
        if before != now:
            raise UsageError(f"campaign {campaign.name!r} has {option}={before}, not {now}; --fresh starts a new one")
    described = json.loads(campaign.spec)
    if described.get("fix", {}) != dict(spec.fix):
        raise UsageError(f"campaign {campaign.name!r} has other pinned knobs; --fresh or --name starts a new one")
    before = described.get("predictor", MODEL_VERSION)
    if spec.measure == "predict" and constants_of(before) != constants_of(predictor):
        raise UsageError(
            f"campaign {campaign.name!r} was predicted by {before}, not {predictor}; --fresh or --name starts a new one"
        )
    decoder = described.get("decoder")
    if decoder != json.loads(json.dumps(asdict(space.workload.spec))):
        raise UsageError(f"campaign {campaign.name!r} searched another model of that name; --fresh starts a new one")


def _check_gpu(name: str, known: Sequence[TrialRecord], gpu: str | None) -> None:
    """One target may have several names: drivers and makers of boards differ."""
    for record in known:
        if None not in (gpu, record.gpu_name, record.latency_us) and record.gpu_name != gpu:
            raise UsageError(f"campaign {name!r} was measured on {record.gpu_name}, not {gpu}; --fresh starts another")


class CampaignRun:
    """One run of a campaign. `run` drives it; every trial is appended to the store before the study learns of it."""

    def __init__(
        self,
        spec: CampaignSpec,
        name: str,
        space: Space,
        store: Store,
        engine: Engine,
        environment: Environment,
        predictor: Predictor = STOCK,
        foresight: Foresight | None = None,
    ) -> None:
        self._spec, self._name, self._space = spec, name, space
        self._store, self._engine, self._environment = store, engine, environment
        factor = spec.prefilter
        self._foresight = foresight
        self._prefilter = None if factor is None else Prefilter(factor, predictor, space.workload)
        self._own = 0  # trials of this run
        self._answers: dict[str, Evaluation] = {}  # by config id, of this run: a sampler may repeat itself
        self._seeds: set[str] = set()
        campaign = store.campaign(name)
        self._priors = [] if campaign is None else priors_of(campaign)
        if campaign is not None and spec.warm:
            self._priors += [start.config for start in starts_of(campaign)]
        self._learn(store.trials(name))

    def _learn(self, known: Sequence[TrialRecord]) -> None:
        """Stand where the campaign's rows stand: at the start, and again where another process has added some.

        Raises UsageError where they were measured on another GPU.
        """
        if self._spec.measure == "cuda":
            _check_gpu(self._name, known, self._environment.gpu)
        self._next = 1 + max((record.trial for record in known), default=-1)  # imported trials may leave gaps
        self._best = best_of(known)
        known = trials_of(known)
        self._programs = {record.program_id for record in known}
        self._trials = len(known)
        self._outcomes = Counter(record.outcome for record in known)
        found = [record.trial for record in known if self._best and record.program_id == self._best.program_id]
        last = min(found, default=-1)
        self._stale = sum(record.trial > last for record in known)
        known = [record for record in known if record.outcome != "no_memory"]  # another run may find the memory
        told = [(self._choice(record), self._told(record)) for record in known]
        inside = [(choice, objective) for choice, objective in told if choice is not None]
        self._left: int | None = None  # configs that a grid has not tried yet
        if self._spec.sampler == "grid":
            tried = {self._space.to_config(choice).config_id for choice, _ in inside}
            self._left = prod(len(dimension.values) for dimension in self._space.dimensions) - len(tried)
        measured = self._spec.measure == "cuda"
        self._study = CampaignStudy(
            self._space, self._spec.sampler, self._spec.seed, inside, measured, self._foresight
        )
        self._tried = {record.config_id for record in known}
        for choice in self._first() if self._spec.seeds else ():
            identity = self._space.to_config(choice).config_id
            if identity not in self._tried | self._seeds:
                self._seeds.add(identity)
                self._study.enqueue(choice)

    def _first(self) -> list[dict[str, Value]]:
        """What is tried before the sampler is asked: what was imported, what is good nearby, what is good anywhere."""
        return [*map(self._space.nearest, self._priors), *self._space.known_good()]

    def run(self, watch: Watch, interrupted: Callable[[], bool]) -> CampaignResult:
        """Run until a budget is spent or `interrupted`; trials under way are finished and kept."""
        start = perf_counter()
        flight: deque[tuple[CampaignStudy, Ask, ScheduleConfig, float, Callable[[], Evaluation]]] = deque()
        while True:
            stopped = self._spent(perf_counter() - start, interrupted)
            while stopped is None and len(flight) < min(self._engine.width, self._room()):
                asked = perf_counter()
                ask = self._study.ask()
                config = self._space.to_config(ask[1])
                ask_s = perf_counter() - asked
                finish = self._answer(config) or self._submit(config)
                flight.append((self._study, ask, config, ask_s, finish))
            if not flight:
                break
            study, (trial, choice), config, ask_s, finish = flight.popleft()
            record, improved = self._keep(config, ask_s, finish())
            if study is self._study:
                study.tell(trial, self._told(record))
            else:
                self._study.add(choice, self._told(record))
            elapsed = perf_counter() - start
            counts = dict(self._outcomes)
            watch(Progress(record, self._best, counts, self._trials, self._own, elapsed, improved))
        if stopped != "interrupted":
            for record in self._hold_final():
                elapsed, improved = perf_counter() - start, record == self._best
                watch(Progress(record, self._best, dict(self._outcomes), self._trials, self._own, elapsed, improved))
        return CampaignResult(
            self._name,
            self._best,
            dict(self._outcomes),
            self._trials,
            self._own,
            perf_counter() - start,
            stopped or "trials",
            tuple(tied_with(self._best, self._store.trials(self._name))),
        )

    def _submit(self, config: ScheduleConfig) -> Callable[[], Evaluation]:
        """What is good elsewhere is measured, whatever is predicted of it."""
        limit_us = None
        if self._prefilter is not None and config.config_id not in self._seeds:
            limit_us = self._prefilter.limit_us(self._best)
        return self._engine.submit(config, self._rivals(config), limit_us=limit_us)

    def _rivals(self, config: ScheduleConfig) -> tuple[ScheduleConfig, ...]:
        """What a config is measured against: the best so far, if by these kernels: others may not have one for it. What
        was measured elsewhere bars nothing from being the first best here."""
        best, here = self._best, self._environment
        if self._spec.measure != "cuda" or best is None or best.is_imported or best.config_id == config.config_id:
            return ()
        alike = (best.gpu_driver, best.nvrtc, best.kernels) == (here.driver, here.nvrtc, here.kernels)
        return (_config(best),) if alike else ()

    def _hold_final(self) -> list[TrialRecord]:
        """Measure the best programs again, in turn: the rows of that, none where a worker dies of it.

        They take the place of all rows before them, so another process's new ones may call for another final.
        """
        while chosen := finalists(self._store.trials(self._name)) if self._spec.measure == "cuda" else []:
            rows = measure_again(chosen, self._engine, self._spec, self._environment)
            if not rows or self._append_final(rows, chosen):
                return rows
        return []

    def _append_final(self, rows: list[TrialRecord], chosen: Sequence[TrialRecord]) -> bool:
        """Number the rows and append them, all or none; False where the `chosen` are no longer the ones to choose."""
        programs = [record.program_id for record in chosen]
        while True:
            known = self._store.trials(self._name)
            self._best = best_of(known)
            if [record.program_id for record in finalists(known)] != programs:
                return False
            first = 1 + max(record.trial for record in known)
            rows[:] = [replace(row, trial=first + place) for place, row in enumerate(rows)]
            with suppress(TrialExistsError):
                self._store.append_all(rows)
                self._best = best_of([*known, *rows])
                return True

    def _room(self) -> int:
        """Trials that are still wanted: a grid ends, the other samplers may repeat themselves."""
        wanted = self._spec.trials - self._trials
        return wanted if self._left is None else min(wanted, self._left)

    def _spent(self, elapsed_s: float, interrupted: Callable[[], bool]) -> str | None:
        spec, best = self._spec, self._best
        fraction = best.floor_fraction if best is not None and best.kind != "imported" else None
        if interrupted():
            return "interrupted"
        if spec.until is not None and fraction is not None and fraction >= spec.until:
            return "until"
        if spec.time_s is not None and elapsed_s >= spec.time_s:
            return "time"
        if spec.patience is not None and self._stale >= spec.patience:
            return "patience"
        if self._trials >= spec.trials:
            return "trials"
        return "exhausted" if self._room() <= 0 else None

    def _keep(self, config: ScheduleConfig, ask_s: float, evaluation: Evaluation) -> tuple[TrialRecord, bool]:
        identity = config.config_id
        source = "seed" if identity in self._seeds and identity not in self._tried else "search"
        if self._left is not None and identity not in self._tried:
            self._left -= 1
        self._tried.add(identity)
        contest = evaluation.contest
        compared = None
        if contest is not None and contest.times_us and isinstance(contest.outcome, Measured):
            compared = gain(contest.times_us[0], contest.times_us[1], self._spec.seed)
        record = to_record(
            self._name, self._next, self._spec, config, evaluation, self._environment,
            source=source, ask_s=ask_s, created_at=_now(), compared=compared,
        )  # fmt: skip
        record = self._append(record)
        if record.outcome in LASTING_OUTCOMES and not self._unmeasured(record):
            self._answers[identity] = replace(
                evaluation, outcome=record, lower_s=None, validate_s=None, measure_s=None, contest=None
            )
        self._next = record.trial + 1
        self._trials += 1
        self._own += 1
        self._outcomes[record.outcome] += 1
        repeated = record.source == "store" and record.program_id in self._programs
        self._programs.add(record.program_id)
        best = self._best
        worth = record.may_be_best and not self._unmeasured(record)
        improved = worth and not repeated and (best is None or _rank(record) < _rank(best))
        if improved:
            self._best = record
        self._stale = 0 if improved else self._stale + 1
        return record, improved

    def _answer(self, config: ScheduleConfig) -> Callable[[], Evaluation] | None:
        """What this run already knows of a config."""
        known = self._answers.get(config.config_id)
        return None if known is None else lambda: known

    def _append(self, record: TrialRecord) -> TrialRecord:
        """Append under the next free number; where another process took it, learn what that process found."""
        while True:
            try:
                self._store.append(record)
            except TrialExistsError:
                self._learn(self._store.trials(self._name))
                record = replace(record, trial=self._next)
            else:
                return record

    def _unmeasured(self, record: TrialRecord) -> bool:
        """Whether the row says that a measurement was not worth its time: no fact about what it would have found."""
        return record.is_predicted and self._spec.measure == "cuda"

    def _told(self, record: TrialRecord) -> Told:
        """What the study is told: nothing of what was predicted where others are measured, or found no memory free."""
        return NOT_TRIED if self._unmeasured(record) or record.outcome == "no_memory" else record.objective_us

    def _choice(self, record: TrialRecord) -> Choice | None:
        return self._space.to_choice(_config(record))


def _config(record: TrialRecord) -> ScheduleConfig:
    return config_from_dict(json.loads(record.config))


def _rank(record: TrialRecord) -> tuple[bool, bool, float, int]:
    objective = record.objective_us
    return (objective is None, record.kind == "imported", objective or 0.0, record.trial)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
