from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import Result
from traces import model_stamps

from flywheel.decode.source import Source
from flywheel.errors import MismatchError, NoGpuError, UsageError
from flywheel.ir import MegakernelProgram
from flywheel.judge import trace as tracing
from flywheel.judge.trace import TracedStep, trace_step
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.verdict import judge
from flywheel.vm.gpu.trace import read_stamps

Run = Callable[..., Result]
WORK = ("trace", "--model", "smollm2-135m", "--gpu", "l4", "--context", "64")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int = 0) -> None:
        raise NoGpuError("GPU 0: there is none")

    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", refuse)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[MegakernelProgram, int | None]]:
    """Programs and positions that were traced, on an L4 that is as fast as the cost model says."""
    asked: list[tuple[MegakernelProgram, int | None]] = []

    def pretend(program: MegakernelProgram, source: Source, position: int | None, seed: int) -> TracedStep:
        asked.append((program, position))
        packed, stamps = model_stamps(program)
        verdict = judge(error=0.001, where="logits", positions=(0, 1, 63), dtype="BF16"
        )
        latency = MeasuredLatency(900.0, 890.0, 910.0, 30, 3, "flushed")
        launch = read_stamps(packed, stamps, np.tile([0.25, 0.5, 0.125], (len(packed.queues) - 1, 1)))
        batch = next(buffer.numel for buffer in program.buffers if buffer.name == "token_id")
        place = 63 if position is None else position
        return TracedStep("NVIDIA L4", batch, place, verdict, latency, 950.0, launch)

    monkeypatch.setattr("flywheel.cli.trace.check_device", lambda device, ranks: None)
    monkeypatch.setattr("flywheel.cli.decoding.gpu_of", lambda device: "l4")
    monkeypatch.setattr(tracing, "trace_step", pretend)
    return asked


@pytest.mark.usefixtures("without_gpu")
def test_without_a_gpu_it_is_one_line_and_code_4(run: Run) -> None:
    result = run(*WORK)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr == "flywheel: GPU 0: there is none\n"


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    "arguments",
    [
        ("--config", "a.json", "--campaign", "b"),
        ("--output", "nowhere/trace.json"),
        ("--picture", "nowhere/trace.svg"),
        ("--position", "0"),
    ],
)
def test_what_cannot_be_done_is_refused_before_a_gpu_is_looked_for(arguments: tuple[str, ...], run: Run) -> None:
    result = run(*WORK, *arguments)
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)


def test_the_tables_show_operations_and_hand_offs(run: Run, traced: list[Any]) -> None:
    result = run(*WORK)
    assert result.exit_code == 0, result.stderr
    assert traced[0][1] is None
    for text in ("900.0 us without a trace, 950.0 us with it", "GB/s", "hand-off to", "stalled 25.0 %", "down_proj"):
        assert text in result.stdout
    assert "in a layer" in result.stdout
    assert result.stderr.count("RANDOM WEIGHTS of seed 0") == 1


def test_the_document_adds_up_and_the_files_are_there(run: Run, traced: list[Any]) -> None:
    result = run(*WORK, "--position", 40, "--output", "t.json", "--picture", "t.svg", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    (program, position), *_ = traced
    assert (document["position"], position, document["tasks"]) == (40, 40, len(program.tasks))
    assert sum(document["phases"].values()) + document["idle"] == pytest.approx(1.0)
    assert sum(document["states"].values()) == pytest.approx(1.0)
    assert document["states"]["starve"] == pytest.approx(document["phases"]["multiply"])  # less than matrix_starved
    assert document["states"]["idle"] == pytest.approx(document["idle"], abs=1e-9)
    assert sum(row["sm_us"] for row in document["operations"]) / document["span_us"] + document["idle"] == (
        pytest.approx(1.0)
    )
    assert {"wait", "stage", "multiply", "finish", "run", "signal"} == document["operations"][0]["phases"].keys()
    assert {row["operation"] for row in document["hand_offs"]} < {row["operation"] for row in document["operations"]}
    assert {row["operation"] for row in document["layer"]} < {row["operation"] for row in document["operations"]}
    assert all(row["ready_us"] <= row["stored_us"] <= row["last_us"] for row in document["layer"])
    assert (document["latency_us"], document["traced_us"]) == (900.0, 950.0)
    assert (document["trace"], document["picture"]) == ("t.json", "t.svg")
    trace = json.loads(Path("t.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["program_id"] == document["program_id"]
    assert trace["traceEvents"][0]["args"]["name"] == "smollm2-135m, measured on NVIDIA L4"
    title = "smollm2-135m on l4: layer 15 on every SM, measured on NVIDIA L4"
    assert ElementTree.parse("t.svg").getroot().findtext("{*}title") == title


def test_a_campaign_gives_its_best_schedule(run: Run, traced: list[Any], store: str) -> None:
    result = run("trace", "--campaign", "small", "--store", store, "--json")
    assert result.exit_code == 0, result.stderr
    best = json.loads(run("export", "--format", "schedule", "--campaign", "small", "--store", store).stdout)
    document = json.loads(result.stdout)
    assert (document["model"], document["program_id"]) == (best["model"], best["program_id"])
    assert f"small, trial {best['provenance']['trial']}: predicted" in result.stderr
    assert "not the schedule's program" not in result.stderr
    changed = run("trace", "--campaign", "small", "--store", store, "--context", 64)
    assert f"not the schedule's program {best['program_id']}" in changed.stderr
    unknown = run("trace", "--campaign", "smll", "--store", store)
    assert (unknown.exit_code, len(unknown.stderr.splitlines())) == (2, 1)


def test_several_sequences(run: Run, traced: list[Any]) -> None:
    result = run(*WORK, "--batch", 2)
    assert result.exit_code == 0, result.stderr
    assert "position 63, 2 sequences:" in result.stdout
    assert json.loads(run(*WORK, "--batch", 2, "--json").stdout)["batch"] == 2
    assert "sequences" not in run(*WORK).stdout


def test_a_campaign_has_its_batch(run: Run, traced: list[Any], tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/b.db"
    search = ("search", "--model", "smollm2-135m", "--gpu", "l4", "--context", 64, "--trials", 2, "--batch", 2)
    assert run(*search, "--name", "two", "--store", store).exit_code == 0
    assert json.loads(run("trace", "--campaign", "two", "--store", store, "--json").stdout)["batch"] == 2
    assert json.loads(run("trace", "--campaign", "two", "--store", store, "--json", "--batch", 1).stdout)["batch"] == 1


@pytest.mark.usefixtures("traced")
def test_nothing_to_trace_is_a_usage_error(run: Run) -> None:
    result = run("trace")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "no model" in result.stderr


@pytest.mark.usefixtures("traced")
def test_wrong_logits_give_no_stamps(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MismatchError("program: logits are wrong: max relative error 0.4 exceeds 0.0312 for BF16")

    monkeypatch.setattr(tracing, "trace_step", refuse)
    result = run(*WORK, "--output", "t.json")
    assert (result.exit_code, result.stdout) == (3, "")
    assert not Path("t.json").exists()


def test_position_0_proves_nothing() -> None:
    nothing: Any = None
    with pytest.raises(UsageError, match="position 0"):
        trace_step(nothing, nothing, 0)
