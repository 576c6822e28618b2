"""A campaign: ask, evaluate, append, tell, until a budget is spent.

The store is the truth; the study is rebuilt from it.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from math import prod
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Final

from flywheel.cost_model import STOCK, Predictor
from flywheel.errors import StoreError, UsageError
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.measure.environment import Environment
from flywheel.measure.outcome import LASTING_OUTCOMES, Measured
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, tied_with, trials_of
from flywheel.search.finals import hold_final
from flywheel.search.knobs import Choice, Value
from flywheel.search.knowledge.importing import priors_of
from flywheel.search.knowledge.known import Known
from flywheel.search.knowledge.warm import starts_of
from flywheel.search.noise import gain
from flywheel.search.rows import to_record
from flywheel.search.sampling.expectation import Lessons
from flywheel.search.sampling.foresight import Foreseen, Foresight, Prefilter
from flywheel.search.sampling.study import NOT_TRIED, CampaignStudy, Told
from flywheel.search.space import Space
from flywheel.search.spec import CampaignSpec
from flywheel.search.tally import Tally, is_unmeasured
from flywheel.search.trials.engine import TrialEngine
from flywheel.search.trials.evaluate import Evaluation
from flywheel.store.claims import Claim, Claims
from flywheel.store.sql import Store

if TYPE_CHECKING:
    from optuna.trial import Trial


@dataclass(frozen=True, slots=True)
class Progress:
    """A finished trial and the state of the campaign. `elapsed_s` and `new_trials` count this run only."""

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

    `tied` are the rows that a final could not tell from `best`. `foreseen` sums up the predictions that this run made
    to choose its measurements; none of them is a trial. `answer` is the measured schedule that answers the search, None
    where none was measured; `run_search` looks it up.
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
    answer: Known | None = None


WatchProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A config that a study asked for: its number `trial` in the study, and whether it `repeats` an earlier trial."""

    study: CampaignStudy
    trial: Trial
    choice: Choice
    config: ScheduleConfig
    config_id: str
    ask_s: float
    repeats: bool


PROPOSALS: Final = 64
"""How many proposals in a row other runs may be trying already before this run waits."""
WAIT_S: Final = 0.1
"""Seconds between two looks at the rows of other runs while this run has nothing else to do."""


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
        engine: TrialEngine,
        environment: Environment,
        predictor: Predictor = STOCK,
        foresight: Foresight | None = None,
        lessons: Lessons | None = None,
    ) -> None:
        self._spec, self._name, self._space = spec, name, space
        self._store, self._engine, self._environment = store, engine, environment
        factor = spec.prefilter
        self._foresight, self._lessons = foresight, lessons
        self._prefilter = None if factor is None else Prefilter(factor, predictor, space.workload)
        self._measured = spec.measure == "cuda"
        self._own = 0  # trials of this run
        self._answers: dict[str, Evaluation] = {}  # by config id, of this run: a sampler may repeat itself
        self._taken: set[str] = set()  # config ids that other runs are trying, as far as this one has bumped into them
        self._shared = False  # whether another run has been found to search this campaign, too
        self._flight: deque[tuple[_Proposal, Callable[[], Evaluation]]] = deque()
        self._asked: _Proposal | None = None  # one that is not claimed yet, or has to wait
        self._seeds: set[str] = set()
        campaign = store.campaign(name)
        self._priors = [] if campaign is None else priors_of(campaign)
        self._sure = list(self._priors)  # what is tried first even if a sampler weighs the other starts
        if campaign is not None and spec.warm:
            starts = starts_of(campaign)
            self._priors += [start.config for start in starts]
            self._sure += [start.config for start in starts if start.distance == 0.0]
        self._learn(store.trials(name))

    def _learn(self, known: Sequence[TrialRecord]) -> None:
        """Read the campaign's rows: at the start, and again after another process has added rows.

        Raises UsageError if they were measured on another GPU.
        """
        if self._measured:
            _check_gpu(self._name, known, self._environment.gpu)
        self._tally = Tally(known, self._measured)
        told = [(self._choice(record), self._told(record)) for record in trials_of(known) if _is_lasting(record)]
        inside = [(choice, objective) for choice, objective in told if choice is not None]
        self._taken.clear()
        self._left: int | None = None  # configs that a grid has not tried yet
        if self._spec.sampler == "grid":
            tried = {self._space.to_config(choice).config_id for choice, _ in inside}
            self._left = prod(len(dimension.values) for dimension in self._space.dimensions) - len(tried)
        self._study = CampaignStudy(
            self._space,
            self._spec.sampler,
            self._spec.seed,
            inside,
            self._measured,
            self._foresight,
            self._lessons,
        )
        self._enqueue()

    def _enqueue(self) -> None:
        """Let the study begin with the seeds that no run has tried or is trying."""
        under_way = {proposal.config_id for proposal, _ in self._flight}
        if self._asked is not None:
            under_way.add(self._asked.config_id)
        self._enqueued: set[str] = set()  # in this study, and not asked yet
        for choice in self._first() if self._spec.seeds else ():
            identity = self._space.to_config(choice).config_id
            self._seeds.add(identity)
            if identity not in self._tally.tried | under_way | self._enqueued:
                self._enqueued.add(identity)
                self._study.enqueue(choice)

    def _first(self) -> list[dict[str, Value]]:
        """The configs to try before the sampler proposes any: imported, good for similar work, good in general.

        A sampler with lessons weighs these starts itself, but for imported ones and those of this very work.
        """
        known = [*map(self._space.nearest, self._priors), *self._space.known_good()]
        if self._foresight is None or self._lessons is None:
            return known
        self._seeds |= {self._space.to_config(each).config_id for each in (*known, *self._lessons.starts)}
        return [*map(self._space.nearest, self._sure)]

    def run(self, watch: WatchProgress, interrupted: Callable[[], bool]) -> CampaignResult:
        """Run until a budget is spent or `interrupted` returns true. Trials that have begun are finished and kept."""
        with self._store.share(self._name) as claims:
            return self._run(claims, watch, interrupted)

    def _run(self, claims: Claims, watch: WatchProgress, interrupted: Callable[[], bool]) -> CampaignResult:
        start, flight = perf_counter(), self._flight
        while True:
            stopped = self._spent(perf_counter() - start, interrupted)
            while stopped is None and len(flight) < min(self._engine.width, self._room()):
                if (proposal := self._propose(claims)) is None:
                    break
                flight.append((proposal, self._answer(proposal) or self._submit(proposal.config)))
            if not flight:
                if stopped is not None:
                    break
                sleep(WAIT_S)
                self._catch_up(claims)
                continue
            proposal, finish = flight[0]
            record, improved = self._keep(claims, proposal, finish())
            flight.popleft()
            if proposal.study is self._study:
                proposal.study.tell(proposal.trial, self._told(record))
            else:
                self._study.add(proposal.choice, self._told(record))
            watch(self._progress(record, improved, start))
        if stopped != "interrupted" and self._measured:
            rows = hold_final(
                self._store, self._name, self._engine, self._spec, self._space.workload, self._environment
            )
            self._tally.best = best_of(self._store.trials(self._name))
            for record in rows:
                watch(self._progress(record, record == self._tally.best, start))
        tally = self._tally
        tied = tied_with(tally.best, self._store.trials(self._name)) if self._measured else []
        elapsed, counts = perf_counter() - start, dict(tally.outcomes)
        return CampaignResult(
            self._name, tally.best, counts, tally.trials, self._own, elapsed, stopped or "trials", tuple(tied)
        )

    def _progress(self, record: TrialRecord, improved: bool, start: float) -> Progress:
        tally, elapsed = self._tally, perf_counter() - start
        return Progress(record, tally.best, dict(tally.outcomes), tally.trials, self._own, elapsed, improved)

    def _propose(self, claims: Claims) -> _Proposal | None:
        """The next config to try, claimed for this run; None if other runs are trying all that is left."""
        for _ in range(PROPOSALS):
            self._asked = proposal = self._asked or self._ask()
            answer = self._claim(claims, proposal)
            if answer is Claim.FULL:
                return None
            self._asked = None
            if answer is Claim.GRANTED:
                return proposal
            proposal.study.tell(proposal.trial, NOT_TRIED)
            if self._room() <= 0:
                return None
        return None

    def _ask(self) -> _Proposal:
        start = perf_counter()
        trial, choice = self._study.ask()
        config = self._space.to_config(choice)
        identity = config.config_id
        repeats = identity in self._tally.tried and identity not in self._enqueued
        self._enqueued.discard(identity)
        return _Proposal(self._study, trial, choice, config, identity, perf_counter() - start, repeats)

    def _claim(self, claims: Claims, proposal: _Proposal) -> Claim:
        """Of a config that another run is trying, or has tried since it was proposed, or that is under way for a study
        that this one's does not know of: TAKEN."""
        identity, under_way = proposal.config_id, [each for each, _ in self._flight]
        if any(each.study is not proposal.study and each.config_id == identity for each in under_way):
            return Claim.TAKEN
        while proposal.repeats or identity not in self._tally.tried:
            answer = claims.claim(identity, self._tally.next, self._wanted() - len(under_way))
            if answer is Claim.STALE:
                self._learn_new(self._rows_of_others())
                continue
            if answer is Claim.TAKEN and identity not in self._tally.tried:
                self._taken.add(identity)
            return answer
        return Claim.TAKEN

    def _rows_of_others(self) -> list[TrialRecord]:
        """The rows that this run has not seen. Raises StoreError if the store counts some but returns none."""
        news = self._store.trials(self._name, self._tally.next)
        if not news:
            where = f"store {self._store.name}: campaign {self._name!r}"
            raise StoreError(f"{where} counts more rows than the {self._tally.next} that can be read: it is damaged")
        return news

    def _catch_up(self, claims: Claims) -> None:
        """Learn the rows of other runs. The configs of a run that ended without rows can be tried again."""
        held = claims.held()
        self._learn_new(self._store.trials(self._name, self._tally.next))
        if not self._taken <= held:
            self._learn(self._store.trials(self._name))

    def _learn_new(self, news: Sequence[TrialRecord]) -> None:
        """Go on from other runs' rows that follow the known ones. Raises as `_learn`.

        The first of these rows restart the sampler. It draws by its seed and the known rows, so two runs with one seed
        would draw the same. A final replaces known rows.
        """
        if (news and not self._shared) or any(record.source == "final" for record in news):
            self._shared = True
            known = self._store.trials(self._name)
            self._learn([record for record in known if record.trial <= news[-1].trial])
            return
        if self._measured:
            _check_gpu(self._name, news, self._environment.gpu)
        for record in news:
            choice = self._choice(record)
            if choice is not None:
                self._study.add(choice, self._told(record))
            self._count(record)

    def _submit(self, config: ScheduleConfig) -> Callable[[], Evaluation]:
        """Submit a proposal. A config that is good for other work is measured whatever the prediction says."""
        limit_us = None
        if self._prefilter is not None and config.config_id not in self._seeds:
            limit_us = self._prefilter.limit_us(self._tally.best)
        return self._engine.submit(config, self._rivals(config), limit_us=limit_us)

    def _rivals(self, config: ScheduleConfig) -> tuple[ScheduleConfig, ...]:
        """The configs that a config is measured in turn with: the best so far, if these kernels measured it, since
        other kernels may not run it. An imported best does not count."""
        best, here = self._tally.best, self._environment
        if not self._measured or best is None or best.is_imported or best.config_id == config.config_id:
            return ()
        alike = (best.gpu_driver, best.nvrtc, best.kernels) == (here.driver, here.nvrtc, here.kernels)
        return (_config(best),) if alike else ()

    def _room(self) -> int:
        """Trials that are still wanted: a grid ends, the other samplers may repeat themselves."""
        return self._wanted() if self._left is None else min(self._wanted(), self._left - len(self._taken))

    def _wanted(self) -> int:
        return self._spec.trials - self._tally.trials

    def _spent(self, elapsed_s: float, interrupted: Callable[[], bool]) -> str | None:
        spec, best = self._spec, self._tally.best
        sure = best is not None and best.kind != "imported" and not best.is_doubtful
        fraction = best.floor_fraction if best is not None and sure else None
        if interrupted():
            return "interrupted"
        if spec.until is not None and fraction is not None and fraction >= spec.until:
            return "until"
        if spec.time_s is not None and elapsed_s >= spec.time_s:
            return "time"
        if spec.patience is not None and self._tally.stale >= spec.patience:
            return "patience"
        if self._tally.trials >= spec.trials:
            return "trials"
        return "exhausted" if self._left is not None and self._left <= 0 else None

    def _keep(self, claims: Claims, proposal: _Proposal, evaluation: Evaluation) -> tuple[TrialRecord, bool]:
        identity = proposal.config_id
        source = "seed" if identity in self._seeds and identity not in self._tally.tried else "search"
        contest = evaluation.contest
        compared = None
        if contest is not None and contest.times_us and isinstance(contest.outcome, Measured):
            compared = gain(contest.times_us[0], contest.times_us[1], self._spec.seed)
        record = to_record(
            self._name, self._tally.next, self._spec, proposal.config, evaluation, self._environment,
            source=source, ask_s=proposal.ask_s, created_at=_now(), compared=compared,
        )  # fmt: skip
        record = claims.append(record)
        if record.trial != self._tally.next:
            known = self._store.trials(self._name, self._tally.next)
            self._learn_new([each for each in known if each.trial < record.trial])
        if (
            record.outcome in LASTING_OUTCOMES
            and not is_unmeasured(record, self._measured)
            and not record.is_doubtful
        ):
            self._answers[identity] = replace(
                evaluation, outcome=record, lower_s=None, validate_s=None, measure_s=None, contest=None
            )
        self._own += 1
        return record, self._count(record)

    def _count(self, record: TrialRecord) -> bool:
        """Count a row of this or another run. Returns whether it is the best so far."""
        if self._left is not None and record.config_id not in self._tally.tried:
            self._left -= 1
        self._taken.discard(record.config_id)
        return self._tally.count(record)

    def _answer(self, proposal: _Proposal) -> Callable[[], Evaluation] | None:
        """The earlier trial that answers for a config, if this run knows one."""
        known = self._answers.get(proposal.config_id)
        return None if known is None else lambda: known

    def _told(self, record: TrialRecord) -> Told:
        """What the study is told. It is nothing for a prediction in a campaign that measures, and for a trial that
        found no free memory."""
        return NOT_TRIED if is_unmeasured(record, self._measured) or not _is_lasting(record) else record.objective_us

    def _choice(self, record: TrialRecord) -> Choice | None:
        return self._space.to_choice(_config(record))


def _config(record: TrialRecord) -> ScheduleConfig:
    return config_from_dict(json.loads(record.config))


def _is_lasting(record: TrialRecord) -> bool:
    """Whether another run would find the same: memory that was not free may be free then."""
    return record.outcome != "no_memory"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
