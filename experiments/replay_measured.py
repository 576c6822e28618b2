"""Measures how near samplers come to the best measured schedule, by replaying campaigns' measurements, over seeds:

    python experiments/replay_measured.py OLDER.tsv ... results/gpu/results.tsv --model llama3-8b

For a schedule that was not measured, a Gaussian process stands in. It is over the knobs and the kernels' version, and
is fitted to every row of that model in the files (one H200, bf16 weights, context 512); the versions of the last file
count as today's. The truth is its mean in warped latency plus one deviation, so that an untried schedule beats the
measured ones only if rows around it say so. A trial is the truth with 0.3 % of noise. Regret is that of the trial that
looks best so far, over the least truth of the schedules that the last file measured. The least of many noisy
measurements would be a matter of luck.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from pathlib import Path

import numpy as np

from flywheel.cost_model import STOCK
from flywheel.ir import config_from_dict
from flywheel.search.knobs import Choice
from flywheel.search.sampling.foresight import Foresight
from flywheel.search.sampling.gaussian import Grid, Point
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Space, make_space
from flywheel.search.spec import DEFAULT_PREDICTIONS
from flywheel.search.workload import make_workload

NEAR = 0.5
CHECKPOINTS = (10, 20, 30, 40, 60, 100)
BATCHED = re.compile(r"-b\d+-")
"""In the names of campaigns of several rows, which their rows do not tell."""

NOISE, WARP, STEPS = 0.003, 0.1, 150
Array = np.ndarray


class Truth:
    """Latency in us of any point."""

    def __init__(self, space: Space, files: list[Path]) -> None:
        self.knobs = sorted((knob for knob in space.dimensions if len(knob.values) > 1), key=lambda knob: knob.name)
        self.grid = Grid(tuple(len(knob.values) for knob in self.knobs), tuple(knob.ordered for knob in self.knobs))
        rows = []
        for version, file in enumerate(files):
            for row in csv.DictReader(file.open(encoding="utf-8"), delimiter="\t"):
                if BATCHED.search(row["campaign"]):
                    continue
                work = row["model"], row["gpu"], row["context"], row.get("weights") or row["dtype"]
                if work == (space.workload.model, "h200", "512", "bf16") and row["latency_us"]:
                    choice = space.to_choice(config_from_dict(json.loads(row["config"])))
                    if choice is not None:
                        self.last = f"kernels {row['kernels']}, sampler {row['sampler']}"
                        rows.append((self.point(choice), version, float(row["latency_us"])))
        self._points = np.array([point for point, _, _ in rows])
        self._last = len(files) - 1
        self._versions = np.array([version for _, version, _ in rows])
        self.latencies = np.array([latency for _, _, latency in rows])
        self.least = float(self.latencies[self._versions == self._last].min())
        warped = np.log1p(np.log(self.latencies / self.latencies.min()) / WARP)
        self._mean = warped.mean()
        self._fit(warped - self._mean)
        last = self._points[self._versions == self._last]
        self.best = float(self([tuple(point) for point in last]).min())

    def point(self, choice: Choice) -> Point:
        """Where a choice lies."""
        return tuple(knob.values.index(choice[knob.name]) for knob in self.knobs)

    def __call__(self, points: list[Point]) -> Array:
        """Mean and one deviation of each point, in us."""
        apart, other = self._apart(np.array(points), np.full(len(points), self._last))
        cross = sum(self._parts(apart, other))
        inner = np.einsum("ij,jk,ik->i", cross, self._inverse, cross, optimize=True)
        spread = np.sqrt(np.maximum(np.exp(self._rates[-4:-2]).sum() - inner, 1e-9))
        return self._latency(cross @ self._weights + spread)

    def _latency(self, warped: Array) -> Array:
        return self.latencies.min() * np.exp(WARP * np.expm1(np.maximum(warped + self._mean, -3.0)))

    def _apart(self, points: Array, versions: Array) -> tuple[Array, Array]:
        """Of each knob, twice: whether values differ, and how far those in order are apart."""
        steps = np.abs(points[:, None, :] - self._points[None, :, :])
        far = np.where(self.grid.ordered, steps / np.maximum(np.array(self.grid.sizes) - 1, 1), 0.0)
        return np.concatenate([steps > 0, far], axis=2), versions[:, None] != self._versions[None, :]

    def _parts(self, apart: Array, other: Array) -> tuple[Array, Array]:
        """A sum over knobs and a product, each with its height."""
        knobs, rates = len(self.knobs), np.exp(self._rates)
        kept = np.exp(-rates[-2] * other)
        each = np.exp(-(apart[..., :knobs] + apart[..., knobs:])).mean(axis=-1)
        return rates[-4] * kept * each, rates[-3] * kept * np.exp(-apart @ rates[: 2 * knobs])

    def _fit(self, warped: Array) -> None:
        """Rates of the product, heights of both parts, a rate of versions and noise: ascent of the likelihood."""
        knobs, count = len(self.knobs), len(warped)
        apart, other = self._apart(self._points, self._versions)
        self._rates = np.concatenate([np.full(2 * knobs, -3.0), [0.0, 0.0, -2.0, -9.0]])
        first, second = np.zeros_like(self._rates), np.zeros_like(self._rates)
        for step in range(1, STEPS + 1):
            added, product = self._parts(apart, other)
            rates = np.exp(self._rates)
            self._inverse = np.linalg.inv(added + product + (rates[-1] + 1e-6) * np.eye(count))
            self._weights = self._inverse @ warped
            if step == STEPS:
                break
            pull = 0.5 * (self._inverse - np.outer(self._weights, self._weights))
            slope = np.empty_like(self._rates)
            slope[: 2 * knobs] = -((pull * product).ravel() @ apart.reshape(-1, 2 * knobs)) * rates[: 2 * knobs]
            slope[: 2 * knobs] += 0.2 * (self._rates[: 2 * knobs] + 3.0)
            slope[-4], slope[-3] = (pull * added).sum(), (pull * product).sum()
            slope[-2] = -(pull * (added + product) * other).sum() * rates[-2]
            slope[-1] = np.trace(pull) * rates[-1]
            first, second = 0.9 * first + 0.1 * slope, 0.99 * second + 0.01 * slope**2
            rise = first / (1 - 0.9**step) / (np.sqrt(second / (1 - 0.99**step)) + 1e-9)
            self._rates = self._rates - (0.1 if step < 100 else 0.03) * rise
        left_out = self._latency(warped - self._weights / np.diag(self._inverse))
        good = (self._versions == self._last) & (self.latencies < 1.05 * self.least)
        wrong = 100 * np.abs(np.log(left_out / self.latencies))
        self.errors = float(np.median(wrong)), float(np.median(wrong[good])), float(np.quantile(wrong[good], 0.9))


def replay(truth: Truth, space: Space, sampler: str, foresight: Foresight, seed: int) -> tuple[list[float], int]:
    """Regret in % at each checkpoint, and measurements until it is at most NEAR; of none, one more than were made."""
    noise = np.random.default_rng(seed + 1000)
    study = CampaignStudy(space, sampler, seed, [], measured=True, foresight=foresight)
    for choice in space.known_good():
        study.enqueue(choice)
    real: list[float] = []
    seen: list[float] = []
    for _ in range(CHECKPOINTS[-1]):
        trial, choice = study.ask()
        real.append(float(truth([truth.point(choice)])[0]))
        seen.append(real[-1] * (1 + NOISE * noise.normal()))
        study.tell(trial, seen[-1])
    regrets = [100 * (real[int(np.argmin(seen[:count]))] / truth.best - 1) for count in range(1, len(seen) + 1)]
    until = next((count for count, regret in enumerate(regrets, 1) if regret <= NEAR), len(seen) + 1)
    return [regrets[count - 1] for count in CHECKPOINTS], until


def main() -> None:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samplers", default="descent,local", help="names, separated by commas")
    parser.add_argument("--predictions", type=int, default=DEFAULT_PREDICTIONS, help="before the first measurement")
    parser.add_argument("--jobs", type=int, default=2, help="processes that predict")
    asked = parser.parse_args()
    workload = make_workload(asked.model, "h200", "bf16", 512, 1)
    space = make_space(workload)
    truth = Truth(space, asked.files)
    every, median, high = truth.errors
    print(
        f"{asked.model}: {len(truth.latencies)} rows, best {truth.least:.1f} us, by the truth {truth.best:.1f}; "
        f"left out, a row is missed by {every:.2f} % (median), within 5 % of the best by {median:.2f} % "
        f"(a tenth by more than {high:.2f})"
    )
    print(f"simulated: what was recorded stands in for a GPU; the last file's rows are of {truth.last}")
    heads = [*map(str, CHECKPOINTS), f"trials to {NEAR} %"]
    print(f"{'regret in % after':<18}" + "".join(f"{head:>22}" for head in heads))
    with Foresight(workload, STOCK, asked.predictions, asked.jobs) as foresight:
        for sampler in asked.samplers.split(","):
            runs = [replay(truth, space, sampler, foresight, seed) for seed in range(asked.seeds)]
            each = zip(*(regrets for regrets, _ in runs), strict=True)
            cells = [f"{statistics.median(run):.2f} ({min(run):.2f}..{max(run):.2f})" for run in each]
            found = sorted(until for _, until in runs)
            cells.append(f"{statistics.median(found):.0f} ({found[0]}..{found[-1]})")
            print(f"{sampler:<18}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
