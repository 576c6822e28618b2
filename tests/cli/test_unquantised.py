"""What quantising costs, as `verify --against-unquantised` says it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from flywheel.ir import ScheduleConfig, config_to_dict

Run = Callable[..., Result]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_to_dict(ScheduleConfig())), encoding="utf-8")
    return path


def cost(run: Run, config: Path, checkpoint: Path, weights: str) -> dict[str, float]:
    found = run("verify", "--config", config, "--model", checkpoint, "--gpu", "h100", "--dtype", "f32", "--context", 48,
                "--weights", weights, "--against-unquantised", "--json")  # fmt: skip
    assert found.exit_code == 0, found.stderr
    document: dict[str, float] = json.loads(found.stdout)["against_unquantised"]
    return document


def test_fewer_bits_cost_more_and_a_verdict_judges_the_program_alone(run: Run, config: Path, checkpoint: Path) -> None:
    eight, four = (cost(run, config, checkpoint, weights) for weights in ("int8", "int4-row"))
    assert eight["tokens"] == four["tokens"] == 48
    assert 0 < eight["mean_kl"] < four["mean_kl"] <= four["largest_kl"]
    assert 0 <= four["same_choice"] <= eight["same_choice"] <= 1


def test_without_quantised_weights_there_is_nothing_to_compare(run: Run, config: Path, checkpoint: Path) -> None:
    found = run("verify", "--config", config, "--model", checkpoint, "--gpu", "h100", "--dtype", "f32", "--context", 48,
                "--against-unquantised")  # fmt: skip
    assert found.exit_code == 2
    assert "needs a program with quantised weights" in found.stderr
