"""How fast measured searches are, and after how many measurements they are near the best that any of them finds.

    python experiments/measured_search.py --gpu h200 --works llama3.2-1b:60:5,llama3-8b:60:5 [--tsv FILE]

A work is MODEL:TRIALS:SEEDS. Each search is a process of its own, cold, in a store of its own. Seconds are those of the
whole command: "first" until its first measurement is over, "trials" from then to the last trial's row, "final" from
there to the final's rows, and what is left ends it. Of these, "measure" were spent in workers that measured trials,
"ask" in the sampler between trials, and "steer" waiting for predictions, in the sampler or while the GPU got ready.
"short" are trials that took fewer samples, being surely slower. "near" is the number of the measurement that is the
first within NEAR of the best of all searches of the model, or of --known where that is less.

Modules are compiled before, as an installation does: a search of one trial goes first and is not counted.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

NEAR = 0.005
MEASURED = "measured"
FULL = 30
"""Samples of a trial that is not cut short."""
_UNCOUNTED = 999
"""Seed of the search that only compiles modules."""


@dataclass(frozen=True)
class Search:
    """One search: seconds of the command, and where they went, what it measured in us, trial after trial, how many
    trials it made, and how many of them were cut short."""

    seed: int
    seconds: float
    first_s: float
    trials_s: float
    final_s: float
    measure_s: float
    ask_s: float
    steer_s: float
    latencies_us: tuple[float, ...]
    trials: int
    short: int

    def near(self, best_us: float) -> int | None:
        """The number of the first measurement near a latency, None where none is."""
        found = (at for at, us in enumerate(self.latencies_us, 1) if us <= best_us * (1 + NEAR))
        return next(found, None)


def search(model: str, gpu: str, trials: int, seed: int, folder: Path, tsv: Path | None) -> Search:
    """One search in a store of its own; its rows are appended to `tsv`."""
    store, table = folder / f"{model}.{seed}.db", folder / f"{model}.{seed}.tsv"
    kept_bytecode = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    environment = {**os.environ, "FLYWHEEL_STORE": str(store), **kept_bytecode}
    began, start = time.time(), time.perf_counter()
    asked = f"--model {model} --gpu {gpu} --measure cuda --cold --trials {trials} --seed {seed} --json".split()
    command = [sys.executable, "-m", "flywheel", "search", *asked]
    document = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    seconds = time.perf_counter() - start
    exported = [sys.executable, "-m", "flywheel", "export", "--format", "tsv", "--output", str(table)]
    subprocess.run(exported, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = table.read_text(encoding="utf-8").splitlines(keepends=True)
    if tsv is not None:
        kept = lines if not tsv.exists() else lines[1:]
        with tsv.open("a", encoding="utf-8") as file:
            file.writelines(kept)
    return read(seed, seconds, began, list(csv.DictReader(lines, delimiter="\t")), document)


def read(seed: int, seconds: float, began: float, rows: list[dict[str, str]], document: dict[str, Any]) -> Search:
    """What its rows and its last word say of a search that `began` then, in s since 1970."""
    trials = [row for row in rows if row["source"] != "final"]
    measured = [row for row in trials if row["outcome"] == MEASURED]
    first, last = min(map(created, measured)), max(map(created, trials))
    return Search(
        seed=seed,
        seconds=seconds,
        first_s=first - began,
        trials_s=last - first,
        final_s=max(map(created, rows)) - last,
        measure_s=sum(float(row["measure_s"] or 0.0) for row in trials),
        ask_s=sum(float(row["ask_s"] or 0.0) for row in trials),
        steer_s=(document["foreseen"] or {"seconds": 0.0})["seconds"],
        latencies_us=tuple(float(row["latency_us"]) for row in measured),
        trials=len(trials),
        short=sum(int(row["samples"]) < FULL for row in measured),
    )


def created(row: dict[str, str]) -> float:
    """When a row was made, in s since 1970."""
    return datetime.fromisoformat(row["created_at"]).timestamp()


def report(model: str, searches: list[Search], known_us: float | None) -> None:
    """Print a line a search, and their medians."""
    best_us = min(min(each.latencies_us) for each in searches)
    best_us = min(best_us, known_us or best_us)
    print(f"\n{model}: the best of all took {best_us:.2f} us")
    heads = ("seed", "trials", "measured", "short", "seconds", "first s", "trials s", "final s", "measure s", "ask s",
             "steer s", "trials/s", "best us", "regret", "near")  # fmt: skip
    print("".join(f"{head:>10}" for head in heads))
    for each in searches:
        low, near = min(each.latencies_us), each.near(best_us)
        spent = (each.seconds, each.first_s, each.trials_s, each.final_s, each.measure_s, each.ask_s, each.steer_s)
        cells = (*map(str, (each.seed, each.trials, len(each.latencies_us), each.short)),
                 *(f"{seconds:.1f}" for seconds in spent), f"{each.trials / each.seconds:.1f}", f"{low:.2f}",
                 f"{low / best_us - 1:.2%}", str(near or "never"))  # fmt: skip
        print("".join(f"{cell:>10}" for cell in cells))
    rate = statistics.median(each.trials / each.seconds for each in searches)
    never = max(len(each.latencies_us) for each in searches) + 1
    near = statistics.median_high([each.near(best_us) or never for each in searches])
    said = f"more than {near - 1}" if near == never else str(near)
    final = statistics.median(each.final_s / each.seconds for each in searches)
    print(f"{model}: median {rate:.1f} trials/s, near the best after {said} measurements, {final:.0%} in the final",
          flush=True)  # fmt: skip


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
        search(asked.works.partition(":")[0], asked.gpu, 1, _UNCOUNTED, Path(folder), None)
        for work in asked.works.split(","):
            model, trials, seeds = work.split(":")
            searches: list[Search] = []
            try:
                for seed in range(int(seeds)):
                    searches.append(search(model, asked.gpu, int(trials), seed, Path(folder), asked.tsv))
            finally:  # Ctrl-C costs the search under way, and no table of those that are over.
                if searches:
                    report(model, searches, known.get(model))


if __name__ == "__main__":
    main()
