"""The commands on a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from flywheel.errors import NoGpuError
from flywheel.ir import TARGETS
from flywheel.measure.device import Device
from flywheel.search.trials.device import target_here
from flywheel.store.sql import open_store

Run = Callable[..., Result]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> str:
    """The name of the target that this machine's GPU is; skips without one."""
    from flywheel.decode.cuda import prepare_torch
    from flywheel.vm.gpu.driver import open_gpu

    try:
        prepare_torch()
        gpu = open_gpu()
    except NoGpuError as error:
        pytest.skip(str(error))
    return target_here(Device(gpu.name, gpu.num_sms, gpu.total_bytes)).name


@pytest.mark.usefixtures("gpu")
def test_a_gpu_generates_what_the_reference_vm_does(run: Run, checkpoint: Path) -> None:
    arguments = ("generate", "--model", checkpoint, "--prompt", "Hello, you", "--max-tokens", 32, "--verify", "--json")
    here = json.loads(run(*arguments).stdout)
    result = run(*arguments, "--device", "cuda")
    assert result.exit_code == 0, result.stderr
    there = json.loads(result.stdout)
    assert there["token_ids"] == here["token_ids"]
    assert (there["device"], there["verified"], there["ties"]) == ("cuda", True, [])


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_gpu_computes_the_right_logits(dtype: str, run: Run, checkpoint: Path) -> None:
    Path("config.json").write_text("{}", encoding="utf-8")
    arguments = ("verify", "--config", "config.json", "--model", checkpoint, "--dtype", dtype)
    result = run(*arguments, "--device", "cuda", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["passed"] is True
    refused = run(*arguments, "--device", "cuda", "--order", "queues")
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)


def test_a_search_measures_and_says_where(gpu: str, run: Run) -> None:
    arguments = ("search", "--model", "smollm2-135m", "--gpu", gpu, "--context", 64, "--measure", "cuda")
    result = run(*arguments, "--trials", 3, "--name", "m", "--json")
    assert result.exit_code == 0, result.stderr
    assert any(line.startswith("Latencies are measured on ") for line in result.stderr.splitlines())
    document = json.loads(result.stdout)
    assert (document["measure"], document["predicted"], document["trials"]) == ("cuda", False, 3)
    assert document["best"]["latency_us"] > document["best"]["floor_us"]
    with open_store("flywheel.db", create=False) as store:
        rows = store.trials("m")
    measured = [row for row in rows if row.outcome == "measured"]
    assert measured
    for row in measured:
        assert row.gpu_name
        assert row.gpu_driver
        assert row.nvrtc
        assert row.kernels
        assert row.samples is not None
        assert row.samples >= 1  # one where it was cut
        if row.source != "store":  # nothing was measured for those
            assert row.measure_s is not None
            assert 0 < row.measure_s < 60


def test_doctor_measures_the_gpu_and_remembers(gpu: str, run: Run) -> None:
    assert run("doctor", "--probe").exit_code == 0
    ceiling = json.loads(run("doctor", "--json").stdout)["store"]["ceiling"]
    assert 0.6 < ceiling["read_gbs"] / TARGETS[gpu].hbm_bandwidth_gbs < 1.05
    assert 0.1 < ceiling["hand_off_us"] < 10


def test_one_schedule_is_measured_against_the_best_that_was(gpu: str, run: Run) -> None:
    work = ("--model", "smollm2-135m", "--gpu", gpu, "--context", 64, "--measure", "cuda")
    assert run("search", *work, "--trials", 2, "--name", "m").exit_code == 0
    Path("best.json").write_text(run("export", "--format", "schedule", "--campaign", "m").stdout, encoding="utf-8")
    result = run("evaluate", "best.json", "--measure", "cuda", "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert (document["outcome"], document["predicted_us"], document["changed"]) == ("measured", None, {})
    assert document["latency_us"] > document["floor_us"]
    incumbent = document["incumbent"]
    assert incumbent["latency_us"] > 0
    assert incumbent["speedup"] == incumbent["rival_us"] / document["latency_us"]
    assert incumbent["gain_low_us"] <= incumbent["gain_high_us"]
