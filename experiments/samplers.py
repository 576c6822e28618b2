"""How close samplers come to the best known configuration, over seeds: `python experiments/samplers.py`.

Every campaign starts cold (no known-good schedules) and is judged by the cost model. The best known configuration is
the best of all campaigns, improved by coordinate descent until no single knob improves it further.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from flywheel.measure.environment import capture_environment
from flywheel.search.campaign import CampaignRun, open_campaign
from flywheel.search.engine import Bench, InlineEngine
from flywheel.search.evaluate import evaluate
from flywheel.search.predicting import predict_outcome
from flywheel.search.space import Space, Value, make_space
from flywheel.search.spec import CampaignSpec, with_name
from flywheel.search.workload import make_workload
from flywheel.store.sql import open_store

CHECKPOINTS = (20, 40, 80)


def unseen() -> object:
    """A look-up that knows nothing, so that every trial is computed."""
    return lambda _: None


def campaign(model: str, gpu: str, sampler: str, seed: int, trials: int) -> tuple[list[float], dict[str, Value]]:
    """Best prediction in us after each trial of one cold campaign, and its best choice."""
    spec = with_name(
        CampaignSpec(model, gpu, sampler=sampler, seed=seed, trials=trials, seeds=False, measure="predict"), "predict"
    )
    workload = make_workload(model, gpu, spec.dtype, spec.context)
    space = make_space(workload)
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "store.db") as store:
        name = open_campaign(spec, space, store, fresh=False)
        engine = InlineEngine(Bench(workload, unseen, predict_outcome))
        CampaignRun(spec, name, space, store, engine, capture_environment()).run(lambda _: None, lambda: False)
        records = store.trials(name)
        best = store.best(measured=False, campaign=name)
    curve, low = [], float("inf")
    for record in records:
        low = min(low, record.predicted_us or low)
        curve.append(low)
    assert best is not None
    from json import loads

    from flywheel.ir import ScheduleConfig

    choice = space.to_choice(ScheduleConfig.from_dict(loads(best.config)))
    assert choice is not None
    return curve, choice


def cost(space: Space, choice: dict[str, Value]) -> float:
    """Predicted latency in us of one choice."""
    outcome = evaluate(space.to_config(choice), space.workload, lambda _: None, predict_outcome).outcome
    return outcome.latency.latency_us  # type: ignore[union-attr]


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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--gpu", default="h100")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=80)
    parser.add_argument("--samplers", default="tpe,random")
    arguments = parser.parse_args()
    samplers = arguments.samplers.split(",")
    jobs = [(sampler, seed) for seed in range(arguments.seeds) for sampler in samplers]
    curves: dict[str, list[list[float]]] = {sampler: [] for sampler in samplers}
    best: tuple[float, dict[str, Value]] | None = None
    with ProcessPoolExecutor(2) as pool:
        futures = [
            (sampler, pool.submit(campaign, arguments.model, arguments.gpu, sampler, seed, arguments.trials))
            for sampler, seed in jobs
        ]
        for sampler, future in futures:
            curve, choice = future.result()
            curves[sampler].append(curve)
            if best is None or curve[-1] < best[0]:
                best = (curve[-1], choice)
    assert best is not None
    space = make_space(make_workload(arguments.model, arguments.gpu, "bf16", 512))
    choice, low = descend(space, best[1], best[0])
    print(f"{arguments.model} on {arguments.gpu}, bf16, context 512, predicted; {arguments.seeds} seeds, cold starts")
    print(f"best known: {low:.1f} us  {choice}")
    checkpoints = [trial for trial in CHECKPOINTS if trial <= arguments.trials]
    print(f"{'sampler':<10}" + "".join(f"{f'regret at {n}, % (quartiles)':>34}" for n in checkpoints))
    for sampler in samplers:
        cells = []
        for trial in checkpoints:
            regrets = sorted(100 * (curve[trial - 1] / low - 1) for curve in curves[sampler])
            first, middle, last = statistics.quantiles(regrets, n=4)
            cells.append(f"{f'{middle:.2f} ({first:.2f}-{last:.2f})':>34}")
        print(f"{sampler:<10}" + "".join(cells))


if __name__ == "__main__":
    main()
