"""The scripts that record the outputs under results/ name what is there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["record_cpu.sh", "record_gpu.sh"])
def test_a_recording_script_parses_and_names_scripts_that_exist(root: Path, name: str) -> None:
    script = root / "experiments" / name
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    named = set(re.findall(r"\b([a-z]\w+\.py)\b", script.read_text()))
    assert named
    there = {path.name for folder in ("experiments", "tests") for path in (root / folder).rglob("*.py")}
    assert named <= there


def test_every_output_that_needs_no_gpu_has_a_part(root: Path) -> None:
    text = (root / "experiments" / "record_cpu.sh").read_text()
    lists = re.findall(r"^(?:times|checks|long)=\(([^)]*)\)", text, re.MULTILINE)
    parts = {part for each in lists for part in each.split()}
    assert len(lists) == 3
    assert {path.stem for path in (root / "results").glob("*.txt")} <= parts
    scripts = {path.stem for path in (root / "experiments").glob("*.py")}
    own = set(re.findall(r"^    ([a-z_0-9| ]+)\)", text, re.MULTILINE))
    cased = {part.strip() for each in own for part in each.split("|")}
    assert [part for part in parts if part not in scripts | cased] == []


def test_a_part_that_there_is_not_ends_the_script_at_once(root: Path, tmp_path: Path) -> None:
    script = root / "experiments" / "record_cpu.sh"
    done = subprocess.run(
        [script, tmp_path, "commit", "cache_memory", "nothing"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "part nothing is none" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_output_begins_with_its_command_its_commit_and_its_machine(root: Path, tmp_path: Path) -> None:
    script = root / "experiments" / "record_cpu.sh"
    command, environ = [script, tmp_path, "12ab", "cache_memory"], {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, *rest = (tmp_path / "cache_memory.txt").read_text().splitlines()
    assert first == "$ python experiments/cache_memory.py   # commit 12ab"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d, Python 3\.\S+, \d+ cores, load \S+ before", second)
    assert rest == [
        line for line in (root / "results" / "cache_memory.txt").read_text().splitlines() if line[0] not in "$2"
    ]
