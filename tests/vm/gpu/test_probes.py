from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.errors import NoGpuError
from flywheel.measure.device import Device, target_of
from flywheel.plan.kernels import ARCHITECTURES
from flywheel.vm.gpu.driver import open_gpu, open_gpus
from flywheel.vm.gpu.link_probes import probe_link
from flywheel.vm.gpu.nvrtc import compile_unit
from flywheel.vm.gpu.probes import probe


@pytest.mark.parametrize("arch", ARCHITECTURES.values())
def test_the_probes_compile_without_spills_everywhere(arch: str, kernel_cache: Path) -> None:
    unit = compile_unit("probes.cu", arch, {}, kernel_cache)
    assert set(unit.entries) == {"read_loads", "read_ring", "hand_off", "pass_data"}
    for usage in unit.entries.values():
        assert usage.spill_bytes == usage.stack_bytes == 0
        assert usage.registers <= 64  # 1024 threads, twice an SM where it has room for them


@pytest.mark.gpu
def test_a_gpu_reads_near_its_datasheet_and_hands_over_in_about_a_microsecond() -> None:
    try:
        gpu = open_gpu()
    except NoGpuError as error:
        pytest.skip(str(error))
    found = probe(gpu)
    target = target_of(Device(gpu.name, gpu.num_sms, gpu.total_bytes))
    if target is not None:
        assert 0.6 < found.read_gbs / target.hbm_bandwidth_gbs < 1.05
    assert 0.1 < found.hand_off_us < 10


@pytest.mark.gpu
def test_data_takes_longer_to_another_gpu_than_to_another_sm_and_copies_go_both_ways() -> None:
    try:
        gpus = open_gpus(2)
    except NoGpuError as error:
        pytest.skip(str(error))
    found = probe_link(*gpus)
    assert 0.1 < found.same_gpu_us < found.one_way_us < 20
    assert 0.8 < found.to_gbs / found.from_gbs < 1.25
    assert found.to_gbs > 5
