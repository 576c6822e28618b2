"""Times the same schedules with two source trees of flywheel, in turn, on this GPU.

    python experiments/two_versions.py OLD NEW SCHEDULE.json ... [--gpu h200] [--rounds 5] [--record FILE]

OLD and NEW are folders with a `flywheel` package, such as two checkouts. Each measurement is a process: `flywheel
evaluate --measure cuda` of one tree without a store. A round measures every schedule with both trees, and rounds
alternate in the tree that goes first. Exits with 1 if a latency is missing, or if the new tree's median is more than 1
% above the old one's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ALLOWED = 0.01
"""Of the old latency, what the new one may add: the spread of one schedule from process to process."""


def main() -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description="two versions of flywheel beside each other")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("schedules", type=Path, nargs="+")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    trees = {"old": arguments.old.resolve(), "new": arguments.new.resolve()}
    found: dict[tuple[Path, str], list[float]] = {}
    faults = []
    for turn in range(arguments.rounds):
        for schedule in arguments.schedules:
            for name in sorted(trees, reverse=turn % 2 == 0):
                latency_us, said = evaluate(trees[name], schedule.resolve(), arguments.gpu)
                if latency_us is None:
                    faults.append(f"{schedule.name}, {name}, round {turn + 1}: {said}")
                else:
                    found.setdefault((schedule, name), []).append(latency_us)
        lines = [f"python experiments/two_versions.py {' '.join(sys.argv[1:])}", "", *table(found, arguments.schedules)]
        lines += ["", *faults] if faults else []
        if arguments.record is not None:  # after each round, in case the machine is taken away
            arguments.record.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    slower = [each for each in arguments.schedules if not ratio(found, each) <= 1 + ALLOWED]
    return 1 if faults or slower else 0


def evaluate(tree: Path, schedule: Path, gpu: str) -> tuple[float | None, str]:
    """(the measured latency in us, or None; why there is none)."""
    path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:  # where no store is
        command = [sys.executable, "-m", "flywheel", "evaluate", "--gpu", gpu, "--measure", "cuda", "--json"]
        done = subprocess.run(
            [*command, str(schedule)],
            env={**{name: value for name, value in os.environ.items() if name != "FLYWHEEL_STORE"}, "PYTHONPATH": path},
            cwd=folder, capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
    if done.returncode:
        return None, (done.stderr or done.stdout).strip().replace("\n", " ")
    return float(json.loads(done.stdout)["latency_us"]), ""


def ratio(found: dict[tuple[Path, str], list[float]], schedule: Path) -> float:
    """New over old, of the medians over rounds; NaN where one is missing."""
    old, new = found.get((schedule, "old")), found.get((schedule, "new"))
    return median(new) / median(old) if old and new else float("nan")


def table(found: dict[tuple[Path, str], list[float]], schedules: list[Path]) -> list[str]:
    """A line a schedule: medians in us, the range over rounds, and new over old."""
    lines = [f"{'schedule':36} {'old us':>9} {'range':>15} {'new us':>9} {'range':>15} {'new / old':>9}"]
    for schedule in schedules:
        cells = [f"{schedule.name:36}"]
        for name in ("old", "new"):
            times = found.get((schedule, name), [])
            cells.append(f"{median(times):9.1f} {f'{min(times):.1f}-{max(times):.1f}':>15}" if times else f"{'-':>25}")
        lines.append(" ".join([*cells, f"{ratio(found, schedule):9.4f}"]))
    return lines


if __name__ == "__main__":
    sys.exit(main())
