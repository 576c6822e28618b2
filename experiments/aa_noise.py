"""Do copies of one schedule beat each other? `python experiments/aa_noise.py [--noise results.tsv]`.

The script simulates finals of measured campaigns, and judges them by the code that judges real ones (search/finals.py,
search/noise.py). First all programs are copies of one, then one program is faster by a known share. A sample is the
program's latency times three factors:

- the sample's own noise, lognormal; by default p10 and p90 are at -0.3 and +0.3 % of the median;
- the effect of loading the program in this round, lognormal and the same for the round's samples of that program. Two
  cases bound it: a tenth of the sample's own noise, and as much as that noise;
- the clocks' drift, the same for all programs: a mean-reverting random walk.

`--noise` takes a table that `flywheel export --format tsv` wrote. The first factor is then fitted to the median spread
between p10 and p90 of its measured rows. The second is fitted to the distance of a program's medians, if it has
several. Exits with 1 if copies have a winner in more than 5 % of the campaigns.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, log
from pathlib import Path
from statistics import mean, median, stdev

from flywheel.measure.dismissal import is_settled
from flywheel.measure.outcome import Contest, Crashed, Rounds
from flywheel.search.finals import FINALISTS, ROUNDS, gains

CAMPAIGNS = 200
SAMPLES = 10
LATENCY_US = 1000.0
ALLOWED = 0.05
NORMAL_P90 = 1.2816
"""Standard deviations from the median to the 90th percentile."""


@dataclass(frozen=True, slots=True)
class Noise:
    """Standard deviations of logarithms: of a sample, of a load, and of a step of the drift."""

    sample: float
    load: float
    drift: float = 0.0005


def fitted(path: Path) -> Noise:
    """The noise of a table's measured rows."""
    spreads, medians = [], defaultdict(list)
    with path.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream, delimiter="\t"):
            if row["outcome"] == "measured" and row["source"] != "store" and int(row["samples"]) > 1:
                spreads.append(log(float(row["p90_us"]) / float(row["p10_us"])))
                medians[row["program_id"]].append(log(float(row["latency_us"])))
    if not spreads:
        raise SystemExit(f"{path}: no measured row")
    sample = median(spreads) / (2 * NORMAL_P90)
    repeated = [stdev(found) for found in medians.values() if len(found) > 1]
    print(f"{path.name}: {len(spreads)} measured rows; {len(repeated)} programs measured more than once")
    return Noise(sample, mean(repeated) if repeated else sample)


def final(noise: Noise, shares: Sequence[float], chance: random.Random) -> Contest:
    """One final of programs that take the share more than LATENCY_US each."""
    outcome = Crashed("not looked at", transient=False)
    drift = 0.0
    times: list[list[tuple[float, ...]]] = [[] for _ in shares]
    for _ in range(ROUNDS):
        loads = [chance.gauss(0.0, noise.load) for _ in shares]
        found: list[list[float]] = [[] for _ in shares]
        for _ in range(SAMPLES):
            drift = 0.9 * drift + chance.gauss(0.0, noise.drift)
            for samples, share, load in zip(found, shares, loads, strict=True):
                samples.append(LATENCY_US * (1 + share) * exp(load + drift + chance.gauss(0.0, noise.sample)))
        for rounds, samples in zip(times, found, strict=True):
            rounds.append(tuple(samples))
        if is_settled([tuple(rounds) for rounds in times]):
            break
    taken: tuple[Rounds, ...] = tuple(tuple(rounds) for rounds in times)
    return Contest(outcome, (outcome,) * (len(shares) - 1), taken)


def winners(noise: Noise, shares: Sequence[float], seed: int) -> list[tuple[int | None, int]]:
    """Of each campaign, the program that is surely the fastest, None where the best two are tied, and the rounds that
    its final took."""
    chance = random.Random(seed)
    found: list[tuple[int | None, int]] = []
    for number in range(CAMPAIGNS):
        contest = final(noise, shares, chance)
        results = gains(contest, number)
        winner = next((place for place, result in enumerate(results) if result.is_one), None)
        found.append((winner, len(contest.times_us[0])))
    return found


def main() -> int:
    """Print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--noise", type=Path, help="a results.tsv of a measured campaign")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    base = fitted(arguments.noise) if arguments.noise else Noise(0.003 / NORMAL_P90, 0.0003 / NORMAL_P90)
    if not arguments.noise:
        print("levels of noise are assumed, and not fitted to a campaign, as --noise does")
    cases = [base] if arguments.noise else [base, replace(base, load=base.sample)]
    print(f"{CAMPAIGNS} simulated finals a line, up to {ROUNDS} rounds of {SAMPLES} launches, seed {arguments.seed}")
    print(f"{'sample, %':>10}{'load, %':>9}  {'programs':<34}{'a winner':>9}{'the right one':>15}{'rounds':>8}")
    fine = True
    for noise in cases:
        for label, shares in (
            ("2 copies", (0.0, 0.0)),
            (f"{FINALISTS} copies", (0.0,) * FINALISTS),
            *((f"one {share:.1%} ahead of {FINALISTS - 1} copies", (0.0, *(share,) * (FINALISTS - 1)))
              for share in (0.001, 0.002, 0.005, 0.01)),
        ):  # fmt: skip
            found = winners(noise, shares, arguments.seed)
            sure = sum(place is not None for place, _ in found) / CAMPAIGNS
            right = sum(place == 0 for place, _ in found) / CAMPAIGNS
            rounds = mean(taken for _, taken in found)
            copies = "copies" in label and "ahead" not in label
            fine = fine and (not copies or sure <= ALLOWED)
            print(f"{100 * noise.sample:>10.2f}{100 * noise.load:>9.2f}  {label:<34}{sure:>9.1%}"
                  f"{'' if copies else f'{right:.1%}':>15}{rounds:>8.1f}", flush=True)  # fmt: skip
    print(f"a winner among copies in at most {ALLOWED:.0%} of the campaigns: {'yes' if fine else 'NO'}")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
