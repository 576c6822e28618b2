"""How fast samplers find the best of a space in which every configuration is known. Three commands:

    python experiments/judge_samplers.py record         # predict every configuration, once: the recorded space
    python experiments/judge_samplers.py ours           # flywheel's samplers on it
    python experiments/judge_samplers.py kernel-tuner   # in an environment with: pip install kernel_tuner scikit-learn

The space is llama3-8b, cut to LAYERS layers, on an h100 at context 2048: the knobs FREE, with all others pinned to the
second known good schedule. All samplers start cold, with their defaults. Only a configuration that was not tried before
counts as an evaluation. Kernel Tuner's simulation mode counts so, and a campaign's store answers repeated
configurations. Regret is the distance of the best configuration so far from the best of all. `kernel-tuner` needs no
flywheel, and `ours` needs no Kernel Tuner.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import gzip
import io
import json
import os
import random
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flywheel.search.space import Space
    from flywheel.search.workload import Workload

MODEL, LAYERS, GPU, DTYPE, CONTEXT = "llama3-8b", 4, "h100", "bf16", 2048
FREE = ("rows.gate_up", "kv_block", "fuse.out", "depth", "matrix", "chunk")
RECORDED = Path(__file__).parents[1] / "results" / "judge_samplers_space.csv.gz"
SPACE = "JUDGE_SAMPLERS_SPACE"
"""Environment variable with another path than RECORDED, for this process and its workers."""
CHECKPOINTS = (30, 60, 120)
STRATEGIES = (
    "bayes_opt", "basinhopping", "diff_evo", "dual_annealing", "firefly_algorithm", "genetic_algorithm", "greedy_ils",
    "greedy_mls", "hybrid_vndx", "mls", "pso", "random_sample", "simulated_annealing",
)  # fmt: skip
Table = dict[tuple[int, ...], float]
"""Predicted latency in us by the values of FREE."""


@cache
def recorded() -> Table:
    """The recorded space."""
    with gzip.open(os.environ.get(SPACE, RECORDED), "rt", encoding="utf-8", newline="") as file:
        rows = csv.reader(file)
        assert tuple(next(rows)) == (*FREE, "predicted_us")
        return {tuple(map(int, values)): float(latency_us) for *values, latency_us in rows}


@cache
def workload() -> Workload:
    """What is scheduled."""
    from flywheel.ir import TARGETS
    from flywheel.models.catalog import CATALOG
    from flywheel.search.workload import Workload

    return Workload(MODEL, replace(CATALOG[MODEL], n_layers=LAYERS), TARGETS[GPU], DTYPE, CONTEXT)


@cache
def space() -> Space:
    """The space with all but FREE pinned."""
    from flywheel.search.space import make_space

    good = make_space(workload()).known_good()[1]
    return make_space(workload(), {name: str(value) for name, value in good.items() if name not in FREE})


def predicted_us(values: tuple[int, ...]) -> float:
    """The cost model's word on one configuration."""
    from flywheel.measure.outcome import Predicted
    from flywheel.search.trials.evaluate import evaluate
    from flywheel.search.trials.predicting import predict_outcome

    choice = {**space().known_good()[0], **dict(zip(FREE, values, strict=True))}
    outcome = evaluate(space().to_config(choice), space().workload, lambda _: None, predict_outcome).outcome
    assert isinstance(outcome, Predicted), outcome
    return outcome.latency.latency_us


def record() -> None:
    """Predict every configuration and write them in order, without a date: the same predictions, the same bytes."""
    values = {dimension.name: dimension.values for dimension in space().dimensions}
    every = list(product(*(values[name] for name in FREE)))
    with ProcessPoolExecutor(2) as pool:
        latencies = pool.map(predicted_us, every, chunksize=16)
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow((*FREE, "predicted_us"))
        rows.writerows((*choice, f"{latency_us:.3f}") for choice, latency_us in zip(every, latencies, strict=True))
    path = Path(os.environ.get(SPACE, RECORDED))
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))
    from flywheel.cost_model import MODEL_VERSION

    print(f"{len(every)} configurations, predicted by version {MODEL_VERSION} of the cost model")


@cache
def dimensions() -> Space:
    """The recorded space as a sampler sees it."""
    from flywheel.search.knobs import KNOBS
    from flywheel.search.space import Dimension, Space

    ordered = {knob.name: knob.ordered for knob in KNOBS}
    values = zip(FREE, zip(*recorded(), strict=True), strict=True)
    return Space(workload(), tuple(Dimension(name, tuple(sorted(set(seen))), ordered[name]) for name, seen in values))


def search(sampler: str, seed: int) -> tuple[list[float], int]:
    """Latencies of what a sampler of ours tries, to the last checkpoint or the best of all; how often it was asked."""
    from flywheel.search.sampling.study import CampaignStudy

    study, tried = CampaignStudy(dimensions(), sampler, seed, []), dict[tuple[int, ...], float]()
    asked, best, low = 0, min(recorded().values()), float("inf")
    while len(tried) < CHECKPOINTS[-1] and low > best:
        asked += 1
        trial, choice = study.ask()
        key = tuple(int(choice[name]) for name in FREE)
        tried[key] = recorded()[key]
        low = min(low, tried[key])
        study.tell(trial, tried[key])
    return list(tried.values()), asked


def simulate(strategy: str, seed: int) -> tuple[list[float], int]:
    """The same of a strategy of Kernel Tuner."""
    import numpy
    from kernel_tuner import tune_cache

    random.seed(seed)
    numpy.random.seed(seed)
    warnings.filterwarnings("ignore", "None of the tunable parameters specify thread block dimensions", UserWarning)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "cache.json"
        path.write_text(kernel_tuner_cache(), encoding="utf-8")
        found, _ = tune_cache(
            str(path), strategy=strategy, strategy_options={"max_fevals": CHECKPOINTS[-1]}, objective="time",
            objective_higher_is_better=False, quiet=True,
        )  # fmt: skip
    tried = {tuple(int(result[name]) for name in FREE): float(result["time"]) for result in found}
    return list(tried.values()), len(found)


@cache
def kernel_tuner_cache() -> str:
    """The recorded space as a cache file of Kernel Tuner; times that nobody took are 0."""
    zero = {"compile_time": 0, "verification_time": 0, "benchmark_time": 0, "strategy_time": 0, "framework_time": 0}
    entries = {
        ",".join(map(str, key)): {**dict(zip(FREE, key, strict=True)), "time": latency_us / 1e3, **zero,
                                  "times": [latency_us / 1e3], "timestamp": "2000-01-01 00:00:00+00:00"}
        for key, latency_us in recorded().items()
    }  # fmt: skip
    values = {name: sorted(set(seen)) for name, seen in zip(FREE, zip(*recorded(), strict=True), strict=True)}
    header = {"device_name": GPU, "kernel_name": "decode", "problem_size": 1, "tune_params_keys": list(FREE),
              "tune_params": values, "objective": "time"}  # fmt: skip
    return json.dumps({**header, "cache": entries})


def judge(names: Sequence[str], run: Callable[[str, int], tuple[list[float], int]], seeds: int, unit: float) -> None:
    """Print the regrets of each name; `unit` is what its latencies are in, in us."""
    best = min(recorded().values())
    print(
        f"{'':<22}" + "".join(f"{f'regret at {n}, % (quartiles)':>32}" for n in CHECKPOINTS) + f"{'asked again, %':>16}"
    )
    with ProcessPoolExecutor(2) as pool:
        for name in names:
            runs = list(pool.map(run, [name] * seeds, range(seeds)))
            cells = []
            for count in CHECKPOINTS:
                regrets = [100 * (min(tried[:count]) * unit / best - 1) for tried, _ in runs]
                first, middle, last = statistics.quantiles(regrets, n=4)
                cells.append(f"{f'{middle:.2f} ({first:.2f}-{last:.2f})':>32}")
            repeats = 100 * (1 - sum(len(tried) for tried, _ in runs) / sum(asked for _, asked in runs))
            print(f"{name:<22}" + "".join(cells) + f"{repeats:>16.0f}", flush=True)


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["record", "ours", "kernel-tuner"])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--space", help=f"file of the recorded space  [default: {RECORDED.name} in results]")
    parser.add_argument("--only", help="names, separated by commas")
    arguments = parser.parse_args()
    if arguments.space:
        os.environ[SPACE] = arguments.space
    only = arguments.only.split(",") if arguments.only else None
    if arguments.command == "record":
        record()
    elif arguments.command == "ours":
        from flywheel.search.sampling.samplers import SAMPLERS

        head = f"{len(recorded())} configurations, best {min(recorded().values()):.1f} us predicted"
        print(f"{MODEL}, {LAYERS} layers, on {GPU}, {DTYPE}, context {CONTEXT}: {head}; {arguments.seeds} seeds")
        judge(only or list(SAMPLERS), search, arguments.seeds, 1.0)
    else:
        print(f"Kernel Tuner {version('kernel_tuner')}, simulation mode, defaults; {arguments.seeds} seeds")
        judge(only or STRATEGIES, simulate, arguments.seeds, 1e3)


if __name__ == "__main__":
    main()
