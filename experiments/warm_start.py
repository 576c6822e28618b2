"""How much a store with campaigns of other works helps a new one: `python experiments/warm_start.py`.

Every work gets one cold campaign, the donor. Then each work is searched, over seeds, with a store that has the donors
of all other works: by the sampler alone (`--no-seeds`), with the known good schedules (`--cold`), and warm, the
default. The cost model is the ground truth. The best known latency of a work is the best of all its campaigns, improved
knob by knob until no single change improves it further. The models are cut to a few layers to save time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from flywheel.ir import TARGETS, config_from_dict
from flywheel.measure.environment import capture_environment
from flywheel.measure.outcome import Predicted
from flywheel.measure.record import TrialRecord
from flywheel.models.catalog import CATALOG
from flywheel.search.campaign import CampaignRun
from flywheel.search.knobs import Value
from flywheel.search.knowledge.warm import starts_of
from flywheel.search.opening import open_campaign
from flywheel.search.space import Space, make_space
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials.engine import EvaluationSetup, InlineEngine
from flywheel.search.trials.evaluate import evaluate
from flywheel.search.trials.predicting import predict_outcome
from flywheel.search.workload import Workload
from flywheel.store.campaign import Campaign
from flywheel.store.sql import open_store

Work = tuple[str, str]
Donor = tuple[Campaign, TrialRecord]

WORKS: tuple[Work, ...] = (
    ("llama3-8b", "h100"), ("llama3-8b", "h200"), ("qwen3-8b", "h200"), ("llama3.2-1b", "h100"),
    ("llama3.2-3b", "a100"), ("qwen2.5-7b", "b200"), ("mistral-7b", "l40s"), ("qwen3-0.6b", "l4"),
)  # fmt: skip
LAYERS, CONTEXT, DONOR_TRIALS = 4, 512, 120
ARMS = {"alone": {"seeds": False}, "cold": {"warm": False}, "warm": {}}
WITHIN = (2.0, 0.5)


def workload(work: Work) -> Workload:
    """The work, of a model with LAYERS layers."""
    model, gpu = work
    return Workload(model, replace(CATALOG[model], n_layers=LAYERS), TARGETS[gpu], "bf16", CONTEXT)


def unseen(_: str) -> None:
    """A look-up that knows nothing, so that every trial is computed."""


def campaign(
    work: Work, donors: Iterable[Donor], seed: int, trials: int, options: dict[str, bool]
) -> tuple[Campaign, list[TrialRecord]]:
    """One campaign beside the best rows of the donors, and its trials."""
    base = CampaignSpec(*work, context=CONTEXT, measure="predict", seed=seed, trials=trials, name="/".join(work))
    spec, bench = replace(base, **options), EvaluationSetup(workload(work), unseen, predict_outcome)
    space = make_space(bench.workload)
    with tempfile.TemporaryDirectory() as folder, open_store(Path(folder) / "store.db") as store:
        for other, best in donors:
            store.create_campaign(other)
            store.append(best)
        name = open_campaign(spec, space, store, fresh=False)
        run = CampaignRun(spec, name, space, store, InlineEngine(bench), capture_environment())
        run.run(lambda _: None, lambda: False)
        opened = store.campaign(name)
        assert opened is not None
        return opened, store.trials(name)


def donate(work: Work) -> Donor:
    """The work's donor, and the best of its trials."""
    made, records = campaign(work, (), 1_000, DONOR_TRIALS, {"warm": False})
    return made, min(records, key=latency)


def latency(record: TrialRecord) -> float:
    """What the campaign minimised, in us."""
    return record.objective_us if record.objective_us is not None else float("inf")


def cost(space: Space, choice: dict[str, Value]) -> float:
    """Predicted latency in us of one choice."""
    outcome = evaluate(space.to_config(choice), space.workload, lambda _: None, predict_outcome).outcome
    return outcome.latency.latency_us if isinstance(outcome, Predicted) else float("inf")


def descend(work: Work, config: str) -> float:
    """Latency in us where no change of a single knob of the config, and of what came of it, is an improvement."""
    space = make_space(workload(work))
    choice = space.to_choice(config_from_dict(json.loads(config)))
    assert choice is not None
    low, improved = cost(space, choice), True
    while improved:
        improved = False
        for dimension in space.dimensions:
            for value in dimension.values:
                trial = {**choice, dimension.name: value}
                if trial != choice and (found := cost(space, trial)) < low * (1 - 1e-9):
                    choice, low, improved = trial, found, True
    return low


def trials_to(records: list[TrialRecord], wanted_us: float) -> int:
    """Number of the first trial at least that fast, from 1; one more than there are where none is."""
    return next((number for number, record in enumerate(records, 1) if latency(record) <= wanted_us), len(records) + 1)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=int, default=60)
    asked = parser.parse_args()
    with ProcessPoolExecutor(2) as pool:
        donors = dict(zip(WORKS, pool.map(donate, WORKS), strict=True))
        futures = {
            (work, arm, seed): pool.submit(
                campaign, work, [donors[other] for other in WORKS if other != work], seed, asked.trials, options
            )
            for work in WORKS
            for arm, options in ARMS.items()
            for seed in range(asked.seeds)
        }
        runs = {key: future.result() for key, future in futures.items()}
        tried = {
            work: [donors[work][1], *(row for key, (_, rows) in runs.items() if key[0] == work for row in rows)]
            for work in WORKS
        }
        lows = pool.map(descend, WORKS, [min(tried[work], key=latency).config for work in WORKS])
        best = dict(zip(WORKS, lows, strict=True))
    print(f"bf16, context {CONTEXT}, {LAYERS} layers, predicted; {asked.seeds} seeds, {asked.trials} trials, medians;")
    print(f"{asked.trials + 1} is never")
    heads = [f"{arm}: to {within} %" for within in WITHIN for arm in ARMS]
    print(f"{'work':<20}{'best us':>9}" + "".join(f"{head:>15}" for head in [*heads, "first trial"]) + "  starts from")
    totals: dict[tuple[float, str], list[int]] = {(within, arm): [] for within in WITHIN for arm in ARMS}
    for work in WORKS:
        cells = []
        for within, arm in totals:
            wanted = best[work] * (1 + within / 100)
            counts = [trials_to(runs[work, arm, seed][1], wanted) for seed in range(asked.seeds)]
            totals[within, arm] += counts
            cells.append(f"{statistics.median(counts):>15g}")
        opened, records = runs[work, "warm", 0]
        first = f"{f'+{100 * (latency(records[0]) / best[work] - 1):.2f} %':>15}"
        sources = ", ".join(f"{start.model}/{start.gpu} {start.distance:.1f}" for start in starts_of(opened))
        print(f"{'/'.join(work):<20}{best[work]:>9.1f}{''.join(cells)}{first}  {sources}")
    print(f"{'mean of all':<29}" + "".join(f"{statistics.mean(counts):>15.1f}" for counts in totals.values()))


if __name__ == "__main__":
    main()
