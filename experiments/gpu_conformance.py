"""Runs the tests that compare the CUDA VM with the reference VM on this GPU, and records the result.

    python experiments/gpu_conformance.py [--commit COMMIT] [--record FILE] [pytest argument ...]

The record, results/gpu/conformance.txt, has the number of passed tests of each file, the number of drawn configs of the
search space, the GPU and the versions. Give --commit if the source is no checkout. Exits as pytest does.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

from flywheel.measure.environment import Environment, capture_environment
from flywheel.vm.gpu.nvrtc import nvrtc_version

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "gpu" / "conformance.txt"
OUTCOMES = ("passed", "failed", "skipped")


def main() -> int:
    """Run, record, print."""
    parser = argparse.ArgumentParser(description="the CUDA VM against the reference VM")
    parser.add_argument("--commit", help="commit of the source, where it is no checkout")
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments, rest = parser.parse_known_args()
    command = ["-m", "pytest", "-m", "gpu", "--require-gpu", "-q", *(rest or ["tests/gpu"])]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        options = ["-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        code = subprocess.run([sys.executable, *command, *options], cwd=ROOT, check=False).returncode
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    seconds = time.perf_counter() - start
    environment = capture_environment()
    commit = arguments.commit or environment.commit or "unknown"
    text = "\n".join(
        [
            f"python {shlex.join(command)}",
            f"source as of commit {commit}; {seconds:.0f} s",
            *described(environment),
            "",
            *counted(cases),
            f"pytest's exit code: {code}",
            "",
        ]
    )
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    arguments.record.write_text(text, encoding="utf-8")
    print(text)
    return code


def described(environment: Environment) -> list[str]:
    """The machine, in two lines."""
    return [
        f"{environment.gpu}, driver {environment.driver}, NVRTC {nvrtc_version()}",
        f"flywheel {environment.flywheel_version}, torch {environment.torch} (CUDA {torch.version.cuda}), "
        f"Python {environment.python}",
    ]


def counted(cases: Iterable[ET.Element]) -> list[str]:
    """A table of outcomes by file, the failures by name, and the configs that were drawn."""
    files: dict[str, Counter[str]] = {}
    failures, configs, invalid = [], 0, 0
    for case in cases:
        outcome = outcome_of(case)
        file = case.get("file") or str(case.get("classname"))
        files.setdefault(file, Counter())[outcome] += 1
        if outcome == "failed":
            failures.append(f"failed: {file}::{case.get('name')}")
        for entry in case.iter("property"):
            if entry.get("name") == "invalid_draws":
                configs, invalid = configs + 1, invalid + int(entry.get("value", "0"))
    width = max(map(len, files), default=4)
    lines = [f"{'':{width}} " + " ".join(f"{outcome:>8}" for outcome in OUTCOMES)]
    for file, outcomes in [*sorted(files.items()), ("all", sum(files.values(), Counter()))]:
        lines.append(f"{file:{width}} " + " ".join(f"{outcomes[outcome]:>8}" for outcome in OUTCOMES))
    return [
        *lines,
        "",
        f"{configs} configs of the search space, after {invalid} draws that no lowering honours",
        *failures,
    ]


def outcome_of(case: ET.Element) -> str:
    """One of OUTCOMES; what went wrong outside of a test has failed too."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "skipped" if case.find("skipped") is not None else "passed"


if __name__ == "__main__":
    sys.exit(main())
