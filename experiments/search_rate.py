"""Measures whole searches, from the start of the command to its end: trials a second, and seconds until the first good
schedule.

    python experiments/search_rate.py

Each search is a new process with a new store and two predicting processes. The proof runs in every trial. A trial that
another config of the campaign answered counts, as for users; the share of those is shown. A schedule is good within
NEAR of the best prediction known for its work, BEST_US of predicted_regret.py. Other processes on the machine take a
share of the two cores, so the load at the start of a search is shown. With --jobs 1 one process does all the work, so
its CPU time tells versions apart on a busy machine. Modules are compiled before, as an installation does: a search of
one trial goes first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from predicted_regret import BEST_BY, BEST_US

from flywheel.cost_model import MODEL_VERSION


@dataclass(frozen=True, slots=True)
class Work:
    """What is searched, and the trials a second that must be reached."""

    model: str
    gpu: str
    bar: float

    @property
    def best_us(self) -> float | None:
        """The best prediction known, None for none."""
        return BEST_US.get(f"{self.model}/{self.gpu}") if MODEL_VERSION == BEST_BY else None


WORKS = (
    Work("llama3-8b", "h100", 40.0),
    Work("llama3.2-1b", "h200", 45.0),
    Work("llama3-70b", "h200", 20.0),
)
NEAR = 0.01
GOOD_S = 5.0


@dataclass(frozen=True, slots=True)
class Search:
    """One search: wall seconds in all and until the first good schedule, None where there was none; CPU seconds of the
    process that asks."""

    seconds: float
    cpu_s: float
    good_s: float | None
    trials: int
    repeats: int


def search(work: Work, seed: int, trials: int, jobs: int, compiled: Path) -> Search:
    """Run the command, and note when each trial is told. Bytecode is kept in the folder `compiled`."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(compiled)}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "flywheel", "search", "--model", work.model, "--gpu", work.gpu,
            "--measure", "predict", "--jobs", str(jobs), "--seed", str(seed), "--trials", str(trials),
            "--jsonl", "--store", str(Path(folder) / "store.db"),
        ]  # fmt: skip
        start, before_s, good_s, rows = perf_counter(), cpu_s(), None, []
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                              env=environment) as process:  # fmt: skip
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)
                if event["event"] != "trial":
                    continue
                rows.append(event)
                latency_us = event["predicted_us"]
                if None not in (latency_us, work.best_us) and latency_us <= work.best_us * (1.0 + NEAR):
                    good_s = good_s or perf_counter() - start
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
        spent_s, repeats = cpu_s() - before_s, sum(row["source"] == "store" for row in rows)
        return Search(perf_counter() - start, spent_s, good_s, len(rows), repeats)


def cpu_s() -> float:
    """CPU seconds of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Search, and print what came of it beside the bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="processes that predict")
    parser.add_argument("--models", default=",".join(work.model for work in WORKS), help="separated by commas")
    asked = parser.parse_args()
    where = f"Python {platform.python_version()}, {os.cpu_count()} cores"
    print(f"{where}, --jobs {asked.jobs}, cost model {MODEL_VERSION}, bf16, context 512")
    heads = f"{'seconds':>9}{'CPU s':>7}{'trials/s':>10}{'good after':>12}{'load':>7}"
    print(f"{'work':<20}{'seed':>5}{'trials':>8}{'repeats':>9}{heads}")
    with tempfile.TemporaryDirectory() as compiled:
        search(WORKS[0], 0, 1, asked.jobs, Path(compiled))
        report([work for work in WORKS if work.model in asked.models.split(",")], asked, Path(compiled))


def report(works: Sequence[Work], asked: argparse.Namespace, compiled: Path) -> None:
    """Search each work with each seed, and print a line a search and their medians."""
    for work in works:
        found = []
        for seed in range(asked.seeds):
            load = os.getloadavg()[0]
            one = search(work, seed, asked.trials, asked.jobs, compiled)
            found.append(one)
            good = "-" if one.good_s is None else f"{one.good_s:.1f} s"
            print(f"{f'{work.model}/{work.gpu}':<20}{seed:>5}{one.trials:>8}{one.repeats:>9}{one.seconds:>9.1f}{one.cpu_s:>7.2f}"
                  f"{one.trials / one.seconds:>10.1f}{good:>12}{load:>7.1f}", flush=True)  # fmt: skip
        rate = statistics.median(one.trials / one.seconds for one in found)
        line = f"{work.model}: median {rate:.1f} trials/s, bar {work.bar:.0f}"
        if work.best_us is not None:
            reached = sorted(float("inf") if one.good_s is None else one.good_s for one in found)
            line += f"; first within {NEAR:.0%} of {work.best_us} us: median {statistics.median(reached):.1f} s, "
            line += f"worst {reached[-1]:.1f} s, bar {GOOD_S:.0f} s"
        print(line, flush=True)


if __name__ == "__main__":
    main()
