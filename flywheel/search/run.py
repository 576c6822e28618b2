"""One call from a campaign spec to its result: what the command line and scripts use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from flywheel.measure.environment import Environment, capture_environment
from flywheel.search.campaign import CampaignResult, CampaignRun, Progress, open_campaign
from flywheel.search.device import settle_measure
from flywheel.search.engine import Bench, InlineEngine, PoolEngine
from flywheel.search.predicting import open_seen, predict_outcome
from flywheel.search.samplers import make_sampler
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec, with_name
from flywheel.search.workload import make_workload
from flywheel.store.sql import open_store


@dataclass(frozen=True, slots=True)
class Start:
    """A campaign about to run: its settled spec and name, where it stands, and its environment."""

    spec: CampaignSpec
    name: str
    known: int
    dimensions: int
    configurations: int
    environment: Environment


def run_search(
    spec: CampaignSpec,
    store_url: str,
    *,
    fresh: bool = False,
    announce: Callable[[Start], None] = lambda _: None,
    watch: Callable[[Progress], None] = lambda _: None,
    interrupted: Callable[[], bool] = lambda: False,
) -> CampaignResult:
    """Run or resume the campaign that `spec` describes, in the store at `store_url`.

    Raises UnknownNameError, UnsupportedModelError, ConfigError, UsageError, NoGpuError and StoreError.
    """
    environment = capture_environment()
    workload = make_workload(spec.model, spec.gpu, spec.dtype, spec.context)
    measure = settle_measure(spec.measure, workload.target, environment.gpu)
    spec = with_name(replace(spec, model=workload.model), measure)
    space = make_space(workload, spec.fix)
    make_sampler(spec.sampler, spec.seed, 0)  # raises before the store has a campaign that cannot run
    bench = Bench(workload, partial(open_seen, store_url, workload.target.name, spec.dtype), predict_outcome)
    with (  # the store closes last: the last connection to a SQLite file folds its write-ahead log into it
        open_store(store_url) as store,
        InlineEngine(bench) if spec.jobs == 1 else PoolEngine(bench, spec.jobs) as engine,
    ):
        name = open_campaign(spec, space, store, fresh)
        sizes = [len(dimension.values) for dimension in space.dimensions]
        known = len(store.trials(name))
        announce(Start(spec, name, known, sum(size > 1 for size in sizes), prod(sizes), environment))
        return CampaignRun(spec, name, space, store, engine, environment).run(watch, interrupted)
