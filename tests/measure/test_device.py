from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.ir import TARGETS
from flywheel.measure.device import Device, generic_name, is_target, target_of
from flywheel.vm.gpu.devices import generic_target

MIB = 2**20

CARDS = [  # name, SMs and MiB as drivers tell them
    ("NVIDIA A100-SXM4-80GB", 108, 81920, "a100"),
    ("NVIDIA A100-SXM4-40GB", 108, 40960, "a100-40gb"),
    ("A100-SXM4-40GB", 108, 40536, "a100-40gb"),
    ("NVIDIA A100 80GB PCIe", 108, 81920, "a100-pcie"),
    ("NVIDIA A100-PCIE-40GB", 108, 40960, "a100-pcie-40gb"),
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42, 40192, None),
    ("NVIDIA H100 80GB HBM3", 132, 81559, "h100"),
    ("NVIDIA H100 80GB HBM3", 114, 81559, None),
    ("NVIDIA H100 80GB HBM3", 132, 40000, None),
    ("NVIDIA H100 PCIe", 114, 81559, "h100-pcie"),
    ("NVIDIA H100 PCIe", 132, 81559, None),
    ("NVIDIA H100 NVL", 132, 95830, "h100-nvl"),
    ("NVIDIA H200", 132, 143771, "h200"),
    ("NVIDIA H200 NVL", 132, 143771, "h200-nvl"),
    ("NVIDIA GH200 480GB", 132, 97871, "gh200"),
    ("NVIDIA GH200 144G HBM3e", 132, 147456, "gh200-144gb"),
    ("NVIDIA B200", 148, 183359, "b200"),
    ("NVIDIA GB200", 152, 189471, None),
    ("NVIDIA A10G", 80, 23028, "a10g"),
    ("NVIDIA A10", 72, 23028, "a10"),
    ("NVIDIA L4", 58, 23034, "l4"),
    ("NVIDIA L40", 142, 46068, "l40"),
    ("NVIDIA L40S", 142, 46068, "l40s"),
    ("NVIDIA GeForce RTX 4090", 128, 24564, "rtx4090"),
    ("NVIDIA GeForce RTX 4090 D", 114, 24564, "rtx4090-d"),
    ("NVIDIA GeForce RTX 4090 D", 114, 49140, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 76, 16376, "rtx4090-laptop"),
    ("NVIDIA GeForce RTX 5090", 170, 32607, "rtx5090"),
    ("NVIDIA GeForce RTX 5090", 82, 24463, None),
    ("NVIDIA GeForce RTX 5090 D", 170, 32607, "rtx5090-d"),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", 82, 24463, "rtx5090-laptop"),
    ("Quadro RTX 4000", 36, 8192, None),
    ("Tesla T4", 40, 15360, None),
]


@pytest.mark.parametrize(("name", "sms", "mebibytes", "target"), CARDS)
def test_a_card_is_a_target_only_if_name_sms_and_memory_agree(
    name: str, sms: int, mebibytes: int, target: str | None
) -> None:
    device = Device(name, sms, mebibytes * MIB)
    found = target_of(device)
    assert (None if found is None else found.name) == target
    assert [each.name for each in TARGETS.values() if is_target(device, each)] == ([] if target is None else [target])


def test_what_nobody_asked_decides_nothing() -> None:
    assert target_of(Device("NVIDIA H100 PCIe")) == TARGETS["h100-pcie"]
    assert target_of(Device("NVIDIA H100 PCIe", None, 81559 * MIB)) == TARGETS["h100-pcie"]
    assert target_of(Device("NVIDIA H100 PCIe", 132)) is None
    assert str(Device("NVIDIA H100 PCIe", 132, 85_520_809_984)) == "NVIDIA H100 PCIe (132 SMs, 85.5 GB)"
    assert str(Device("NVIDIA H100 PCIe")) == "NVIDIA H100 PCIe"


T4 = {
    "major": 7, "minor": 5, "num_sms": 40, "smem_bytes_per_sm": 65536, "smem_bytes_per_block_optin": 65536,
    "regs_per_sm": 65536, "max_threads_per_sm": 1024, "l2_bytes": 4 * MIB, "bus_bits": 256, "memory_khz": 5_001_000,
    "clock_khz": 1_590_000, "cooperative": 1,
}  # fmt: skip


def test_a_card_without_a_datasheet_gets_a_record_of_what_its_driver_says_marked_so() -> None:
    target = generic_target("Tesla T4", 15360 * MIB, T4)
    assert target.name == "generic-tesla-t4-40sm-15gib"
    assert target.note.startswith("no datasheet: what the driver says of Tesla T4, 256 bits at 5,001 MHz")
    assert (target.sm_arch, target.num_sms, target.clock_ghz) == (75, 40, 1.59)
    assert target.hbm_bandwidth_gbs == pytest.approx(320.064)
    here = Device("Tesla T4", 40, 15360 * MIB)
    assert is_target(here, target)
    assert is_target(Device("Tesla T4"), target)
    assert not is_target(replace(here, num_sms=20), target)
    assert not is_target(replace(here, total_bytes=8192 * MIB), target)
    assert not is_target(Device("NVIDIA H200", 132, 143771 * MIB), target)
    assert generic_name(replace(here, num_sms=20)) != target.name


@pytest.mark.parametrize(
    ("name", "bits", "khz"),
    [("h100", 5120, 2_619_000), ("a100", 5120, 1_593_000), ("a100-40gb", 5120, 1_215_000), ("rtx4090", 384, 10_501_000),
     ("rtx5090", 512, 14_001_000)],
)  # fmt: skip
def test_twice_the_clock_times_the_bus_is_the_datasheets_bandwidth(name: str, bits: int, khz: int) -> None:
    facts = {**T4, "bus_bits": bits, "memory_khz": khz}
    assert generic_target(name, 2**34, facts).hbm_bandwidth_gbs == pytest.approx(
        TARGETS[name].hbm_bandwidth_gbs, rel=2e-3
    )
