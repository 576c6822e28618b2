"""One config on its own: what becomes of it, beside the best that the store knows of the same work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from flywheel.cost_model import STOCK, Predictor
from flywheel.interop.t4 import configurations
from flywheel.ir import ScheduleConfig
from flywheel.measure.environment import capture_environment
from flywheel.measure.outcome import TrialOutcome
from flywheel.measure.record import TrialRecord
from flywheel.search import measuring, predicting
from flywheel.search.device import missing_modules, settle_measure
from flywheel.search.evaluate import Evaluation, Measure, evaluate
from flywheel.search.known import best_of_work
from flywheel.search.space import Space, Value, make_space
from flywheel.search.workload import Workload
from flywheel.store.sql import Store
from flywheel.vm.client import Client


@dataclass(frozen=True, slots=True)
class Appraisal:
    """An evaluation under `measure`, predict or cuda, and the incumbent: the best trial that the store has of the same
    work under the same kind of measure, None where it has none.

    `changed` holds, by knob, what the incumbent has and what the config has; by parameter of the config where one of
    them lies outside the search space.
    """

    measure: str
    evaluation: Evaluation
    outcome: TrialOutcome
    incumbent: TrialRecord | None
    changed: Mapping[str, tuple[Value, Value]]


def appraise(
    config: ScheduleConfig, workload: Workload, measure: str, store: Store | None, predictor: Predictor = STOCK
) -> Appraisal:
    """Lower, validate, and measure or predict; nothing is written, and no earlier trial answers.

    `measure` is auto, predict or cuda. Raises NoGpuError and UsageError where cuda cannot be had, StoreError, and what
    stops a GPU worker from starting.
    """
    settled = settle_measure(measure, workload.target, capture_environment().gpu, missing_modules())
    incumbent = None if store is None else _incumbent(store, workload, settled, predictor)
    with _measure(settled, workload, predictor) as run:
        evaluation = evaluate(config, workload, lambda _: None, run)
    assert not isinstance(evaluation.outcome, TrialRecord)  # nothing was looked up
    changed: Mapping[str, tuple[Value, Value]] = {}
    if incumbent is not None:
        changed = changes(make_space(workload), ScheduleConfig.from_dict(json.loads(incumbent.config)), config)
    return Appraisal(settled, evaluation, evaluation.outcome, incumbent, changed)


def changes(space: Space, before: ScheduleConfig, after: ScheduleConfig) -> dict[str, tuple[Value, Value]]:
    """What tells two configs apart: knobs where both are of the space, else parameters of the config."""
    first, second = space.to_choice(before), space.to_choice(after)
    if first is None or second is None:
        first, second = configurations([before, after])
    return {name: (first[name], second[name]) for name in first if first[name] != second[name]}


def _incumbent(store: Store, workload: Workload, measure: str, predictor: Predictor) -> TrialRecord | None:
    measured = measure == "cuda"
    return best_of_work(store, workload, measured=measured, predictor=None if measured else predictor.version)


@contextmanager
def _measure(kind: str, workload: Workload, predictor: Predictor) -> Iterator[Measure]:
    """The cost model, or the worker that owns the GPU."""
    if kind == "predict":
        yield partial(predicting.predict_outcome, predictor=predictor)
        return
    bench = partial(measuring.make_bench, workload.model, workload.dtype, workload.context, workload.batch)
    with Client(bench) as client:
        client.ready()
        yield client.measure
