from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import imagined
import pytest
from click.testing import Result

from flywheel.cost_model import MACHINES, MODEL_VERSION, predict
from flywheel.cost_model.calibration import Calibration, dump_calibration, read_calibration
from flywheel.cost_model.links import Link
from flywheel.measure.ceiling import Ceiling, PeerLink
from flywheel.measure.environment import capture_environment
from flywheel.measure.latency import GpuState, MeasuredLatency
from flywheel.measure.outcome import Measured
from flywheel.measure.verdict import judge
from flywheel.plan import program_id
from flywheel.search.rows import to_record
from flywheel.search.spec import CampaignSpec, to_campaign
from flywheel.search.trials.evaluate import Evaluation
from flywheel.store.sql import open_store

Run = Callable[..., Result]
VERDICT = judge(error=0.0, where="logits", positions=[1], dtype="BF16")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A store with a campaign of 20 configs, measured by an imagined machine, and a probe of it."""
    for module in ("workload", "knowledge.warm"):
        monkeypatch.setattr(f"flywheel.search.{module}.TARGETS", {"few": imagined.TARGET})
    monkeypatch.setattr("flywheel.cost_model.calibrate._ROUNDS", 6)
    here = replace(capture_environment(), gpu="Few", driver="1", nvrtc="13", kernels="abc")
    spec, chance = CampaignSpec("small", "few", context=256, measure="cuda", name="ran"), random.Random(0)
    path, now = Path("trials.db"), "2026-01-01T00:00:00+00:00"
    with open_store(path) as store:
        store.create_campaign(to_campaign(spec, "ran", decoder=asdict(imagined.SPECS[0]), created_at=now))
        store.append_ceiling(Ceiling("Few", "1", "host", 205.0, "ring", 0.6, now))
        store.append_link(PeerLink("Few", "1", "host", 1, 1.25, 0.5, 380.0, 390.0, now))
        for trial, program in enumerate(imagined.programs(0, 60)[:20]):
            us = predict(program, imagined.TRUTH).latency_us * chance.gauss(1.0, 0.02)
            latency = MeasuredLatency(us, us, us, 30, 3, "flushed", gpu_state=GpuState(throttle="none", strangers=0))
            evaluation = Evaluation(Measured(latency, VERDICT), program_id(program))
            row = to_record(
                "ran", trial, spec, program.config, evaluation, here, source="search", ask_s=None, created_at=now
            )
            store.append(row)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A calibration of an L4 that is slower by its launch."""
    slower = replace(MACHINES["l4"], source="calibrated", launch_us=1000.0)
    path = tmp_path / "machine.json"
    path.write_text(dump_calibration(Calibration(slower, {})), encoding="utf-8")
    return path


def test_a_calibration_is_written_and_scored(measured: Path, run: Run) -> None:
    result = run("calibrate", "--gpu", "few", "--store", measured, "--jobs", "1", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    (work,) = document["works"]
    assert (work["model"], work["fitted"], work["after"]["n"]) == ("small", 10, 10)
    assert work["after"]["median_error"] < work["before"]["median_error"]
    assert document["probed"] == {"read_gbs": 205.0, "visibility_us": 0.6}
    written = read_calibration("machine.json")
    assert written.predictor.version == document["predictor"]
    assert written.machine.visibility_us >= 0.6
    assert written.machine.read_gbs <= 205.0
    assert written.provenance["kernels"] == "abc"
    assert written.machine.link == Link(1.25, 0.5, 380.0)
    assert document["machine"]["link"] == asdict(written.machine.link)
    assert "flywheel: fitting to 10 programs" in result.stderr


def test_the_text_has_before_and_after(measured: Path, run: Run) -> None:
    result = run("calibrate", "--gpu", "few", "--store", measured, "--jobs", "1", "--campaign", "ran", "-o", "m.json")
    assert result.exit_code == 0, result.stderr
    assert "fitted to 10 programs and compared with 10 that were held back" in result.stdout
    assert "Spearman before" in result.stdout
    assert "small, bf16, context 256" in result.stdout
    assert "kernels abc" in result.stdout
    assert "1.25 us one way (0.50 on one GPU), 380 GB/s" in result.stdout
    assert Path("m.json").exists()


def test_only_what_is_named_is_fitted(measured: Path, run: Run) -> None:
    only = ("--only", "consumer.chunk_us", "--only", "vector.fetch_us")
    result = run("calibrate", "--gpu", "few", "--store", measured, "--jobs", "1", *only)
    assert result.exit_code == 0, result.stderr
    assert "consumer.chunk_us, vector.fetch_us" in result.stdout
    found, stock = read_calibration("machine.json").machine, MACHINES["h200"]
    assert found.consumer.chunk_us != stock.consumer.chunk_us
    assert (found.copy_us, found.visibility_us) == (stock.copy_us, stock.visibility_us)


@pytest.mark.parametrize(
    ("options", "code", "fact"),
    [
        (("--gpu", "h200"), 2, "GPU 'h200' is not one of few"),
        (("--gpu", "few", "--campaign", "run"), 2, "no campaign 'run'; did you mean ran?"),
        (("--gpu", "few", "--held-back", "1"), 2, "is not in the range 0.1<=x<=0.9"),
        (("--gpu", "few", "--output", "nowhere/machine.json"), 2, "directory nowhere does not exist"),
        (("--gpu", "few", "--store", "other.db"), 5, "other.db"),
        (("--gpu", "few", "--only", "consumer.fp9_times"), 2, "'consumer.fp9_times' is not one of 'read_gbs',"),
        ((), 2, "missing option '--gpu'"),
    ],
)
def test_what_cannot_be_calibrated_is_one_line(
    options: tuple[str, ...], code: int, fact: str, measured: Path, run: Run
) -> None:
    result = run("calibrate", "--store", measured, *options)
    assert (result.exit_code, result.stdout) == (code, "")
    assert fact in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_too_few_configs_are_code_2(searched: Path, run: Run) -> None:
    result = run("calibrate", "--gpu", "l4", "--store", searched)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "has nothing measured on an l4" in result.stderr
    assert not Path("machine.json").exists()


def test_every_command_that_predicts_takes_a_machine(machine: Path, program: Path, shallow: str, run: Run) -> None:
    version = read_calibration(machine).predictor.version
    assert version != MODEL_VERSION
    for arguments, read in (
        (("simulate", program, "--orders", "0"), lambda document: document["prediction"]),
        (("lower", "--model", shallow, "--gpu", "l4", "--output", "p.json"), lambda document: document),
        (("search", "--model", shallow, "--gpu", "l4", "--measure", "predict", "--jobs", "1", "--trials", "1"),
         lambda document: {**document, **document["best"]}),
    ):  # fmt: skip
        stock = read(json.loads(run(*arguments, "--json").stdout))
        found = read(json.loads(run(*arguments, "--machine", machine, "--json").stdout))
        assert (stock["predictor"], found["predictor"]) == (MODEL_VERSION, version)
        name = "latency_us" if found.get("latency_us") else "predicted_us"
        added = 1000.0 - MACHINES["l4"].launch_us
        assert found[name] == pytest.approx(stock[name] + added)


def test_evaluate_predicts_with_a_machine_and_compares_with_its_own_kind(
    machine: Path, searched: Path, run: Run
) -> None:
    run("export", "--store", searched, "--format", "schedule", "--campaign", "small", "--output", "best.json")
    arguments = ("evaluate", "best.json", "--measure", "predict", "--store", searched, "--json")
    stock = json.loads(run(*arguments).stdout)
    found = json.loads(run(*arguments, "--machine", machine).stdout)
    assert found["predictor"] == read_calibration(machine).predictor.version
    assert found["predicted_us"] > stock["predicted_us"] + 900
    assert stock["incumbent"] is not None
    assert found["incumbent"] is None


SMALL = ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--jobs", "1", "--cold")


def test_calibrated_predictions_are_a_campaign_of_their_own(machine: Path, run: Run) -> None:
    stock = json.loads(run(*SMALL, "--trials", "2", "--json").stdout)
    found = run(*SMALL, "--trials", "2", "--machine", machine, "--json")
    calibrated = json.loads(found.stdout)
    version = read_calibration(machine).predictor.version
    assert f"predicted by the cost model (version {version})" in found.stderr
    assert calibrated["campaign"] == f"{stock['campaign']}-{version.partition('+')[2].replace(':', '')}"
    with open_store("flywheel.db", create=False) as store:
        rows = store.trials(calibrated["campaign"])
        campaign = store.campaign(calibrated["campaign"])
    assert {(row.predictor, row.source) for row in rows} == {(version, "seed")}  # none was answered
    assert json.loads(campaign.spec)["machine"] == str(machine)
    again = run(*SMALL, "--trials", "3", "--name", calibrated["campaign"])
    assert again.exit_code == 2
    assert f"was predicted by {version}, not {MODEL_VERSION}; --fresh or --name starts a new one" in again.stderr
    assert run(*SMALL, "--trials", "3", "--machine", machine).exit_code == 0
    shown = run("export", "--format", "schedule", "--campaign", calibrated["campaign"]).stdout
    assert f"--machine {machine}" in json.loads(shown)["provenance"]["search"]
    assert "--name" not in json.loads(shown)["provenance"]["search"]


@pytest.mark.parametrize("text", ["", "{}", '{"format": "flywheel-machine", "version": 1}'])
def test_a_bad_machine_is_one_line_and_leaves_no_store(text: str, program: Path, run: Run) -> None:
    Path("bad.json").write_text(text, encoding="utf-8")
    for arguments in (
        ("search", "--model", "smollm2-135m", "--gpu", "l4"),
        ("lower", "--model", "smollm2-135m", "--gpu", "l4"),
        ("simulate", program),
    ):
        result = run(*arguments, "--machine", "bad.json")
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("flywheel: bad.json: ")
        assert len(result.stderr.splitlines()) == 1
    assert not Path("flywheel.db").exists()


def test_a_machine_of_another_gpu_is_refused(machine: Path, run: Run) -> None:
    result = run("search", "--model", "smollm2-135m", "--gpu", "h100", "--machine", machine)
    assert result.exit_code == 2
    assert "calibrates GPU l4, not h100" in result.stderr
