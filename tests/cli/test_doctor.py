from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import Result

from flywheel.cli.doctor import DEPENDENCIES, EXTRAS
from flywheel.errors import NoGpuError
from flywheel.measure.ceiling import Ceiling, PeerLink
from flywheel.measure.device import Device
from flywheel.measure.environment import capture_environment
from flywheel.measure.tenants import GpuPresence, Tenant
from flywheel.store.sql import open_store
from flywheel.vm.gpu.link_probes import ProbedLink
from flywheel.vm.gpu.probes import Probed

Run = Callable[..., Result]
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_-]", requirement)[0] for requirement in requirements}


def test_doctor_knows_the_project_s_dependencies_and_extras() -> None:
    assert set(DEPENDENCIES) == names(PROJECT["dependencies"])
    extras = {extra: names(required) for extra, required in PROJECT["optional-dependencies"].items() if extra != "dev"}
    assert {extra: set(modules) for extra, modules in EXTRAS.items()} == extras


def test_doctor_finds_a_store_without_creating_one(run: Run, searched: Path) -> None:
    missing = json.loads(run("doctor", "--json").stdout)["store"]
    assert (missing["exists"], missing["writable"], missing["problem"]) == (False, True, None)
    assert not Path("flywheel.db").exists()
    found = json.loads(run("doctor", "--store", str(searched), "--json").stdout)["store"]
    assert (found["exists"], found["campaigns"], found["trials"]) == (True, 1, 5)
    assert found["schema_version"]


def test_doctor_exits_0_and_reports_a_store_in_trouble(run: Run) -> None:
    result = run("doctor", "--store", "nowhere/trials.db")
    assert result.exit_code == 0
    assert "PROBLEM" in result.stdout
    assert run("doctor", "--store", "mysql://x/y").exit_code == 0


def test_doctor_says_honestly_that_latencies_are_predicted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, None)
    assert "predicted" in run("doctor").stdout


def test_doctor_shows_what_was_measured_of_this_gpu_and_of_no_other(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def ceiling(gpu: str, read_gbs: float) -> Ceiling:
        return Ceiling(gpu, "1", "lab", read_gbs, "ring of 6 x 32 KiB an SM", 1.25, "2026-01-02T03:04:05+00:00")

    pretend(monkeypatch, "NVIDIA H200")
    store = str(tmp_path / "trials.db")
    assert "doctor --probe" in run("doctor", "--store", store).stdout
    with open_store(store) as opened:
        for found in (ceiling("NVIDIA H200", 4000.0), ceiling("NVIDIA H200", 4608.0), ceiling("NVIDIA L4", 280.0)):
            opened.append_ceiling(found)
    assert json.loads(run("doctor", "--store", store, "--json").stdout)["store"]["ceiling"]["read_gbs"] == 4608.0
    shown = run("doctor", "--store", store).stdout
    assert "reads 4,608 GB/s (96.0 % of the datasheet's) with ring of 6 x 32 KiB an SM" in shown
    assert "a hand-off takes 1.25 us" in shown


def test_doctor_shows_a_line_for_each_pair_of_gpus_that_was_probed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend(monkeypatch, "NVIDIA H200")
    store = str(tmp_path / "trials.db")
    link = PeerLink("NVIDIA H200", "1", "lab", 1, 0.94, 0.48, 396.0, 395.0, "2026-01-02T03:04:05+00:00")
    with open_store(store) as opened:
        for each in (link, replace(link, peer=2, one_way_us=1.31)):
            opened.append_link(each)
    lines = [line for line in run("doctor", "--store", store).stdout.splitlines() if line.startswith("link")]
    assert [" ".join(line.split()) for line in lines] == [
        f"link GPU 0 and GPU {peer}: 512 bytes take {us} us to the other GPU, polled, and 0.48 us to another SM; "
        "copies 396 GB/s there and 395 back at once"
        for peer, us in ((1, 0.94), (2, 1.31))
    ]
    found = json.loads(run("doctor", "--store", store, "--json").stdout)["store"]["links"]
    assert [each["peer"] for each in found] == [1, 2]


def test_a_probe_measures_links_too_and_says_which_pair_has_none(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def probe_links(gpu: object, watch: Callable[[str], None]) -> list[ProbedLink]:
        watch("GPU 0 (a) and GPU 2 (b) have no access to each other's memory: programs of several ranks need it")
        return [ProbedLink(1, 0.94, 0.48, 396.0, 395.0)]

    pretend(monkeypatch, "NVIDIA H200")
    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", lambda: SimpleNamespace(name="NVIDIA H200"))
    monkeypatch.setattr("flywheel.vm.gpu.probes.probe", lambda _: Probed(4600.0, "ring", 0.6))
    monkeypatch.setattr("flywheel.vm.gpu.link_probes.probe_links", probe_links)
    result = run("doctor", "--probe", "--store", str(tmp_path / "trials.db"))
    assert result.exit_code == 0
    assert "GPU 0 and GPU 1: 512 bytes take 0.94 us" in result.stdout
    assert "flywheel: GPU 0 (a) and GPU 2 (b) have no access to each other's memory" in result.stderr


def test_probing_without_a_gpu_is_code_4_and_leaves_no_store(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise NoGpuError("GPU 0: no driver")

    monkeypatch.setattr("flywheel.vm.gpu.driver.open_gpu", absent)
    result = run("doctor", "--probe")
    assert (result.exit_code, result.stdout, result.stderr) == (4, "", "flywheel: GPU 0: no driver\n")
    assert not Path("flywheel.db").exists()


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: str | None) -> None:
    """This machine has the GPU of that name, or none."""
    environment = replace(capture_environment(), gpu=gpu, driver=None if gpu is None else "1")
    monkeypatch.setattr("flywheel.measure.environment.capture_environment", lambda: environment)


def test_doctor_shows_who_is_on_each_gpu_and_what_it_does(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = GpuPresence(
        (Tenant(4711, "train", 77_000, 90), Tenant(12)), 2, False, 91, 1_000, 80_000, 1980, 2619, "hw_thermal"
    )
    told = {"GPU-1": busy, "GPU-2": GpuPresence((), 0, throttle="none"), "GPU-3": GpuPresence()}
    monkeypatch.setattr(
        "flywheel.measure.environment.list_gpus", lambda: [(gpu, Device("NVIDIA H100")) for gpu in told]
    )
    monkeypatch.setattr("flywheel.vm.gpu.nvml.read_presence", lambda gpu, at_work: told[gpu])
    lines = [line.split(maxsplit=2)[2] for line in run("doctor").stdout.splitlines() if line.startswith("on it")]
    assert lines == [
        "NVIDIA H100: pid 4711 (train, 77,000 bytes, 90 % busy), pid 12; 1,000 of 80,000 bytes free; 91 % busy; clocks "
        "1980 and 2619 MHz; held down by hw_thermal",
        "NVIDIA H100: no process that the driver lists",
        "NVIDIA H100: the driver does not tell who",
    ]
    first, second, third = json.loads(run("doctor", "--json").stdout)["presence"]
    assert first == {
        "gpu": "GPU-1", "name": "NVIDIA H100", "utilisation_percent": 91, "free_bytes": 1000, "total_bytes": 80000,
        "sm_clock_mhz": 1980, "mem_clock_mhz": 2619, "throttle": "hw_thermal",
        "processes": [
            {"pid": 4711, "name": "train", "nbytes": 77000, "busy_percent": 90},
            {"pid": 12, "name": None, "nbytes": None, "busy_percent": None},
        ],
    }  # fmt: skip
    assert (second["processes"], third["processes"]) == ([], None)
