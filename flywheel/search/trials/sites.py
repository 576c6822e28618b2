"""Where a campaign's trials run: in this process, in processes of this machine, or on a Ray cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from secrets import token_hex
from typing import Final

from flywheel.cost_model import STOCK, Predictor
from flywheel.errors import NoGpuError, UsageError
from flywheel.installing import install_line
from flywheel.ir import GpuTarget
from flywheel.measure.device import is_target
from flywheel.measure.environment import Environment, capture_environment, list_gpus
from flywheel.process import default_environment, prompt_threads
from flywheel.search.sampling.descending import BEHIND
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials import measuring, predicting
from flywheel.search.trials.device import missing_modules, settle_measure
from flywheel.search.trials.engine import EvaluationSetup, InlineEngine, TrialEngine
from flywheel.search.trials.fleet import Fleet, Host
from flywheel.search.trials.forks import jobs_of
from flywheel.search.trials.processes import ProcessHost
from flywheel.search.trials.station import Measuring, Predicting, Setup
from flywheel.search.workload import Workload
from flywheel.store.sql import Store

_AHEAD: Final = 1
"""Configs that a host prepares ahead while it measures another."""

_SIDE: Final = BEHIND + 1
"""Trials of a predicted search that run side by side. The number of processes does not change it, so each proposal
depends on the same earlier trials."""

_QUEUED: Final = 1
"""Configs that wait while all requested workers predict, so that no worker is idle while the next is proposed."""

_QUIET: Final = {"RAY_DEDUP_LOGS_SKIP_REGEX": "(?s).*"}
"""Keeps Ray from printing any log line: it would write the log of a dying raylet to stdout."""


@dataclass(frozen=True, slots=True)
class Site:
    """The machines of a campaign. `measure` is predict or cuda, `make_hosts` makes the hosts of stations on them, and
    `queued` configs wait beside those on the hosts where all hosts predict."""

    measure: str
    make_hosts: Callable[[Setup], Sequence[Host]]
    queued: int = _QUEUED


@contextmanager
def open_site(spec: CampaignSpec, target: GpuTarget, ranks: int = 1) -> Iterator[Site]:
    """The site that `spec.engine` stands for. A worker that measures has `ranks` GPUs of one machine.

    Raises NoGpuError and UsageError as `settle_measure` does, and UsageError where there are fewer GPUs or processors
    than workers, or no cluster.
    """
    if spec.engine == "local":
        yield _here(spec, target, ranks)
        return
    if find_spec("ray") is None:
        raise UsageError(f"--engine ray needs ray: {install_line('ray')}")
    if "ray" not in sys.modules:  # Ray reads these variables at its import
        default_environment(_QUIET)
        if spec.ray_address is None:
            default_environment({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)})
    from flywheel.search.trials.cluster import RayHost, connect

    with connect(spec.ray_address) as cluster:
        sets = cluster.sets_of(ranks)
        if spec.measure == "cuda" and not sets:
            wanted = f"{ranks} GPUs" if ranks > 1 else "a GPU"
            raise NoGpuError(f"--measure cuda needs {_named(target, ranks)}: no node of the Ray cluster has {wanted}")
        measure = "cuda" if sets and spec.measure != "predict" else "predict"
        gpus, there = (ranks, sets) if measure == "cuda" else (0, cluster.cpus)
        counted = f"x {ranks} GPUs" if ranks > 1 else "GPUs"
        count = _workers(spec.workers or there, there, "the Ray cluster", counted if gpus else "processors")
        names = [f"actor {number}" for number in range(count)]
        yield Site(measure, lambda setup: [RayHost(name, setup, gpus, cluster.pulse) for name in names])


def _named(target: GpuTarget, ranks: int) -> str:
    return f"an {target.name}" if ranks == 1 else f"{ranks} {target.name}"


def _here(spec: CampaignSpec, target: GpuTarget, ranks: int) -> Site:
    found = [(gpu, device) for gpu, device in list_gpus() if is_target(device, target)]
    present = found[0][1] if found else capture_environment().device
    there = max(len(found), 1)
    measure = settle_measure(spec.measure, target, present, missing_modules(), ranks, there)
    if measure == "predict":
        count = spec.workers or min(jobs_of(spec.jobs), _SIDE)
        queued = _QUEUED if spec.workers else _SIDE - count
        return Site(measure, lambda setup: [ProcessHost(f"process {number}", setup) for number in range(count)], queued)
    starts = range(0, len(found) - ranks + 1, ranks)
    sets = [",".join(gpu for gpu, _ in found[start : start + ranks]) for start in starts]
    # Where the driver lists a GPU without an id, the worker takes CUDA's default.
    chosen = [(gpus, {"CUDA_VISIBLE_DEVICES": gpus}) for gpus in sets] or [(getattr(present, "name", "GPU"), {})]
    counted = f"{target.name} GPUs" if ranks == 1 else f"x {ranks} {target.name} GPUs"
    count = _workers(spec.workers or len(chosen), len(chosen), "this machine", counted)
    return Site(measure, lambda setup: [ProcessHost(name, setup, environ) for name, environ in chosen[:count]])


def _workers(wanted: int, there: int, where: str, what: str) -> int:
    if wanted > there:
        raise UsageError(f"--workers {wanted}: {where} has {there} {what}")
    return wanted


@contextmanager
def open_engine(
    spec: CampaignSpec, site: Site, workload: Workload, store: Store, predictor: Predictor = STOCK
) -> Iterator[tuple[TrialEngine, Environment]]:
    """An engine at a site, and the environment of its hosts, or of this process if processes of this machine predict.

    `spec.measure` must be the site's. Raises the error of a host that cannot start, if it measures or is on Ray.
    """
    gpu = workload.gpu
    if spec.measure == "predict" and spec.engine == "local" and (spec.workers or jobs_of(spec.jobs)) == 1:
        seen = partial(predicting.look, store, gpu, spec.dtype, version=predictor.version)
        bench = EvaluationSetup(workload, seen, partial(predicting.predict_outcome, predictor=predictor))
        with InlineEngine(bench) as engine:
            yield engine, capture_environment()
        return
    measured, here = spec.measure == "cuda", None
    if measured:
        bench_of = partial(
            measuring.make_bench, spec.model, spec.dtype, spec.context, spec.batch, spec.weights, workload.ranks
        )
        space = make_space(workload, spec.fix)
        compile_all = partial(
            measuring.compile_all, spec.dtype, workload.target.sm_arch, space.kernels(),
            formats=space.kernel_formats(), ranked=workload.ranks > 1, features=space.kernel_features(),
        )  # fmt: skip
        means = Measuring(
            bench_of, partial(measuring.compile_ahead, spec.dtype), measuring.wrap, compile_all=compile_all,
            attend=partial(measuring.attendant, workload.ranks),
        )  # fmt: skip
        filtering = predictor if spec.prefilter is not None else None
        setup = Setup(workload, means, partial(measuring.capture, workload.target), filtering)
        look = partial(measuring.look, store, gpu, spec.dtype)
    else:
        predict = partial(predicting.predict_outcome, predictor=predictor)
        # Processes of this machine share this one's environment. To capture it again would take as long as a trial.
        here = None if spec.engine == "ray" else capture_environment()
        capture = capture_environment if here is None else partial(replace, here)
        setup = Setup(workload, Predicting(predict, at_once=True), capture)
        look = partial(predicting.look, store, gpu, spec.dtype, version=predictor.version)
    ahead, queued = (_AHEAD, 0) if measured else (0, site.queued)
    hosts = site.make_hosts(setup)
    with prompt_threads(), Fleet(hosts, look, ahead=ahead, queued=queued, measured=measured) as fleet:
        # Processes that predict on this machine start while the first proposals are made.
        yield fleet, here or fleet.ready()[0]
