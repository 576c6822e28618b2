"""How far behind the best known predictions searches end, over seeds: `python experiments/predicted_regret.py`.

Whole models, from the known good schedules on, with two trials under way, as a campaign of two jobs. Every trial is
lowered and predicted, and not proved: that is another experiment's. Regret is against BEST_US, the best of thousands of
configs that searches and descents of cost model 5 found in all; a negative one is a better schedule than was known.
"""

from __future__ import annotations

import argparse
import statistics
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from time import perf_counter
from types import MappingProxyType

from flywheel.cost_model import MODEL_VERSION, STOCK
from flywheel.search.foresight import predict_config
from flywheel.search.space import make_space
from flywheel.search.study import CampaignStudy
from flywheel.search.workload import make_workload

BEST_US = MappingProxyType(
    {"llama3-8b/h100": 5071.25, "llama3.2-1b/h200": 724.62, "qwen3-0.6b/h200": 791.40, "mistral-7b/h100": 4812.34}
)
CHECKPOINTS = (40, 120, 400, 1000, 2000, 3000)
UNDER_WAY = 2


def search(work: str, sampler: str, trials: int, seed: int) -> tuple[list[float], float, float]:
    """Best prediction in us at each checkpoint; seconds of asking, and of all."""
    model, _, gpu = work.partition("/")
    workload = make_workload(model, gpu, "bf16", 512, 1)
    space = make_space(workload)
    study = CampaignStudy(space, sampler, seed, [])
    for choice in space.known_good():
        study.enqueue(choice)
    flight = deque[tuple]()
    low, curve, ask_s, start = float("inf"), list[float](), 0.0, perf_counter()
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
    return [curve[count - 1] for count in CHECKPOINTS if count <= trials], ask_s, perf_counter() - start


def main() -> None:
    """Print a line a work and sampler."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", default=",".join(BEST_US), help="of BEST_US, separated by commas")
    parser.add_argument("--samplers", default="descent,local", help="names, separated by commas")
    parser.add_argument("--trials", type=int, default=3000)
    parser.add_argument("--seeds", type=int, default=5)
    asked = parser.parse_args()
    counts = [count for count in CHECKPOINTS if count <= asked.trials]
    print(f"cost model {MODEL_VERSION}, bf16, context 512; regret in %, median (worst) of {asked.seeds} seeds")
    heads = "".join(f"{f'after {count}':>16}" for count in counts)
    print(f"{'':<28}{heads}{'ms an ask':>12}{'ms a trial':>12}")
    with ProcessPoolExecutor(2) as pool:
        for work in asked.works.split(","):
            for sampler in asked.samplers.split(","):
                runs = list(pool.map(partial(search, work, sampler, asked.trials), range(asked.seeds)))
                each = [[100 * (low / BEST_US[work] - 1) for low in lows] for lows, _, _ in runs]
                cells = [f"{statistics.median(one):.2f} ({max(one):.2f})" for one in zip(*each, strict=True)]
                spent = [1e3 * statistics.mean(times) / asked.trials for times in list(zip(*runs, strict=True))[1:]]
                line = "".join(f"{cell:>16}" for cell in cells) + "".join(f"{ms:>12.1f}" for ms in spent)
                print(f"{work + ' ' + sampler:<28}{line}", flush=True)


if __name__ == "__main__":
    main()
