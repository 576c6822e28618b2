"""One call from a campaign spec to its result, for the command line and scripts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from threading import Thread

from flywheel.cost_model import MODEL_VERSION, open_predictor
from flywheel.decode.notes import Note
from flywheel.errors import WorkerDiedError
from flywheel.measure.environment import Environment
from flywheel.measure.standing import trials_of
from flywheel.search.campaign import CampaignResult, CampaignRun, Progress
from flywheel.search.knobs import check_kernels
from flywheel.search.knowledge.known import Known, answer_of, best_known
from flywheel.search.knowledge.lessons import lessons_for, taught_by
from flywheel.search.knowledge.warm import WarmStart, starts_of
from flywheel.search.opening import learns_before, open_campaign, resumed
from flywheel.search.sampling.expectation import Lessons
from flywheel.search.sampling.foresight import Foresight, is_calibrated
from flywheel.search.sampling.samplers import make_sampler
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Space, check_runnable, make_space
from flywheel.search.spec import BUDGETS, METHOD, PREDICTED_PATIENCE, CampaignSpec, with_name
from flywheel.search.trials.forks import expect_forks, jobs_of
from flywheel.search.trials.sites import open_engine, open_site
from flywheel.search.workload import make_workload, notes_of_search
from flywheel.store.sql import open_store


@dataclass(frozen=True, slots=True)
class Start:
    """A campaign that is about to run: its settled spec and name, the number `known` of its rows so far, the size of
    its space, its environment, and the `starts` that the store or the package has for it.

    `predictor` is the version of the cost model that predictions would use. `best_known` is the best schedule of this
    very work that was measured before. `notes` are what users should know of the model's weights, and of measurements
    that were passed over. `lessons` counts the measurements of other works that this search learns from.
    """

    spec: CampaignSpec
    name: str
    known: int
    dimensions: int
    configurations: int
    environment: Environment
    starts: tuple[WarmStart, ...] = ()
    predictor: str = MODEL_VERSION
    best_known: Known | None = None
    notes: tuple[Note, ...] = ()
    lessons: int = 0


def run_search(
    spec: CampaignSpec,
    store_url: str,
    *,
    fresh: bool = False,
    given: Collection[str] = (*METHOD, *BUDGETS),
    announce: Callable[[Start], None] = lambda _: None,
    watch: Callable[[Progress], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> CampaignResult:
    """Run or resume the campaign that `spec` describes, in the store at `store_url`.

    `given` names the options of `spec` that somebody chose. A campaign that is resumed keeps the others of METHOD. If
    none of BUDGETS was chosen, a search that predicts ends after PREDICTED_PATIENCE trials without a gain.

    Raises InvalidProgramError where no schedule has kernels, UnknownNameError, UnsupportedModelError, ConfigError,
    UsageError, NoGpuError, KernelCompileError and StoreError; a worker that cannot start on the GPU raises what stops
    it.
    """
    jobs = jobs_of(spec.jobs)
    if jobs > 1:
        expect_forks()
    workload = make_workload(spec.model, spec.gpu, spec.dtype, spec.context, spec.batch, spec.weights)
    spec = replace(spec, weights=workload.stored)
    check_kernels(workload)
    space = make_space(workload, spec.fix)
    check_runnable(space)
    make_sampler(spec.sampler, spec.seed, 0)  # raises before the store has a campaign that cannot run
    predictor = open_predictor(spec.machine, workload.target)
    with (  # the store closes late: the last connection to a SQLite file folds its write-ahead log into it
        open_site(spec, workload.target, workload.ranks) as site,
        open_store(store_url) as store,
    ):
        spec = with_name(replace(spec, model=workload.model, gpu=workload.gpu), site.measure, predictor.version)
        spec = resumed(spec, store, fresh, given)
        if site.measure != "cuda" and spec.sampler != "grid" and not {*BUDGETS} & {*given}:
            spec = replace(spec, patience=PREDICTED_PATIENCE)
        learns = learns_before(spec, store, fresh)
        lessons = None if learns is None else lessons_for(space, taught_by(store, workload, learns))
        with (
            Foresight(workload, predictor, jobs) as foresight,
            _begun(spec, space, foresight, is_calibrated(predictor, workload), lessons) as steering,
            open_engine(spec, site, workload, store, predictor) as (engine, environment),
        ):
            name = open_campaign(spec, space, store, fresh, predictor.version, learns)
            sizes = [len(dimension.values) for dimension in space.dimensions]
            known = len(trials_of(store.trials(name)))
            campaign = store.campaign(name)
            starts = tuple(starts_of(campaign)) if campaign is not None and spec.seeds and spec.warm else ()
            searched = sum(size > 1 for size in sizes)
            told: list[str] = []
            before = best_known(workload, store, tell=told.append)
            notes = notes_of_search(workload, spec.measure == "cuda") + tuple([Note("schedule", line) for line in told])
            counts = known, searched, prod(sizes)
            taught = 0 if lessons is None or steering is None else len(lessons.losses)
            announce(Start(spec, name, *counts, environment, starts, predictor.version, before, notes, taught))
            campaign_run = CampaignRun(spec, name, space, store, engine, environment, predictor, steering, lessons)
            result = campaign_run.run(watch, interrupted)
            return replace(result, foreseen=foresight.said, answer=answer_of(workload, store, name, before))


@contextmanager
def _begun(
    spec: CampaignSpec, space: Space, foresight: Foresight, calibrated: bool, lessons: Lessons | None
) -> Iterator[Foresight | None]:
    """What steers a search that measures, if anything does: it makes its first predictions while the GPU gets ready.

    What the campaign's own study asks for will be known then: both ask for the same.
    """
    if spec.measure != "cuda" or not calibrated or spec.sampler != "descent":
        yield None
        return
    thread = Thread(target=_foresee, args=(spec, space, foresight, lessons), daemon=True)
    if foresight.jobs > 1:
        thread.start()
    yield foresight


def _foresee(spec: CampaignSpec, space: Space, foresight: Foresight, lessons: Lessons | None = None) -> None:
    """Ask a study for its first trials. A process that dies is the campaign's news."""
    study = CampaignStudy(space, spec.sampler, spec.seed, [], True, foresight, lessons)
    with suppress(WorkerDiedError):
        for _ in space.known_good():
            study.ask()
