"""Counts the measurements until a search is near the best known schedule, by replaying recorded campaigns, over seeds:

    python experiments/replay_measured.py

It reads every table of results. Of one work, a Gaussian process stands in for the GPU. It is over the knobs and the
kernels' version, knows no prediction, and is fitted to the medians of the work's newest rows. The newest version with
LEAST schedules counts as today's. The truth is its mean in warped latency plus one deviation, so that an untried
schedule beats the measured ones only if rows around it say so. A trial is the truth with NOISE. Regret is that of the
trial that looks best so far, over the least truth of the schedules that today's version measured.

Limits: where few schedules were recorded, the truth is nearly flat between them, and the first line of a work says how
far it misses rows that are left out. Schedules whose knobs have values that no search has any more are left out. The
campaigns that made the rows were led by `descent`, so more is known of where it looks.

An arm is SAMPLER or SAMPLER+others. With `others`, the search learns from the rows of other works: not of those that
have the work's model, format and context, whatever their GPU or batch. Without, it begins with the known good
schedules. "ranked" is the rank correlation, after RANKED measurements, of what `descent` expects with what was
measured, among today's schedules within 5 % of the best.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flywheel.cost_model import STOCK
from flywheel.errors import FlywheelError
from flywheel.ir import config_from_dict
from flywheel.search.knobs import Choice
from flywheel.search.knowledge.lessons import Taught, lessons_for
from flywheel.search.sampling.expectation import Expectation, Lessons, axes_of
from flywheel.search.sampling.foresight import Foresight
from flywheel.search.sampling.gaussian import Grid, Point
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Dimension, Space, make_space
from flywheel.search.workload import Workload, make_workload

TUNED = "llama3.2-1b llama3-8b qwen3-0.6b llama3-8b:int4 qwen3-8b:int4:512:8 llama3.1-8b:bf16:32768"
UNTUNED = "llama3.2-3b qwen2.5-7b:int4 mistral-7b:fp8"
"""MODEL:WEIGHTS:CONTEXT:BATCH; all on an H200. Nothing was recorded at a context of 8k, so 32k stands for it."""
NEAR = 0.5
CHECKPOINTS = (1, 5, 10, 20, 30)
RANKED = 10
"""Measurements after which it is asked how well the next ones are ranked."""
VERSIONS = 2
"""Newest versions of kernels whose rows teach other works."""
BATCHED = re.compile(r"-b(\d+)-")
"""In the names of campaigns of several rows, where tables have no column for it."""

NOISE, WARP, STEPS = 0.003, 0.1, 120
MOST, LEAST = 400, 25
"""Schedules that a truth is fitted to, and that make a version count as today's."""
Array = np.ndarray
Key = tuple[str, str, str, str, int, int]
"""(model, GPU, dtype, weights, context, batch)"""


@dataclass(frozen=True)
class Row:
    """A measurement: the knobs, the kernels and the latency in us."""

    choice: Choice
    kernels: str
    latency_us: float
    created_at: str


@dataclass(frozen=True)
class Recorded:
    """A work, its space, and its rows in order of time."""

    workload: Workload
    space: Space
    rows: list[Row]

    @property
    def kernels(self) -> list[str]:
        """Versions of kernels, newest first."""
        return list(dict.fromkeys(row.kernels for row in reversed(self.rows)))


def read_tables(folder: Path) -> dict[Key, Recorded]:
    """Every row with a latency, of works and knobs that this version has."""
    spaces: dict[Key, Space | None] = {}
    rows: dict[Key, list[Row]] = defaultdict(list)
    for file in sorted(folder.rglob("*.tsv")):
        for row in csv.DictReader(file.open(encoding="utf-8"), delimiter="\t"):
            if not row.get("latency_us") or not row.get("kernels"):
                continue
            named = BATCHED.search(row["campaign"])
            batch = int(row.get("batch") or (named[1] if named else 1))
            key = row["model"], row["gpu"], row["dtype"], row.get("weights") or row["dtype"], int(row["context"]), batch
            if key not in spaces:
                spaces[key] = space_of(key)
            if (space := spaces[key]) is None:
                continue
            choice = space.to_choice(config_from_dict(json.loads(row["config"])))
            if choice is not None:
                rows[key].append(Row(choice, row["kernels"], float(row["latency_us"]), row["created_at"]))
    found = {}
    for key, space in spaces.items():
        if space is not None and rows[key]:
            found[key] = Recorded(space.workload, space, sorted(rows[key], key=lambda row: row.created_at))
    return found


def space_of(key: Key) -> Space | None:
    """The space of a work; None where this version has none."""
    model, gpu, dtype, weights, context, batch = key
    try:
        return make_space(make_workload(model, gpu, dtype, context, batch, None if weights == dtype else weights))
    except FlywheelError:
        return None


def key_of(work: str) -> Key:
    """The key of MODEL:WEIGHTS:CONTEXT:BATCH."""
    model, weights, context, batch, *_ = [*work.split(":"), *("bf16", "512", "1")[len(work.split(":")) - 1 :]]
    return model, "h200", "bf16", weights, int(context), int(batch)


def others(works: dict[Key, Recorded], held: Key) -> dict[Key, Recorded]:
    """The works that do not share the model, format and context of the one that is held out."""
    return {key: each for key, each in works.items() if (key[0], key[3], key[4]) != (held[0], held[3], held[4])}


def _name(knob: Dimension) -> str:
    return knob.name


class Truth:
    """Latency in us of any point."""

    def __init__(self, work: Recorded) -> None:
        self.knobs = sorted((knob for knob in work.space.dimensions if len(knob.values) > 1), key=_name)
        self.grid = Grid(tuple(len(knob.values) for knob in self.knobs), tuple(knob.ordered for knob in self.knobs))
        found: dict[tuple[str, Point], list[float]] = defaultdict(list)
        for row in work.rows:
            found[row.kernels, self.point(row.choice)].append(row.latency_us)
        counts = {kernels: sum(one == kernels for one, _ in found) for kernels in work.kernels}
        self.today = next(kernels for kernels in (*work.kernels, "") if counts.get(kernels, LEAST) >= LEAST)
        order = [self.today, *(kernels for kernels in work.kernels if kernels != self.today)]
        rows = [(point, order.index(kernels), statistics.median(each)) for (kernels, point), each in found.items()]
        rows = sorted(rows, key=lambda row: (row[1], row[2]))[:MOST]
        self._points = np.array([point for point, _, _ in rows])
        self._versions = np.array([version for _, version, _ in rows])
        self.latencies = np.array([latency for _, _, latency in rows])
        self.least = float(self.latencies[self._versions == 0].min())
        warped = np.log1p(np.log(self.latencies / self.latencies.min()) / WARP)
        self._mean = warped.mean()
        self._fit(warped - self._mean)
        self.recorded = [tuple(map(int, point)) for point in self._points[self._versions == 0]]
        self.measured = self.latencies[self._versions == 0]
        self.best = float(self(self.recorded).min())

    def point(self, choice: Choice) -> Point:
        """Where a choice lies."""
        return tuple(knob.values.index(choice[knob.name]) for knob in self.knobs)

    def __call__(self, points: list[Point]) -> Array:
        """Mean and one deviation of each point, in us."""
        apart, other = self._apart(np.array(points), np.zeros(len(points)))
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
            self._rates = self._rates - (0.1 if step < 80 else 0.03) * rise
        left_out = self._latency(warped - self._weights / np.diag(self._inverse))
        good = (self._versions == 0) & (self.latencies < 1.05 * self.least)
        wrong = 100 * np.abs(np.log(left_out / self.latencies))
        self.errors = float(np.median(wrong)), float(np.median(wrong[good])), float(np.quantile(wrong[good], 0.9))


def taught_by(known: dict[Key, Recorded]) -> list[Taught]:
    """What works teach, by their kernels."""
    taught = []
    for work in known.values():
        for kernels in work.kernels[:VERSIONS]:
            rows: dict[str, list[Row]] = defaultdict(list)
            for row in work.rows:
                if row.kernels == kernels:
                    rows[json.dumps(row.choice, sort_keys=True)].append(row)
            medians = [(each[0].choice, statistics.median(row.latency_us for row in each)) for each in rows.values()]
            taught.append(Taught(work.workload, medians))
    return taught


@dataclass(frozen=True)
class Run:
    """Regret in % at each checkpoint; measurements until it is at most NEAR, of none one more than were made; and the
    rank correlation after RANKED of them, None of a sampler that says nothing."""

    regrets: list[float]
    until: int
    ranked: float | None


def replay(truth: Truth, work: Recorded, arm: str, lessons: Lessons | None, foresight: Foresight, seed: int) -> Run:
    """One search."""
    noise, steered = np.random.default_rng(seed + 1000), arm == "descent"
    study = CampaignStudy(work.space, arm, seed, [], True, foresight if steered else None, lessons)
    for choice in work.space.known_good() if lessons is None else ():
        study.enqueue(choice)
    real: list[float] = []
    seen: list[float] = []
    tried: list[Choice] = []
    for _ in range(CHECKPOINTS[-1]):
        trial, choice = study.ask()
        tried.append(choice)
        real.append(float(truth([truth.point(choice)])[0]))
        seen.append(real[-1] * (1 + NOISE * noise.normal()))
        study.tell(trial, seen[-1])
    regrets = [100 * (real[int(np.argmin(seen[:count]))] / truth.best - 1) for count in range(1, len(seen) + 1)]
    until = next((count for count, regret in enumerate(regrets, 1) if regret <= NEAR), len(seen) + 1)
    ranked = rank(truth, work, lessons, foresight, tried[:RANKED], np.array(seen[:RANKED])) if steered else None
    return Run([regrets[count - 1] for count in CHECKPOINTS], until, ranked)


def rank(
    truth: Truth, work: Recorded, lessons: Lessons | None, foresight: Foresight, tried: list[Choice], seen: Array
) -> float:
    """The rank correlation of expected and recorded latencies of schedules near the best that were not tried."""
    model = Expectation(axes_of(truth.grid, [knob.name for knob in truth.knobs], lessons), lessons)
    fixed = {knob.name: knob.values[0] for knob in work.space.dimensions}
    where = [truth.point(choice) for choice in tried]
    good = [index for index, us in enumerate(truth.measured) if us < 1.05 * truth.least]
    asked = [truth.recorded[index] for index in good if truth.recorded[index] not in where]
    choices = [
        {**fixed, **{knob.name: knob.values[place] for knob, place in zip(truth.knobs, point, strict=True)}}
        for point in [*asked, *where]
    ]
    predicted = foresight.predict([work.space.to_config(choice) for choice in choices])
    at = np.array([us or np.inf for us in predicted])
    known = np.isfinite(at[len(asked) :])
    means, _ = model.expect(
        asked,
        at[: len(asked)],
        [point for point, has in zip(where, known, strict=True) if has],
        at[len(asked) :][known],
        seen[known],
    )
    recorded = dict(zip(truth.recorded, truth.measured, strict=True))
    ranks = [np.argsort(np.argsort(each)) for each in (means, np.array([recorded[point] for point in asked]))]
    return float(np.corrcoef(*ranks)[0, 1])


def show(arm: str, runs: Sequence[Run]) -> None:
    """Print an arm's line."""
    each = zip(*(run.regrets for run in runs), strict=True)
    cells = [f"{statistics.median(one):.2f} ({min(one):.2f}..{max(one):.2f})" for one in each]
    found = sorted(run.until for run in runs)
    ranked = [run.ranked for run in runs if run.ranked is not None]
    cells.append(f"{statistics.median(found):.0f} ({found[0]}..{found[-1]})")
    cells.append(f"{statistics.median(ranked):.2f}" if ranked else "")
    print(f"{arm:<16}" + "".join(f"{cell:>22}" for cell in cells), flush=True)


def main() -> None:
    """Print a table a work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=Path("results"), help="a folder of tables")
    parser.add_argument("--works", default=f"{TUNED} {UNTUNED}", help="separated by spaces")
    parser.add_argument("--arms", default="descent,descent+others", help="separated by commas")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="processes that predict")
    asked = parser.parse_args()
    recorded = read_tables(asked.tables)
    print("simulated: what was recorded stands in for a GPU; regret in %, median (least..most) of the seeds")
    for name in asked.works.split():
        work = recorded[key_of(name)]
        truth = Truth(work)
        lessons = lessons_for(work.space, taught_by(others(recorded, key_of(name))))
        every, median, high = truth.errors
        print(
            f"\n{name}: {len(truth.latencies)} rows, {len(truth.recorded)} of today's kernels {truth.today[:6]}, best "
            f"{truth.least:.1f} us, by the truth {truth.best:.1f}; left out, a row is missed by {every:.2f} % "
            f"(median), within 5 % of the best by {median:.2f} % (a tenth by more than {high:.2f})"
        )
        heads = [*(f"after {count}" for count in CHECKPOINTS), f"trials to {NEAR} %", f"ranked after {RANKED}"]
        print(f"{'':<16}" + "".join(f"{head:>22}" for head in heads))
        with Foresight(work.workload, STOCK, asked.jobs) as foresight:
            for arm in asked.arms.split(","):
                sampler, _, more = arm.partition("+")
                own = lessons if more else None
                show(arm, [replay(truth, work, sampler, own, foresight, seed) for seed in range(asked.seeds)])


if __name__ == "__main__":
    main()
