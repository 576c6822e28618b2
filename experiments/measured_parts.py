"""Splits the wall time of measured trials into parts, in the process that owns the GPU:

    python experiments/measured_parts.py --works llama3.2-1b:results.4c6a0c0.tsv:60,llama3-8b:results.4c6a0c0.tsv:60

A work is MODEL:ROWS:TRIALS. The first trials of the last measured campaign of that model in results/gpu/ROWS are
measured again, each beside the best before it, as a search does. First come the parts of a start: imports, the GPU's
context, and the bench with its weights, model, judge and packed matrices. Then, by the number of samples, medians in ms
of a trial's parts. A part lies inside the one whose name begins its own. "open" unpickles the program, "load" puts it
on the GPU, "judge" examines it, "turns" times it alternately with its rival, and "batch" and "again" follow.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import functools
import json
import pstats
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from flywheel.ir import config_from_dict
from flywheel.lowering.lower import lower
from flywheel.search.trials.measuring import make_bench, wrap
from flywheel.search.workload import make_workload
from flywheel.vm.worker import Parcel

RECORDED = Path(__file__).resolve().parents[1] / "results" / "gpu"
BATCHED = re.compile(r"-b\d+-")
spent: defaultdict[str, float] = defaultdict(float)


def timed(owner: Any, name: str, part: str) -> None:
    """Count the seconds of a function of a class or module as a part."""
    plain: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(plain)
    def counted(*arguments: Any, **named: Any) -> Any:
        start = perf_counter()
        try:
            return plain(*arguments, **named)
        finally:
            spent[part] += perf_counter() - start

    setattr(owner, name, counted)


def parts() -> tuple[tuple[Any, str, str], ...]:
    """The parts of starts and trials: (class or module, its function, name)."""
    from flywheel.decode import cuda
    from flywheel.decode.source import Source
    from flywheel.judge import bench
    from flywheel.judge import verdicts as judge
    from flywheel.judge.deviations import Oracle, Scores
    from flywheel.vm.gpu import flush, loader, timing

    return (
        (Source, "weights", "start weights"),
        (cuda.CudaModel, "__init__", "start model"),
        (judge.Judge, "__init__", "start judge"),
        (cuda.CudaModel, "pack_matrices", "start packed"),
        (cuda.CudaModel, "load_packed", "load"),
        (loader.LoadedProgram, "__init__", "load tables"),
        (judge.Judge, "examine", "judge"),
        (judge.Judge, "_launch", "judge launch"),
        (cuda.CudaSession, "_prepare", "judge launch prepare"),
        (judge, "gather", "judge gather"),
        (Oracle, "compare", "judge oracle"),
        (Scores, "scored", "judge scored"),
        (bench, "time_sessions", "turns"),
        (flush.Flush, "__init__", "turns flush"),
        (flush.Flush, "close", "turns flush end"),
        (timing, "read_state", "batch state"),
        (bench.CudaBench, "_with_batch", "batch"),
        (bench.CudaBench, "_judge_last", "again"),
        (loader.LoadedProgram, "close", "close"),
    )


def start(model: str) -> Any:
    """The bench of a model; prints what its parts take."""
    begun = perf_counter()
    import torch

    from flywheel.vm.gpu.driver import open_gpu

    imported = perf_counter()
    open_gpu()
    torch.zeros(1, device="cuda")
    context = perf_counter()
    spent.clear()
    bench = make_bench(model, "bf16", 512)
    ended = perf_counter()
    took = {"imports": imported - begun, "context": context - imported, "bench": ended - context, **spent}
    print(f"\n{model}: ready after {ended - begun:.2f} s: " + ", ".join(f"{k} {v:.2f}" for k, v in took.items()))
    return bench


def recorded(model: str, file: Path, trials: int) -> list[tuple[Any, float]]:
    """(config, latency in us) of the first trials of the last campaign of the model in the file."""
    rows = [
        row
        for row in csv.DictReader(file.open(encoding="utf-8"), delimiter="\t")
        if (row["model"], row["context"]) == (model, "512") and row["latency_us"] and row["source"] != "final"
        if not BATCHED.search(row["campaign"])
    ]
    last = [row for row in rows if row["campaign"] == rows[-1]["campaign"]][:trials]
    return [(config_from_dict(json.loads(row["config"])), float(row["latency_us"])) for row in last]


def measure(model: str, file: Path, trials: int, profiled: cProfile.Profile | None) -> None:
    """Measure the recorded trials again, and print a line for each number of samples."""
    bench, workload = start(model), make_workload(model, "h200", "bf16", 512, 1)
    best_us, rivals, found = float("inf"), (), defaultdict[int, list[dict[str, float]]](list)
    for place, (config, _) in enumerate(recorded(model, file, trials)):
        parcel = wrap(lower(workload.graph, config, workload.target))
        if not isinstance(parcel, Parcel):
            continue
        spent.clear()
        if profiled is not None and place > 3:
            profiled.enable()
        begun = perf_counter()
        packed = parcel.open()
        spent["open"] = perf_counter() - begun
        contest = bench.compare(packed, rivals, 1) if rivals else None
        outcome = bench.measure(packed) if contest is None else contest.outcome
        spent["all"] = perf_counter() - begun
        if profiled is not None:
            profiled.disable()
        latency = getattr(outcome, "latency", None)
        if latency is None:
            print(f"trial {place}: {type(outcome).__name__}")
            continue
        if place > 3:
            found[latency.samples].append(dict(spent))
        if latency.median_us < best_us:
            best_us, rivals = latency.median_us, (packed,)
    names = ["all", *sorted({part for each in found.values() for one in each for part in one} - {"all"})]
    print(f"best {best_us:.2f} us\n{'samples':>22}" + "".join(f"{count:>8}" for count in sorted(found)))
    print(f"{'trials':>22}" + "".join(f"{len(found[count]):>8}" for count in sorted(found)))
    for part in names:
        cells = [1e3 * statistics.median(one.get(part, 0.0) for one in found[count]) for count in sorted(found)]
        print(f"{part:>22}" + "".join(f"{cell:>8.1f}" for cell in cells), flush=True)


def main() -> None:
    """Measure each work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--works", required=True, help="MODEL:ROWS:TRIALS, separated by commas")
    parser.add_argument("--profile", type=int, default=0, help="also print so many functions of the host's profile")
    asked = parser.parse_args()
    for owner, name, part in parts():
        timed(owner, name, part)
    for work in asked.works.split(","):
        model, file, trials = work.split(":")
        profiled = cProfile.Profile() if asked.profile else None
        measure(model, RECORDED / file, int(trials), profiled)
        if profiled is not None:
            pstats.Stats(profiled).sort_stats("tottime").print_stats(asked.profile)


if __name__ == "__main__":
    main()
