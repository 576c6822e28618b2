from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest


def planned(root: Path, tmp_path: Path, driver: str | None) -> str:
    """What `make search` would do in a fresh checkout on a machine with that driver."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexit 9\n" if driver is None else f"#!/bin/sh\necho {driver}\necho {driver}\n")
    tool.chmod(0o755)
    (tmp_path / "Makefile").write_text((root / "Makefile").read_text(encoding="utf-8"), encoding="utf-8")
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["make", "--dry-run", "search"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_without_a_gpu_a_search_installs_the_base_and_predicts_for_an_h100(root: Path, tmp_path: Path) -> None:
    plan = planned(root, tmp_path, None)
    assert "--constraint constraints.txt --editable . >&2" in plan
    assert "flywheel search --model mistral-7b --gpu h200\n" in plan


@pytest.mark.parametrize(
    ("driver", "wanted"),
    [
        ("580.65.06", "--constraint constraints.txt --editable '.[cuda,torch,hf]' >&2"),
        ("535.104.05", "--disable-pip-version-check --editable '.[cuda12,torch,hf]' >&2"),
    ],
)
def test_with_a_gpu_a_search_installs_what_measures_and_measures_on_it(
    driver: str, wanted: str, root: Path, tmp_path: Path
) -> None:
    plan = planned(root, tmp_path, driver)
    assert wanted in plan
    assert "flywheel search --model llama3.2-1b\n" in plan


def test_the_whole_check_gives_laws_all_of_their_examples(root: Path) -> None:
    assert "\nTEST_EFFORT=full make test\n" in (root / ".ci" / "run").read_text(encoding="utf-8")
