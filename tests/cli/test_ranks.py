"""`--ranks` of commands that run, judge or price one schedule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from flywheel.errors import NoGpuError
from flywheel.ir import ScheduleConfig, config_to_dict

Run = Callable[..., Result]
NO_LINK = "GPU 0 (0000:01:00.0) has no access to the memory of GPU 1 (0000:02:00.0)"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config's file."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_to_dict(ScheduleConfig(page_allocation="none"))), encoding="utf-8")
    return path


def test_two_ranks_generate_what_one_gpu_does(run: Run, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt-ids", "39,68,75", "--max-tokens", 4, "--json", "--verify")
    one, two = (run(*arguments, *more) for more in ((), ("--ranks", 2)))
    assert (one.exit_code, two.exit_code) == (0, 0), two.stderr
    assert json.loads(one.stdout)["token_ids"] == json.loads(two.stdout)["token_ids"]


def test_a_program_of_two_ranks_is_verified_from_its_config_and_from_its_file(
    run: Run, config: Path, checkpoint: Path
) -> None:
    work = ("--model", checkpoint, "--gpu", "h100", "--dtype", "f32", "--context", 32, "--ranks", 2)
    lowered = run("lower", *work, "--config", config, "--output", "two.json")
    assert lowered.exit_code == 0, lowered.stderr
    results = [
        run("verify", "--config", config, *work, "--json"),
        run("verify", "two.json", "--model", checkpoint, "--json"),
    ]
    documents = [json.loads(result.stdout) for result in results]
    assert [result.exit_code for result in results] == [0, 0], documents
    assert documents[0]["passed"] and documents[0] == documents[1]


def test_a_schedule_of_two_gpus_brings_its_number_and_an_option_overrides_it(run: Run, config: Path) -> None:
    work = ("--model", "smollm2-135m", "--context", 64, "--measure", "predict", "--json")
    found = [
        json.loads(run("evaluate", config, *work, *gpu).stdout)["gpu"]
        for gpu in (("--gpu", "3xh200"), ("--gpu", "h200", "--ranks", 3), ("--gpu", "3xh200", "--ranks", 1))
    ]
    assert found == ["3xh200", "3xh200", "h200"]


@pytest.mark.parametrize("command", ["generate", "verify", "trace"])
def test_gpus_that_cannot_share_a_program_are_code_4_before_anything_is_loaded(
    run: Run, config: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_gpus(count: int) -> None:
        assert count == 2
        raise NoGpuError(NO_LINK)

    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", lambda: 0)
    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpus", open_gpus)
    more = {"generate": ("--prompt-ids", 3, "--device", "cuda"), "verify": ("--device", "cuda"), "trace": ()}[command]
    result = run(command, "--config", config, "--model", "nothing", "--ranks", 2, *more)
    assert result.exit_code == 4
    assert NO_LINK in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ranks_go_with_a_config_not_with_a_program(run: Run, config: Path, checkpoint: Path) -> None:
    result = run("verify", "program.json", "--model", checkpoint, "--ranks", 2)
    assert result.exit_code == 2
