"""Evaluating one config, beside the best trial that the store has of the same work."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Final

from flywheel.cost_model import STOCK, Predictor
from flywheel.interop.t4 import configurations
from flywheel.ir import MegakernelProgram, ScheduleConfig, config_from_dict
from flywheel.measure.environment import capture_environment
from flywheel.measure.outcome import Contest, Measured, TrialOutcome
from flywheel.measure.record import TrialRecord
from flywheel.search.knobs import Value, check_kernels
from flywheel.search.knowledge.lowered import best_of_work
from flywheel.search.noise import Gain, gain
from flywheel.search.space import Space, make_space
from flywheel.search.trials import measuring, predicting
from flywheel.search.trials.device import gpus_here, missing_modules, settle_measure
from flywheel.search.trials.evaluate import Evaluation, prepare
from flywheel.search.workload import Workload
from flywheel.store.sql import Store
from flywheel.vm.client import Client

ROUNDS: Final = 5
"""How often the schedule and the incumbent are loaded anew and timed."""


@dataclass(frozen=True, slots=True)
class Appraisal:
    """An evaluation under `measure`, predict or cuda, and the incumbent: the best trial that the store has of the same
    work under the same kind of measure, None where it has none.

    `gained` compares it with the incumbent if both were measured in turn. `changed` holds (incumbent's value, config's
    value) by knob; by parameter of the config if one of the two lies outside the search space.
    """

    measure: str
    evaluation: Evaluation
    outcome: TrialOutcome
    incumbent: TrialRecord | None
    changed: Mapping[str, tuple[Value, Value]]
    gained: Gain | None = None


Compare = Callable[[MegakernelProgram], Contest]


def appraise(
    config: ScheduleConfig, workload: Workload, measure: str, store: Store | None, predictor: Predictor = STOCK
) -> Appraisal:
    """Lower and validate a config, and predict or measure it. A measurement takes turns with the incumbent if the
    incumbent can still be lowered, and waits for a quiet GPU. Nothing is written, and no earlier trial answers.

    `measure` is auto, predict or cuda. Raises NoGpuError and UsageError if cuda is impossible here, ConfigError for
    formats of weights without kernels, StoreError, and any error that stops a GPU worker from starting.
    """
    check_kernels(workload)
    present, there = capture_environment().device, max(len(gpus_here(workload.target)), 1)
    settled = settle_measure(measure, workload.target, present, missing_modules(), workload.ranks, there)
    incumbent = None if store is None else _incumbent(store, workload, settled, predictor)
    before = None if incumbent is None else config_from_dict(json.loads(incumbent.config))
    with _open(settled, workload, before, predictor) as compare:
        evaluation = _evaluate(config, workload, compare)
    assert not isinstance(evaluation.outcome, TrialRecord)  # nothing was looked up
    changed = {} if before is None else changes(make_space(workload), before, config)
    return Appraisal(settled, evaluation, evaluation.outcome, incumbent, changed, _gained(evaluation.contest))


def _evaluate(config: ScheduleConfig, workload: Workload, compare: Compare) -> Evaluation:
    prepared = prepare(config, workload)
    if prepared.refused is not None:
        return prepared.ended(prepared.refused)
    assert prepared.program is not None
    start = perf_counter()
    contest = compare(prepared.program)
    return replace(prepared.ended(contest.outcome, perf_counter() - start), contest=contest)


def _gained(contest: Contest | None) -> Gain | None:
    if contest is None or not all(isinstance(each, Measured) for each in (contest.outcome, *contest.rivals)):
        return None
    return gain(contest.times_us[0], contest.times_us[1], seed=0) if len(contest.times_us) > 1 else None


def changes(space: Space, before: ScheduleConfig, after: ScheduleConfig) -> dict[str, tuple[Value, Value]]:
    """The differences of two configs: of knobs; where a config is no choice of knobs, of all its parameters."""
    first, second = space.reading(before), space.reading(after)
    if first is None or second is None:
        return _differing(*configurations([before, after]))
    return _differing(first, second)


def _differing(first: Mapping[str, Value], second: Mapping[str, Value]) -> dict[str, tuple[Value, Value]]:
    return {name: (first[name], second[name]) for name in first if first[name] != second[name]}


def _incumbent(store: Store, workload: Workload, measure: str, predictor: Predictor) -> TrialRecord | None:
    measured = measure == "cuda"
    return best_of_work(store, workload, measured=measured, predictor=None if measured else predictor.version)


@contextmanager
def _open(
    kind: str, workload: Workload, rival: ScheduleConfig | None, predictor: Predictor
) -> Iterator[Compare]:
    """The cost model, or the worker that owns the GPU, which measures a program in turn with the `rival`'s."""
    if kind == "predict":
        yield lambda program: Contest(predicting.predict_outcome(program, predictor=predictor))
        return
    found = None if rival is None else prepare(rival, workload)
    rivals = () if found is None or found.refused is not None or found.program is None else (found.program,)
    bench = partial(
        measuring.make_bench, workload.model, workload.dtype, workload.context, workload.batch, workload.weights,
        workload.ranks,
    )  # fmt: skip
    with Client(bench) as client:
        client.ready()
        attendant = measuring.attendant(workload.ranks)
        yield lambda program: attendant.measured(partial(in_turn, client, rivals, program))


def in_turn(client: Client, rivals: tuple[MegakernelProgram, ...], program: MegakernelProgram) -> Contest:
    """A program beside `rivals`, in ROUNDS; alone where they do not run together, so that a rival's fault is not its
    own."""
    contest = client.compare(program, rivals, ROUNDS) if rivals else None
    return contest if contest is not None and contest.times_us else client.compare(program)
