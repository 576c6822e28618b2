"""The probe of a link on emulated GPUs: stores to the other GPU land late and in any order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from emulator.linked import COPY_US, LinkedGpu, build_probes

from flywheel.errors import NoGpuError
from flywheel.vm.gpu import driver, link_probes
from flywheel.vm.gpu.link_probes import probe_link, probe_links

Machine = Callable[..., list[LinkedGpu]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> object:
    return build_probes(Path(tmp_path_factory.mktemp("probes")))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, library: object) -> Machine:
    """GPUs of this machine, on which probes are emulated."""

    def make(*names: str, seed: int = 1) -> list[LinkedGpu]:
        waiting: list[object] = []
        calls: list[str] = []
        gpus = [
            LinkedGpu(name=name, index=index, pci_bus_id=f"0000:0{index}:00.0", seed=seed, total_bytes=1 << 16)
            for index, name in enumerate(names)
        ]
        for gpu in gpus:
            gpu.waiting, gpu.calls = waiting, calls  # type: ignore[assignment]
        monkeypatch.setattr(link_probes, "compile_unit", lambda *_: library)
        monkeypatch.setattr(link_probes, "count_gpus", lambda: len(names))
        monkeypatch.setattr(driver, "open_gpu", lambda index: gpus[index])
        monkeypatch.setattr(link_probes, "_SAMPLES", 2)
        monkeypatch.setattr(link_probes.probe_link, "__defaults__", (4, 1 << 22))
        return gpus

    return make


@pytest.mark.parametrize("seed", range(6))
def test_data_goes_to_and_fro_between_two_gpus_and_between_two_sms(machine: Machine, seed: int) -> None:
    one, other = machine("H200", "H200", seed=seed)
    found = probe_link(one, other, rounds=6)  # type: ignore[arg-type]
    assert found.peer == 1
    assert found.one_way_us > 0
    assert found.same_gpu_us > 0
    nbytes = (1 << 16) // 4
    assert found.to_gbs == found.from_gbs == pytest.approx(8 * nbytes / COPY_US / 1e3)
    assert not one._held
    assert not other._held


def test_both_kernels_are_launched_without_a_wait_in_between_and_have_run_once_before(machine: Machine) -> None:
    one, other = machine("H200", "H200")
    probe_link(one, other, rounds=5)  # type: ignore[arg-type]
    launches = [(place, call) for place, call in enumerate(one.calls) if call.startswith("launch")]
    assert [call for _, call in launches[:2]] == ["launch 0 0", "launch 1 0"]
    assert "launch 0 5" in one.calls
    for place, call in enumerate(one.calls):
        if call == "launch 1 5":
            assert one.calls[place - 1] == "launch 0 5"


@pytest.mark.parametrize("seed", [0, 1])
def test_a_gpu_that_never_answers_ends_the_probe_in_one_line(machine: Machine, seed: int) -> None:
    one, other = machine("H200", "H200", seed=seed)
    other.absent = True
    with pytest.raises(NoGpuError) as caught:
        probe_link(one, other, rounds=10, most_polls=300)  # type: ignore[arg-type]
    assert str(caught.value) == "GPU 0 and GPU 1: no answer after 0 of 10 rounds of 300 polls"
    assert not one._held


def test_each_pair_with_a_link_is_measured_and_each_other_one_is_one_line(machine: Machine) -> None:
    gpus = machine("H200", "H200", "L4", "H200")
    gpus[3].cut = True
    lines: list[str] = []
    found = list(probe_links(gpus[0], lines.append))  # type: ignore[arg-type]
    assert [each.peer for each in found] == [1]
    assert lines == [
        "GPU 2 is L4 with 4 SMs, GPU 0 H200 with 4 SMs: ranks need GPUs of one kind",
        "GPU 0 (0000:00:00.0) and GPU 3 (0000:03:00.0) have no access to each other's memory: programs of several "
        "ranks need it",
    ]
    assert (gpus[0].joined, gpus[1].joined, gpus[3].joined) == ([1], [0], [])


def test_a_machine_with_one_gpu_has_no_link(machine: Machine) -> None:
    (only,) = machine("H200")
    assert list(probe_links(only, lambda _: None)) == []  # type: ignore[arg-type]
    assert only.calls == []
