"""Counts the measurements after which searches are near the best known, for many seeds of a work in one process:

    python experiments/measured_near.py --gpu h200 --works llama3.2-1b:60:5,qwen3-0.6b:60:5 --known llama3.2-1b=685.1

A work is MODEL:TRIALS:SEEDS. Searches are cold, and each has a store of its own: none knows another's measurements.
They share what a search does before its first trial: the GPU worker with the model's weights, compiled kernels, and
predictions. They hold no final. So their seconds say nothing; measured_search.py has those of whole commands. "near" is
the number of the measurement that is the first within NEAR of the best of all searches of the model, or of --known
where that is less.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

from flywheel.cost_model import open_predictor
from flywheel.measure.record import TrialRecord
from flywheel.process import no_collector
from flywheel.search.campaign import CampaignRun, Progress
from flywheel.search.opening import open_campaign
from flywheel.search.sampling.foresight import Foresight
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials.forks import expect_forks, jobs_of
from flywheel.search.trials.sites import open_engine, open_site
from flywheel.search.workload import make_workload
from flywheel.store.sql import Store, open_store
from flywheel.store.tsv import to_tsv

NEAR = 0.005
CHECKPOINTS = (10, 20, 30, 40, 60)


@dataclass(frozen=True)
class Search:
    """One search: what it measured in us, trial after trial, and its rows."""

    seed: int
    latencies_us: tuple[float, ...]
    rows: tuple[TrialRecord, ...]

    def near(self, best_us: float) -> int | None:
        """The number of the first measurement near a latency, None where none is."""
        return next((at for at, us in enumerate(self.latencies_us, 1) if us <= best_us * (1 + NEAR)), None)


def search(spec: CampaignSpec, seeds: int, folder: Path) -> list[Search]:
    """A search with each seed, of as many trials as `spec` says."""
    expect_forks()
    workload = make_workload(spec.model, spec.gpu, spec.dtype, spec.context, spec.batch)
    space, predictor = make_space(workload), open_predictor(None, workload.target)
    spec, found = replace(spec, weights=workload.stored), []
    with ExitStack() as stack:
        site = stack.enter_context(open_site(spec, workload.target))
        url = f"sqlite:///{folder / spec.model}.looked.db"
        looked = stack.enter_context(open_store(url))  # stays empty, so that nothing is looked up
        foresight = stack.enter_context(Foresight(workload, predictor, jobs_of(spec.jobs)))
        engine, environment = stack.enter_context(open_engine(spec, site, workload, looked, predictor))
        for seed in range(seeds):
            one = replace(spec, seed=seed, name=f"{spec.model}-near-s{seed}", trials=spec.trials + engine.width)
            with open_store(f"sqlite:///{folder / spec.model}.{seed}.db") as store:
                name = open_campaign(one, space, store, fresh=True, predictor=predictor.version)
                run = CampaignRun(one, name, space, store, engine, environment, predictor, foresight)
                found.append(_run(run, store, name, seed, spec.trials))
    return found


def _run(run: CampaignRun, store: Store, name: str, seed: int, trials: int) -> Search:
    """Run until `trials` are told; an interrupted campaign holds no final."""
    told = 0

    def watch(progress: Progress) -> None:
        nonlocal told
        told = progress.new_trials

    with no_collector():
        run.run(watch, lambda: told >= trials)
    rows = tuple(store.trials(name))
    return Search(seed, tuple(row.latency_us for row in rows if row.latency_us is not None)[:trials], rows)


def report(model: str, searches: list[Search], known_us: float | None, seconds: float) -> None:
    """Print a line a search, and their medians."""
    found_us = min(min(each.latencies_us) for each in searches)
    best_us = min(found_us, known_us or found_us)
    whence = "known" if best_us < found_us else "found here"
    print(f"\n{model}: near is within {NEAR:.1%} of {best_us:.2f} us, {whence}; {seconds:.0f} s in all")
    heads = ("seed", "measured", "best us", "regret", *(f"after {count}" for count in CHECKPOINTS), "near")
    print("".join(f"{head:>10}" for head in heads))
    for each in searches:
        lows = [min(each.latencies_us[:count]) / best_us - 1 for count in CHECKPOINTS]
        low = min(each.latencies_us)
        cells = (str(each.seed), str(len(each.latencies_us)), f"{low:.2f}", f"{low / best_us - 1:.2%}",
                 *(f"{regret:.2%}" for regret in lows), str(each.near(best_us) or "never"))  # fmt: skip
        print("".join(f"{cell:>10}" for cell in cells))
    never = max(len(each.latencies_us) for each in searches) + 1
    near = statistics.median_high([each.near(best_us) or never for each in searches])
    said = f"more than {near - 1}" if near == never else str(near)
    print(f"{model}: near the best after {said} measurements, median of {len(searches)} seeds", flush=True)


def main() -> None:
    """Search each work with each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", required=True)
    parser.add_argument("--works", required=True, help="MODEL:TRIALS:SEEDS, separated by commas")
    parser.add_argument("--known", action="append", default=[], help="MODEL=US, the best that is known on this machine")
    parser.add_argument("--tsv", type=Path, help="write all rows to this file")
    asked = parser.parse_args()
    known = {model: float(us) for model, _, us in (each.partition("=") for each in asked.known)}
    rows: list[TrialRecord] = []
    with tempfile.TemporaryDirectory() as folder:
        for work in asked.works.split(","):
            model, trials, seeds = work.split(":")
            start = perf_counter()
            spec = CampaignSpec(model, asked.gpu, measure="cuda", warm=False, trials=int(trials))
            searches = search(spec, int(seeds), Path(folder))
            report(model, searches, known.get(model), perf_counter() - start)
            rows += [row for each in searches for row in each.rows]
            if asked.tsv is not None:
                asked.tsv.write_text(to_tsv(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
