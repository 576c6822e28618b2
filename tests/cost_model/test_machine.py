from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.cost_model import MACHINES, machine_for
from flywheel.cost_model.machine import MMA
from flywheel.ir import TARGETS

KIB = 1024


def test_every_built_in_gpu_has_constants_and_only_the_measured_one_says_so() -> None:
    assert MACHINES.keys() == TARGETS.keys()
    assert [name for name, machine in MACHINES.items() if machine.source == "measured"] == ["h200"]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_machine_reads_faster_than_its_datasheet(name: str) -> None:
    machine, target = MACHINES[name], TARGETS[name]
    assert 0.9 < machine.read_gbs / target.hbm_bandwidth_gbs < 0.97
    assert machine.num_sms == target.num_sms


def test_gpus_without_bulk_copies_read_a_smaller_share() -> None:
    shares = {
        name: MACHINES[name].read_gbs / TARGETS[name].hbm_bandwidth_gbs for name in ("a100", "l4", "h100", "b200")
    }
    assert shares["a100"] == shares["l4"] < shares["h100"] == shares["b200"]


def test_a_custom_target_is_scaled_from_its_own_numbers() -> None:
    custom = replace(TARGETS["h200"], name="mine", num_sms=66, hbm_bandwidth_gbs=2400.0, clock_ghz=0.0)
    machine = machine_for(custom)
    assert (machine.name, machine.source, machine.num_sms) == ("mine", "scaled", 66)
    assert machine.share == pytest.approx(MACHINES["h200"].share)


def test_a_target_that_only_borrows_a_name_is_scaled_too() -> None:
    halved = replace(TARGETS["h200"], hbm_bandwidth_gbs=2400.0)
    assert machine_for(halved).read_gbs == pytest.approx(MACHINES["h200"].read_gbs / 2)
    assert machine_for(TARGETS["h200"]) is MACHINES["h200"]


def test_copies_of_8_kib_hold_the_loader_to_what_was_measured() -> None:
    # 2810-2940 GB/s with 8 KiB copies while computing, the ceiling from 16 KiB on.
    machine = MACHINES["h200"]
    assert 2810 < machine.loader_rate(8 * KIB, 192 * KIB) * machine.num_sms / 1e3 < 2940
    assert machine.loader_rate(16 * KIB, 192 * KIB) > machine.share


def test_64_kib_in_flight_saturate_an_sm_and_32_kib_do_not() -> None:
    machine = MACHINES["h200"]
    assert machine.loader_rate(16 * KIB, 64 * KIB) == pytest.approx(machine.share, rel=0.01)
    assert machine.loader_rate(16 * KIB, 32 * KIB) == pytest.approx(machine.share / 2, rel=0.01)


def test_warps_trade_staging_against_barriers() -> None:
    assert MMA.task_us(8) < MMA.task_us(1)
    assert MMA.task_us(8) < MMA.task_us(31)
    assert MMA.rate(1) < MMA.rate(4) < MMA.rate(16) < MMA.bytes_per_us
