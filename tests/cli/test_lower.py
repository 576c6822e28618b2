from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result
from patience import HANG_S

from flywheel.ir import ScheduleConfig, config_to_dict, load_program, program_from_json

Run = Callable[..., Result]
WORK = ("--model", "shallow", "--gpu", "l4")

pytestmark = pytest.mark.usefixtures("shallow")


def test_the_program_is_on_stdout_and_a_summary_on_stderr(run: Run, program: Path) -> None:
    result = run("lower", *WORK)
    assert result.exit_code == 0
    assert result.stdout == program.read_text(encoding="utf-8")
    assert "predicted" in result.stderr
    assert "tasks on 58 SMs" in result.stderr


def test_a_config_comes_from_a_file_or_stdin(run: Run) -> None:
    text = json.dumps(config_to_dict(ScheduleConfig(pipelining_depth=5)))
    Path("config.json").write_text(text, encoding="utf-8")
    from_file = run("lower", *WORK, "--config", "config.json")
    assert from_file.exit_code == 0, from_file.stderr
    config = program_from_json(from_file.stdout).config
    assert config is not None
    assert config.pipelining_depth == 5
    assert run("lower", *WORK, "--config", "-", stdin=text).stdout == from_file.stdout


def test_set_changes_one_knob(run: Run, program: Path) -> None:
    lowered = program_from_json(run("lower", *WORK, "--set", "depth=2").stdout)
    before = load_program(program)
    assert before.config is not None
    assert lowered.config is not None
    former = {"pipelining_depth": before.config.pipelining_depth}
    assert config_to_dict(before.config) == config_to_dict(lowered.config) | former


def test_json_describes_a_written_program(run: Run) -> None:
    result = run("lower", *WORK, "--output", "p.json", "--json")
    document = json.loads(result.stdout)
    assert document["path"] == "p.json"
    assert document["tasks"] == len(load_program("p.json").tasks)
    assert document["floor_us"] < document["predicted_us"]


def test_a_malformed_config_is_a_usage_error(run: Run) -> None:
    for text in ("{", '{"pipelining_depth": "two"}', '{"format": "flywheel-schedule", "version": 99}'):
        Path("config.json").write_text(text, encoding="utf-8")
        result = run("lower", *WORK, "--config", "config.json")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("flywheel: config.json: ")


def test_a_config_that_the_lowerer_refuses_is_code_3(run: Run) -> None:
    Path("config.json").write_text('{"threads_per_block": 33}', encoding="utf-8")
    result = run("lower", *WORK, "--config", "config.json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "threads_per_block=33" in result.stderr


def test_no_model_and_no_schedule_is_a_usage_error(run: Run) -> None:
    assert "--model" in run("lower", "--gpu", "l4").stderr
    assert run("lower", "--gpu", "l4").exit_code == 2


def test_output_follows_links_and_keeps_the_mode(run: Run, program: Path) -> None:
    real, link = Path("real.json"), Path("link.json")
    real.write_text("old", encoding="utf-8")
    real.chmod(0o600)
    link.symlink_to(real)
    assert run("lower", *WORK, "--output", str(link)).exit_code == 0
    assert link.is_symlink()
    assert real.read_text(encoding="utf-8") == program.read_text(encoding="utf-8")
    assert real.stat().st_mode & 0o777 == 0o600
    assert {path.name for path in Path().iterdir()} == {"real.json", "link.json", "shallow"}


def test_output_to_a_pipe_goes_through_it(run: Run, program: Path) -> None:
    os.mkfifo("pipe")
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(Path("pipe").read_text(encoding="utf-8")), daemon=True)
    reader.start()
    assert run("lower", *WORK, "--output", "pipe").exit_code == 0
    reader.join(HANG_S)
    assert received == [program.read_text(encoding="utf-8")]
    assert Path("pipe").is_fifo()


def test_a_program_is_no_config(run: Run, program: Path) -> None:
    result = run("lower", *WORK, "--config", str(program))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "ScheduleConfig" in result.stderr
    assert run("lower", *WORK, "--config", "-", stdin="{}").exit_code == 0


@pytest.mark.parametrize(
    "command", [("lower",), ("search", "--measure", "predict", "--trials", "1"), ("evaluate", "-")]
)
def test_a_model_that_the_gpus_memory_does_not_hold_is_one_line_with_the_numbers(
    run: Run, command: tuple[str, ...]
) -> None:
    refused = run(*command, "--model", "llama3-70b", "--gpu", "h100", stdin="{}")
    assert (refused.exit_code, refused.stdout) == (3, "")
    assert refused.stderr == (
        "flywheel: llama3-70b on h100: 141.11 GB of weights, 0.17 of caches and 0.03 of workspace exceed its "
        "85.90 GB of memory\n"
    )
    assert not Path("flywheel.db").exists()


def test_several_gpus_share_a_step(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    result = run("lower", *WORK, "--ranks", "3", "-o", str(path), "--json")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary["ranks"] == 3
    assert load_program(path).ranks == 3
    refused = run("lower", *WORK, "--ranks", "2")
    assert refused.exit_code == 2
    assert "n_heads=9 is not a multiple of 2 ranks" in refused.stderr
