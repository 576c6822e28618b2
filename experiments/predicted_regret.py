"""Measures searches' regret against the best known predictions: `python experiments/predicted_regret.py`.

Whole models are searched from the known good schedules on, with three trials at a time, as in a campaign of two jobs.
Every trial is lowered and predicted, but not proved; search_rate.py times whole trials. A search has RATES times as
many trials as two idle cores make in 67 s (an 8b) or 40 s (a small model), whatever the load of this machine. Seeds
begin at FRESH, and nothing was tuned on them.

Regret is against the best known prediction: the least of BEST_US, which earlier searches found by the cost model's
version BEST_BY, and of all these searches. The limit holds for the worst seed of each work. For another work
(MODEL/GPU, MODEL/GPU:BATCH), or by another version, there is no BEST_US. Searches then go on for as many trials again
as are judged, and the best is that of all of them.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from math import inf
from time import perf_counter
from types import MappingProxyType

from flywheel.cost_model import MODEL_VERSION, STOCK
from flywheel.search.sampling.foresight import predict_config
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload

BEST_BY = "8"
BEST_US = MappingProxyType(
    {"llama3-8b/h100": 5040.02, "llama3.2-1b/h200": 688.41, "qwen3-0.6b/h200": 662.91, "mistral-7b/h100": 4776.93}
)
"""Of two searches of 2,000 trials each, seeds 0 and 1."""
SECONDS = MappingProxyType(
    {"llama3-8b/h100": 67.0, "llama3.2-1b/h200": 40.0, "qwen3-0.6b/h200": 40.0, "mistral-7b/h100": 67.0}
)
RATES = MappingProxyType(
    {"llama3-8b/h100": 40.0, "llama3.2-1b/h200": 45.0, "qwen3-0.6b/h200": 45.0, "mistral-7b/h100": 40.0}
)
"""Trials a second on two idle cores that search_rate.py must reach."""
BAR = 0.1
FRESH = 200
NEAR = (1.0, 0.1)
CHECKPOINTS = (40, 120, 400, 1000)
UNDER_WAY = 3


Run = tuple[list[float], float, float]
"""Best prediction in us after each trial; seconds of asking, and of all."""


def search(work: str, sampler: str, trials: int, seed: int) -> Run:
    """One search."""
    model, _, gpu = work.partition("/")
    gpu, _, batch = gpu.partition(":")
    workload = make_workload(model, gpu, "bf16", 512, int(batch or 1))
    space = make_space(workload)
    study = CampaignStudy(space, sampler, seed, [])
    for choice in space.known_good():
        study.enqueue(choice)
    flight = deque[tuple]()
    low, curve, ask_s, start = inf, list[float](), 0.0, perf_counter()
    while len(curve) < trials:
        while len(flight) < min(UNDER_WAY, trials - len(curve)):
            asked = perf_counter()
            flight.append(study.ask())
            ask_s += perf_counter() - asked
        trial, choice = flight.popleft()
        latency_us = predict_config(space.to_config(choice), workload, STOCK)
        study.tell(trial, latency_us)
        low = low if latency_us is None else min(low, latency_us)
        curve.append(low)
    return curve, ask_s, perf_counter() - start


def show(name: str, trials: int, runs: Sequence[Run], best_us: float) -> float:
    """Print a line; the worst regret at the end."""
    curves = [[100 * (low / best_us - 1) for low in curve[:trials]] for curve, _, _ in runs]
    counts = [min(count, trials) for count in (*CHECKPOINTS, trials)]
    each = [[curve[count - 1] for curve in curves] for count in counts]
    cells = [f"{f'{statistics.median(one):.2f} ({max(one):.2f})':>15}" for one in each]
    near = [[sum(regret > bar for regret in curve) + 1 for curve in curves] for bar in NEAR]
    cells[-1:] = [f"{trials:>8}", cells[-1], *(f"{f'{statistics.median(one):.0f} ({max(one)})':>17}" for one in near)]
    spent = [1e3 * statistics.mean(run[place] for run in runs) / len(runs[0][0]) for place in (1, 2)]
    print(f"{name:<28}" + "".join(cells) + f"{spent[0]:>11.1f}{spent[1]:>12.1f}", flush=True)
    return max(each[-1])


def main() -> None:
    """Print a line a work and sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default=",".join(BEST_US), help="MODEL/GPU or MODEL/GPU:BATCH, separated by commas")
    parser.add_argument("--samplers", default="descent", help="names, separated by commas")
    parser.add_argument("--trials", type=int, help="instead of what SECONDS and RATES make")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=FRESH, help="seed of the first one")
    parser.add_argument("--jobs", type=int, default=2, help="searches at once")
    asked = parser.parse_args()
    works, samplers = asked.works.split(","), asked.samplers.split(",")
    trials = {work: asked.trials or round(SECONDS.get(work, 40.0) * RATES.get(work, 45.0)) for work in works}
    print(f"cost model {MODEL_VERSION}, bf16, context 512; regret in %, median (worst) of {asked.seeds} seeds from "
          f"{asked.first} on")  # fmt: skip
    print(f"{', '.join(BEST_US)} were in sight when the known good schedules and the sampler's constants were chosen;")
    print(f"no other work was, and no seed from {FRESH} on")
    known = BEST_US if MODEL_VERSION == BEST_BY else {}
    heads = "".join(f"{f'after {count}':>15}" for count in CHECKPOINTS) + f"{'trials':>8}{'regret then':>15}"
    heads += "".join(f"{f'trials to {bar:g} %':>17}" for bar in NEAR) + f"{'ms an ask':>11}{'ms a trial':>12}"
    print(f"{'':<28}{heads}")
    worst: dict[str, float] = {}
    with ProcessPoolExecutor(asked.jobs) as pool:
        futures = {
            (work, sampler): [
                pool.submit(search, work, sampler, trials[work] * (1 if work in known else 2), seed)
                for seed in range(asked.first, asked.first + asked.seeds)
            ]
            for work in works
            for sampler in samplers
        }
        for work in works:
            runs = {sampler: [future.result() for future in futures[work, sampler]] for sampler in samplers}
            best_us = min(curve[-1] for one in runs.values() for curve, _, _ in one)
            best_us = min(best_us, known.get(work, best_us))
            for sampler in samplers:
                regret = show(f"{work} {sampler}", trials[work], runs[sampler], best_us)
                if sampler == "descent":
                    worst[work] = regret
            count = trials[work] * (1 if work in known else 2)
            print(f"  best known: {best_us:.2f} us, with these searches of {count} trials")
    reached = "yes" if all(regret <= BAR for regret in worst.values()) else "NO"
    found = ", ".join(f"{work} {regret:.2f} %" for work, regret in worst.items())
    print(f"predicted regret after 400 trials' time of before, worst seed: {found}; at most {BAR} % each: {reached}")


if __name__ == "__main__":
    main()
