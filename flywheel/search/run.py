"""One call from a campaign spec to its result: what the command line and scripts use."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod

from flywheel.cost_model import MODEL_VERSION, predict
from flywheel.errors import NoGpuError, UnknownNameError
from flywheel.ir import TARGETS, GpuTarget, MegakernelProgram
from flywheel.measure.environment import Environment, capture_environment
from flywheel.measure.latency import PredictedLatency
from flywheel.measure.outcome import Predicted
from flywheel.measure.record import TrialRecord
from flywheel.models.catalog import CATALOG, resolve_model
from flywheel.search.campaign import CampaignResult, CampaignRun, Progress, open_campaign
from flywheel.search.engine import Bench, InlineEngine, PoolEngine
from flywheel.search.evaluate import Seen
from flywheel.search.samplers import make_sampler
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec, with_name
from flywheel.search.workload import Workload
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
    spec = with_name(spec, settle_measure(spec.measure, workload.target, environment.gpu))
    space = make_space(workload, spec.fix)
    make_sampler(spec.sampler, spec.seed, 0)  # raises before the store has a campaign that cannot run
    with open_store(store_url) as store:
        name = open_campaign(spec, space, store, fresh)
        sizes = [len(dimension.values) for dimension in space.dimensions]
        known = len(store.trials(name))
        announce(Start(spec, name, known, sum(size > 1 for size in sizes), prod(sizes), environment))
        bench = Bench(workload, partial(open_seen, store_url, workload.target.name, spec.dtype), predict_outcome)
        with InlineEngine(bench) if spec.jobs == 1 else PoolEngine(bench, spec.jobs) as engine:
            return CampaignRun(spec, name, space, store, engine, environment).run(watch, interrupted)


def make_workload(model: str, gpu: str, dtype: str, context: int) -> Workload:
    """Resolve names. Raises UnknownNameError, UnsupportedModelError, ConfigError."""
    decoder = resolve_model(model)
    workload = Workload(model if model in CATALOG else decoder.name, decoder, find_target(gpu), dtype, context)
    _ = workload.graph  # raises where the context is out of reach
    return workload


def find_target(name: str) -> GpuTarget:
    """A built-in GPU by name. Raises UnknownNameError."""
    if name not in TARGETS:
        raise UnknownNameError(f"GPU {name!r} is not one of {', '.join(TARGETS)}")
    return TARGETS[name]


def settle_measure(wanted: str, target: GpuTarget, present: str | None) -> str:
    """How latencies are got: "predict", unless the GPU is here and its VM too. `present` names this machine's GPU.

    Raises NoGpuError where `cuda` cannot be had, and where another GPU is present and nobody asked for predictions.
    """
    if wanted == "predict":
        return "predict"
    if wanted == "cuda":
        where = f"this machine has {present}" if present else "this machine has no GPU"
        if present is None or not is_target(present, target):
            raise NoGpuError(f"--measure cuda needs an {target.name}: {where}")
        raise NoGpuError(f"--measure cuda: this version has no CUDA VM yet; {target.name} latencies can be predicted")
    if present is not None and not is_target(present, target):
        raise NoGpuError(f"--gpu {target.name}: this machine has {present}; --measure predict searches without it")
    return "predict"


def is_target(device: str, target: GpuTarget) -> bool:
    """Whether a device name, as its driver gives it, is this target: "NVIDIA GeForce RTX 4090" is rtx4090."""
    words = re.findall(r"[a-z0-9]+", device.lower())
    return target.name in {*words, *(first + second for first, second in pairwise(words))}


def open_seen(store_url: str, gpu: str, dtype: str) -> Seen:
    """Look-up of earlier trials, with a connection of its own."""
    store = open_store(store_url)

    def seen(program: str) -> TrialRecord | None:
        return store.seen(program, gpu=gpu, dtype=dtype, measure="predict", predictor=MODEL_VERSION)

    return seen


def predict_outcome(program: MegakernelProgram) -> Predicted:
    """The cost model's word on a validated program."""
    return Predicted(PredictedLatency(predict(program).latency_us, MODEL_VERSION))
