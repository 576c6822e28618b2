"""How close samplers come to the best known configuration, over seeds: `python experiments/samplers.py`.

Every campaign begins with the known good schedules, or without any with `--cold`. It has a store of its own and is
judged by the cost model. `--layers` cuts the models to save time. The best known configuration of a work is the best of
all its campaigns, improved by coordinate descent until no single knob improves it further.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from flywheel.ir import TARGETS, config_from_dict
from flywheel.measure.environment import capture_environment
from flywheel.measure.outcome import Predicted
from flywheel.models.catalog import CATALOG
from flywheel.search.campaign import CampaignRun
from flywheel.search.knobs import Value
from flywheel.search.opening import open_campaign
from flywheel.search.space import Space, make_space
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials.engine import EvaluationSetup, InlineEngine
from flywheel.search.trials.evaluate import evaluate
from flywheel.search.trials.predicting import predict_outcome
from flywheel.search.workload import Workload
from flywheel.store.sql import open_store

CONTEXT = 512
CHECKPOINTS = (20, 40, 60, 80, 120)
WITHIN = (2.0, 0.5)
"""In %: how far behind the best known is near enough to ask when it was reached."""

Work = tuple[str, str]
Run = tuple[list[float], dict[str, Value]]


def make_work(work: Work, layers: int) -> Workload:
    """The work, of a model with so many layers."""
    model, gpu = work
    return Workload(model, replace(CATALOG[model], n_layers=layers), TARGETS[gpu], "bf16", CONTEXT)


def unseen(_: str) -> None:
    """A look-up that knows nothing, so that every trial is computed."""


def campaign(work: Work, layers: int, trials: int, cold: bool, job: tuple[str, int]) -> Run:
    """Best prediction in us after each trial of one campaign, and its best choice; `job` is its sampler and seed."""
    sampler, seed = job
    spec = CampaignSpec(
        *work, context=CONTEXT, measure="predict", sampler=sampler, seed=seed, trials=trials, seeds=not cold, name="one"
    )
    workload = make_work(work, layers)
    space = make_space(workload)
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "store.db") as store:
        name = open_campaign(spec, space, store, fresh=False)
        engine = InlineEngine(EvaluationSetup(workload, unseen, predict_outcome))
        CampaignRun(spec, name, space, store, engine, capture_environment()).run(lambda _: None, lambda: False)
        records = store.trials(name)
        best = store.best(measured=False, campaign=name)
    curve, low = [], float("inf")
    for record in records:
        low = min(low, record.predicted_us or low)
        curve.append(low)
    assert best is not None
    choice = space.to_choice(config_from_dict(json.loads(best.config)))
    assert choice is not None
    return curve, choice


def cost(space: Space, choice: dict[str, Value]) -> float:
    """Predicted latency in us of one choice."""
    outcome = evaluate(space.to_config(choice), space.workload, lambda _: None, predict_outcome).outcome
    return outcome.latency.latency_us if isinstance(outcome, Predicted) else float("inf")


def descend(space: Space, choice: dict[str, Value], low: float) -> tuple[dict[str, Value], float]:
    """Coordinate descent: the best single change, knob by knob, until a round changes nothing."""
    improved = True
    while improved:
        improved = False
        for dimension in space.dimensions:
            for value in dimension.values:
                if value == choice[dimension.name]:
                    continue
                trial = {**choice, dimension.name: value}
                latency = cost(space, trial)
                if latency < low * (1 - 1e-9):
                    choice, low, improved = trial, latency, True
    return choice, low


def trials_to(curve: list[float], wanted_us: float) -> int:
    """Number of the first trial at least that fast, from 1; one more than there are where none is."""
    return next((number for number, latency in enumerate(curve, 1) if latency <= wanted_us), len(curve) + 1)


def show(sampler: str, curves: list[list[float]], low: float) -> None:
    """Print a line: the regrets at each checkpoint, and when campaigns came near enough."""
    cells = []
    for trial in CHECKPOINTS:
        if trial <= len(curves[0]):
            first, middle, last = statistics.quantiles([100 * (curve[trial - 1] / low - 1) for curve in curves], n=4)
            cells.append(f"{f'{middle:.2f} ({first:.2f}-{last:.2f})':>22}")
    for within in WITHIN:
        cells.append(f"{statistics.median(trials_to(curve, low * (1 + within / 100)) for curve in curves):>12g}")
    print(f"{sampler:<10}" + "".join(cells), flush=True)


def main() -> None:
    """Print a table a work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default="llama3-8b/h100", help="MODEL/GPU, separated by commas")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--samplers", default="local,tpe,random")
    parser.add_argument("--cold", action="store_true", help="without known good schedules")
    asked = parser.parse_args()
    samplers = asked.samplers.split(",")
    jobs = [(sampler, seed) for seed in range(asked.seeds) for sampler in samplers]
    begin = "nothing" if asked.cold else "the known good schedules"
    print(f"{asked.layers} layers, bf16, context {CONTEXT}, predicted; {asked.seeds} seeds, starting from {begin}")
    print("regret in %: median (quartiles); trials to within: median")
    heads = [f"{f'regret at {trial}':>22}" for trial in CHECKPOINTS if trial <= asked.trials]
    heads += [f"{f'to {within} %':>12}" for within in WITHIN]
    for model, _, gpu in (name.partition("/") for name in asked.works.split(",")):
        with ProcessPoolExecutor(2) as pool:
            one = partial(campaign, (model, gpu), asked.layers, asked.trials, asked.cold)
            runs = dict(zip(jobs, pool.map(one, jobs), strict=True))
        best, choice = min(((curve[-1], choice) for curve, choice in runs.values()), key=lambda found: found[0])
        choice, low = descend(make_space(make_work((model, gpu), asked.layers)), choice, best)
        print(f"{model} on {gpu}: best known {low:.1f} us, {choice}")
        print(" " * 10 + "".join(heads))
        for sampler in samplers:
            show(sampler, [runs[sampler, seed][0] for seed in range(asked.seeds)], low)


if __name__ == "__main__":
    main()
