from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from flywheel.decode.caches import KvCaches
from flywheel.errors import NoGpuError
from flywheel.ir import ScheduleConfig, config_to_dict

Run = Callable[..., Result]


@pytest.fixture
def lowered(run: Run, checkpoint: Path) -> Path:
    """The checkpoint's program, in float32, of 64 positions."""
    path = Path("program.json")
    result = run("lower", "--model", checkpoint, "--gpu", "h100", "--dtype", "f32", "--context", 64, "--output", path)
    assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config's file."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(config_to_dict(ScheduleConfig(tiling={"attention": {"kv_block": 32}}))), encoding="utf-8"
    )
    return path


def edited(program: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    document = json.loads(program.read_text(encoding="utf-8"))
    change(document)
    program.write_text(json.dumps(document), encoding="utf-8")
    return program


def buffer(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in document["buffers"] if each["name"] == name)
    return found


def test_a_lowered_program_passes(run: Run, lowered: Path, checkpoint: Path) -> None:
    result = run("verify", lowered, "--model", checkpoint, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["passed"] is True
    assert document["reason"] is None
    assert document["positions"] == [0, 32, 62, 63]
    assert 0 < document["error"] <= document["bound"] == 1e-4
    assert document["where"].startswith("position ")
    assert document["dtype"] == "F32"
    assert document["random_weights"] is False
    described = json.loads(run("inspect", lowered, "--json").stdout)
    assert document["program_id"] == described["program_id"]


@pytest.mark.parametrize(("dtype", "bound"), [("f32", "0.0001"), ("f16", "0.0019"), ("bf16", "0.015")])
def test_a_config_passes_in_every_dtype(dtype: str, bound: str, run: Run, config: Path, checkpoint: Path) -> None:
    arguments = ("--model", checkpoint, "--dtype", dtype, "--context", 96, "--gpu", "l4")
    result = run("verify", "--config", config, *arguments, "--order", "adversarial", "--seed", 3)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("PASS\n")
    assert f"at most {bound} for {dtype.upper()}" in result.stdout
    assert "0, 48, 94, 95" in result.stdout


def test_a_config_takes_the_checkpoints_dtype(run: Run, config: Path, checkpoint: Path) -> None:
    document = json.loads(run("verify", "--config", config, "--model", checkpoint, "--json").stdout)
    assert document["dtype"] == "F32"
    assert document["positions"] == [0, 64, 126, 127]


def test_position_0_alone_is_never_a_pass(run: Run, lowered: Path, checkpoint: Path) -> None:
    result = run("verify", lowered, "--model", checkpoint, "--positions", "0")
    assert result.exit_code == 3
    assert result.stdout.startswith("FAIL: positions [0] hold none after 0")


def test_a_planted_fault_fails_with_code_3(run: Run, lowered: Path, checkpoint: Path) -> None:
    def swap(document: dict[str, Any]) -> None:
        one, other = buffer(document, "L1.k_proj.w"), buffer(document, "L1.v_proj.w")
        one["source"], other["source"] = other["source"], one["source"]

    result = run("verify", edited(lowered, swap), "--model", checkpoint, "--positions", "3,9", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 3
    assert document["passed"] is False
    assert "exceeds 0.0001" in document["reason"]
    assert document["error"] > 0.01


def rename_a_cache(document: dict[str, Any]) -> None:
    buffer(document, "L1.v_cache.h1")["name"] = "elsewhere"


def rename_a_source(document: dict[str, Any]) -> None:
    buffer(document, "L0.o_proj.w")["source"] = "model.layers.7.self_attn.o_proj.weight"


def forget_a_source(document: dict[str, Any]) -> None:
    buffer(document, "L0.o_proj.w")["source"] = None


def widen_the_logits(document: dict[str, Any]) -> None:
    buffer(document, "logits")["shape"] = [1, 261]


def quantize_a_weight(document: dict[str, Any]) -> None:
    buffer(document, "L0.o_proj.w")["dtype"] = "I8"


def grow_the_caches(document: dict[str, Any]) -> None:
    for each in document["buffers"]:
        if each["kind"] == "KV_CACHE":
            each["shape"][0] = 2**30


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rename_a_cache, "elsewhere"),
        (rename_a_source, "L0.o_proj.w"),
        (forget_a_source, "L0.o_proj.w"),
        (widen_the_logits, "logits"),
        (quantize_a_weight, "L0.o_proj.w"),
        (grow_the_caches, "L0.k_cache.h0"),
    ],
)
def test_what_does_not_fit_the_model_is_one_line_that_names_the_buffer(
    change: Callable[[dict[str, Any]], None], named: str, run: Run, lowered: Path, checkpoint: Path
) -> None:
    result = run("verify", edited(lowered, change), "--model", checkpoint)
    assert result.exit_code in (2, 3)
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert named in result.stderr


def test_an_unsafe_program_is_rejected(run: Run, lowered: Path, checkpoint: Path) -> None:
    def unordered(document: dict[str, Any]) -> None:
        for task in document["tasks"]:
            task["waits"] = []

    result = run("verify", edited(lowered, unordered), "--model", checkpoint)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (3, "", 1)


def test_another_models_program_is_refused(run: Run, program: Path, checkpoint: Path) -> None:
    result = run("verify", program, "--model", checkpoint)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "smollm2" not in result.stderr
    assert "buffer" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--positions", "64"), "0..63"),
        (("--positions", "1,-1"), "0..63"),
        (("--positions", "a"), "list of integers"),
        (("--gpu", "l4"), "--gpu goes with --config"),
        (("--context", "64"), "--context goes with --config"),
        (("--config", "x.json"), "two programs, "),
        (("--config", "x.json"), "give FILE or --config"),
    ],
)
def test_usage_errors_are_one_line(
    arguments: tuple[str, ...], why: str, run: Run, lowered: Path, checkpoint: Path
) -> None:
    result = run("verify", lowered, "--model", checkpoint, *arguments)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert why in result.stderr


def test_variables_for_all_commands_do_not_contradict_a_program(
    run: Run, lowered: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLYWHEEL_CONTEXT", "2048")
    monkeypatch.setenv("FLYWHEEL_MODEL", str(checkpoint))
    assert run("verify", lowered, "--positions", "5").exit_code == 0


def test_a_program_or_a_config_and_a_model_are_needed(run: Run, lowered: Path, config: Path) -> None:
    for arguments, why in (
        ((), "verify: no program; give FILE or --config"),
        ((lowered,), "--model"),
        (("--config", config), "--model"),
    ):
        result = run("verify", *arguments)
        assert result.exit_code == 2
        assert why in result.stderr


def test_a_config_that_the_lowerer_refuses_is_code_3(run: Run, config: Path, checkpoint: Path) -> None:
    config.write_text('{"threads_per_block": 33}', encoding="utf-8")
    result = run("verify", "--config", config, "--model", checkpoint)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("flywheel: rejected: ")


def test_an_error_that_is_no_number_is_null(
    run: Run, lowered: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvCaches, "write_past", lambda *_: None)
    result = run("verify", lowered, "--model", checkpoint, "--positions", "2", "--json")
    assert result.exit_code == 3
    assert json.loads(result.stdout)["error"] is None
    assert "holds NaN or infinity" in json.loads(result.stdout)["reason"]


def test_cuda_without_a_gpu_is_code_4(
    run: Run, lowered: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent() -> None:
        raise NoGpuError("GPU 0: no driver")

    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", absent)
    result = run("verify", lowered, "--model", checkpoint, "--device", "cuda")
    assert (result.exit_code, result.stdout, result.stderr) == (4, "", "flywheel: GPU 0: no driver\n")
