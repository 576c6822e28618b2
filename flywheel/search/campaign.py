"""A campaign: ask, evaluate, append, tell, until a budget is spent.

The store is the truth; the study is rebuilt from it.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import prod
from time import perf_counter, sleep
from typing import Final

from flywheel.cost_model import STOCK, Predictor
from flywheel.errors import TrialExistsError, UsageError
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
from flywheel.search.spec import CampaignSpec
from flywheel.search.study import NOT_TRIED, Ask, CampaignStudy, Told
from flywheel.search.warm import starts_of
from flywheel.store.claims import Claim, Claims
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

PROPOSALS: Final = 64
"""How many proposals may be refused, because other runs are trying them, before this one waits."""
WAIT_S: Final = 0.1
"""Time between two looks at what other runs have found, where there is nothing else to do."""


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
        self._taken: set[str] = set()  # config ids that other runs are trying, as far as this one has bumped into them
        self._shared = False  # whether another run has been found to search this campaign, too
        self._asked: tuple[CampaignStudy, Ask, ScheduleConfig, float] | None = None  # a proposal that has to wait
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
        self._taken.clear()
        self._left: int | None = None  # configs that a grid has not tried yet
        if self._spec.sampler == "grid":
            tried = {self._space.to_config(choice).config_id for choice, _ in inside}
            self._left = prod(len(dimension.values) for dimension in self._space.dimensions) - len(tried)
        measured = self._spec.measure == "cuda"
        self._study = CampaignStudy(self._space, self._spec.sampler, self._spec.seed, inside, measured, self._foresight)
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
        with self._store.share(self._name) as claims:
            return self._run(claims, watch, interrupted)

    def _run(self, claims: Claims, watch: Watch, interrupted: Callable[[], bool]) -> CampaignResult:
        start = perf_counter()
        flight: deque[tuple[CampaignStudy, Ask, ScheduleConfig, float, Callable[[], Evaluation]]] = deque()
        while True:
            stopped = self._spent(perf_counter() - start, interrupted)
            while stopped is None and len(flight) < min(self._engine.width, self._room()):
                if (proposed := self._propose(claims, [(study, config) for study, _, config, *_ in flight])) is None:
                    break
                flight.append((*proposed, self._answer(proposed[2]) or self._submit(proposed[2])))
            if not flight:
                if stopped is not None:
                    break
                sleep(WAIT_S)
                self._catch_up(claims)
                continue
            study, (trial, choice), config, ask_s, finish = flight.popleft()
            record, improved = self._keep(claims, config, ask_s, finish())
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
        tied = tuple(tied_with(self._best, self._store.trials(self._name)))
        elapsed, counts = perf_counter() - start, dict(self._outcomes)
        return CampaignResult(
            self._name, self._best, counts, self._trials, self._own, elapsed, stopped or "trials", tied
        )

    def _propose(
        self, claims: Claims, under_way: Sequence[tuple[CampaignStudy, ScheduleConfig]]
    ) -> tuple[CampaignStudy, Ask, ScheduleConfig, float] | None:
        """What to try next beside what is `under_way`, claimed; None where other runs are trying whatever is left."""
        for _ in range(PROPOSALS):
            study, ask, config, ask_s = self._asked or self._ask()
            self._asked = None
            # A study that was started anew does not know what an earlier one has under way.
            orphan = any(other is not study and each.config_id == config.config_id for other, each in under_way)
            answer = Claim.TAKEN if orphan else self._claim(claims, config, len(under_way))
            if answer is Claim.FULL:
                self._asked = study, ask, config, ask_s
                return None
            if answer is Claim.GRANTED:
                return study, ask, config, ask_s
            study.tell(ask[0], NOT_TRIED)
            if self._room() <= 0:
                return None
        return None

    def _ask(self) -> tuple[CampaignStudy, Ask, ScheduleConfig, float]:
        asked = perf_counter()
        ask = self._study.ask()
        config = self._space.to_config(ask[1])
        return self._study, ask, config, perf_counter() - asked

    def _claim(self, claims: Claims, config: ScheduleConfig, under_way: int) -> Claim:
        """Of a config that another run has tried meanwhile, or is trying: TAKEN."""
        identity, known = config.config_id, config.config_id in self._tried
        while (answer := claims.claim(identity, self._next, self._wanted() - under_way)) is Claim.STALE:
            self._learn_new(self._store.trials(self._name, self._next))
            if identity in self._tried and not known:
                return Claim.TAKEN
        if answer is Claim.TAKEN and identity not in self._tried:
            self._taken.add(identity)
        return answer

    def _catch_up(self, claims: Claims) -> None:
        """Learn what other runs have found; where one has ended without, what it was trying is there to be tried."""
        held = claims.held()
        self._learn_new(self._store.trials(self._name, self._next))
        if not self._taken <= held:
            self._learn(self._store.trials(self._name))

    def _learn_new(self, news: Sequence[TrialRecord]) -> None:
        """Go on from rows of other runs, behind those that are known. Raises as `_learn` does.

        The first of them start the sampler anew: it draws by its seed and what is known, and two runs of one seed would
        draw the same. A final takes the place of rows that are known.
        """
        if (news and not self._shared) or any(record.source == "final" for record in news):
            self._shared = True
            known = self._store.trials(self._name)
            self._learn([record for record in known if record.trial <= news[-1].trial])
            return
        if self._spec.measure == "cuda":
            _check_gpu(self._name, news, self._environment.gpu)
        for record in news:
            choice = self._choice(record)
            if choice is not None:
                self._study.add(choice, self._told(record))
            self._count(record)

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
        return self._wanted() if self._left is None else min(self._wanted(), self._left - len(self._taken))

    def _wanted(self) -> int:
        return self._spec.trials - self._trials

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
        return "exhausted" if self._left is not None and self._left <= 0 else None

    def _keep(
        self, claims: Claims, config: ScheduleConfig, ask_s: float, evaluation: Evaluation
    ) -> tuple[TrialRecord, bool]:
        identity = config.config_id
        source = "seed" if identity in self._seeds and identity not in self._tried else "search"
        contest = evaluation.contest
        compared = None
        if contest is not None and contest.times_us and isinstance(contest.outcome, Measured):
            compared = gain(contest.times_us[0], contest.times_us[1], self._spec.seed)
        record = to_record(
            self._name, self._next, self._spec, config, evaluation, self._environment,
            source=source, ask_s=ask_s, created_at=_now(), compared=compared,
        )  # fmt: skip
        record = claims.append(record)
        if record.trial != self._next:
            known = self._store.trials(self._name, self._next)
            self._learn_new([each for each in known if each.trial < record.trial])
        if record.outcome in LASTING_OUTCOMES and not self._unmeasured(record):
            self._answers[identity] = replace(
                evaluation, outcome=record, lower_s=None, validate_s=None, measure_s=None, contest=None
            )
        self._own += 1
        return record, self._count(record)

    def _count(self, record: TrialRecord) -> bool:
        """Let a row count, this run's or another's; whether it is the best so far."""
        if self._left is not None and record.config_id not in self._tried:
            self._left -= 1
        self._tried.add(record.config_id)
        self._taken.discard(record.config_id)
        self._next = record.trial + 1
        self._trials += 1
        self._outcomes[record.outcome] += 1
        repeated = record.source == "store" and record.program_id in self._programs
        self._programs.add(record.program_id)
        best = self._best
        worth = record.may_be_best and not self._unmeasured(record)
        improved = worth and not repeated and (best is None or _rank(record) < _rank(best))
        if improved:
            self._best = record
        self._stale = 0 if improved else self._stale + 1
        return improved

    def _answer(self, config: ScheduleConfig) -> Callable[[], Evaluation] | None:
        """What this run already knows of a config."""
        known = self._answers.get(config.config_id)
        return None if known is None else lambda: known

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
