"""How fast measured searches are, and after how many measurements they are near the best that any of them finds.

    python experiments/measured_search.py --gpu h200 --works llama3.2-1b:60:5,llama3-8b:60:5 [--tsv FILE]

A work is MODEL:TRIALS:SEEDS. Each search is a process of its own, cold, in a store of its own. Seconds are those of the
whole command, "first" of them until its first measurement is over. "near" is the number of the measurement that is the
first within NEAR of the best of all searches of the model, or of --known where that is less.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

NEAR = 0.005
MEASURED = "measured"


@dataclass(frozen=True)
class Search:
    """One search: seconds of the command and until its first row, what it measured in us, trial after trial, and how
    many trials it made."""

    seed: int
    seconds: float
    first_s: float
    latencies_us: tuple[float, ...]
    trials: int

    def near(self, best_us: float) -> int | None:
        """The number of the first measurement near a latency, None where none is."""
        found = (at for at, us in enumerate(self.latencies_us, 1) if us <= best_us * (1 + NEAR))
        return next(found, None)


def search(model: str, gpu: str, trials: int, seed: int, folder: Path, tsv: Path | None) -> Search:
    """One search in a store of its own; its rows are appended to `tsv`."""
    store, table = folder / f"{model}.{seed}.db", folder / f"{model}.{seed}.tsv"
    environment = {**os.environ, "FLYWHEEL_STORE": str(store)}
    began, start = time.time(), time.perf_counter()
    asked = f"--model {model} --gpu {gpu} --measure cuda --cold --trials {trials} --seed {seed} --json".split()
    command = [sys.executable, "-m", "flywheel", "search", *asked]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    exported = [sys.executable, "-m", "flywheel", "export", "--format", "tsv", "--output", str(table)]
    subprocess.run(exported, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    if tsv is not None:
        kept = lines if not tsv.exists() else lines[1:]
        with tsv.open("a", encoding="utf-8") as file:
            file.writelines(kept)
    rows = [row for row in csv.DictReader(lines, delimiter="\t") if row["source"] != "final"]
    measured = [row for row in rows if row["outcome"] == MEASURED]
    first = min(datetime.fromisoformat(row["created_at"]).timestamp() for row in measured)
    latencies = tuple(float(row["latency_us"]) for row in measured)
    return Search(seed, seconds, first - began, latencies, len(rows))


def report(model: str, searches: list[Search], known_us: float | None) -> None:
    """Print a line a search, and their medians."""
    best_us = min(min(each.latencies_us) for each in searches)
    best_us = min(best_us, known_us or best_us)
    print(f"\n{model}: the best of all took {best_us:.2f} us")
    heads = ("seed", "trials", "measured", "seconds", "first s", "trials/s", "best us", "regret", "near")
    print("".join(f"{head:>9}" for head in heads))
    for each in searches:
        low, near = min(each.latencies_us), each.near(best_us)
        cells = (str(each.seed), str(each.trials), str(len(each.latencies_us)), f"{each.seconds:.1f}",
                 f"{each.first_s:.1f}", f"{each.trials / each.seconds:.1f}", f"{low:.2f}", f"{low / best_us - 1:.2%}",
                 str(near or "never"))  # fmt: skip
        print("".join(f"{cell:>9}" for cell in cells))
    rate = statistics.median(each.trials / each.seconds for each in searches)
    never = max(len(each.latencies_us) for each in searches) + 1
    near = statistics.median_high([each.near(best_us) or never for each in searches])
    said = f"more than {near - 1}" if near == never else str(near)
    print(f"{model}: median {rate:.1f} trials/s, near the best after {said} measurements", flush=True)


def main() -> None:
    """Search each work with each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--works", required=True, help="MODEL:TRIALS:SEEDS, separated by commas")
    parser.add_argument("--known", action="append", default=[], help="MODEL=US, the best that is known on this machine")
    parser.add_argument("--tsv", type=Path, help="append all rows to this file")
    asked = parser.parse_args()
    known = {model: float(us) for model, _, us in (each.partition("=") for each in asked.known)}
    with tempfile.TemporaryDirectory() as folder:
        for work in asked.works.split(","):
            model, trials, seeds = work.split(":")
            searches = [
                search(model, asked.gpu, int(trials), seed, Path(folder), asked.tsv) for seed in range(int(seeds))
            ]
            report(model, searches, known.get(model))


if __name__ == "__main__":
    main()
