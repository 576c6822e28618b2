from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.cost_model import MACHINES, machine_for
from flywheel.cost_model.machine import VM
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.plan import KernelVariant, kernel_variant

KIB = 1024


def test_every_built_in_gpu_has_constants_and_only_the_measured_one_says_so() -> None:
    assert MACHINES.keys() == TARGETS.keys()
    assert [name for name, machine in MACHINES.items() if machine.source == "measured"] == ["h200"]


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_no_machine_reads_faster_than_its_datasheet(name: str) -> None:
    machine, target = MACHINES[name], TARGETS[name]
    assert 0.8 < machine.read_gbs / target.hbm_bandwidth_gbs < 0.97
    assert machine.num_sms == target.num_sms


def test_gpus_without_bulk_copies_read_a_smaller_share() -> None:
    shares = {
        name: MACHINES[name].read_gbs / TARGETS[name].hbm_bandwidth_gbs for name in ("a100", "l4", "h100", "b200")
    }
    assert shares["a100"] == pytest.approx(shares["l4"])
    assert shares["h100"] == pytest.approx(shares["b200"])
    assert shares["a100"] < 0.97 * shares["h100"]


def test_a_custom_target_is_scaled_from_its_own_numbers() -> None:
    custom = replace(TARGETS["h200"], name="mine", num_sms=66, hbm_bandwidth_gbs=2400.0, clock_ghz=0.0)
    machine = machine_for(custom)
    assert (machine.name, machine.source, machine.num_sms) == ("mine", "scaled", 66)
    assert machine.share == pytest.approx(MACHINES["h200"].share)


def test_a_target_that_only_borrows_a_name_is_scaled_too() -> None:
    halved = replace(TARGETS["h200"], hbm_bandwidth_gbs=2400.0)
    assert machine_for(halved).read_gbs == pytest.approx(MACHINES["h200"].read_gbs / 2)
    assert machine_for(TARGETS["h200"]) is MACHINES["h200"]


def variant(matrix: int = 4, chunk: int = 1, **stream: int) -> KernelVariant:
    config = ScheduleConfig(
        tiling={"stream": stream, "warps": {"matrix": matrix, "chunk": chunk}}, threads_per_block=448
    )
    return kernel_variant(config, TARGETS["h200"], 0)


def test_copies_that_are_issued_together_make_up_for_their_size() -> None:
    # Measured: one 8 KiB copy at a time reads llama3-8b in 8170 us, two in 4541, four in about 4000.
    machine = MACHINES["h200"]
    rates = [machine.loader_rate(variant(chunk_bytes=8 * KIB, copies=copies)) for copies in (1, 2, 4)]
    assert rates[0] < 0.6 * machine.share < rates[1] < machine.share < rates[2]


def test_bytes_under_way_limit_a_loader_by_whole_rounds_of_copies() -> None:
    machine = MACHINES["h200"]
    rate = {
        (copies, inflight): machine.loader_rate(
            variant(chunk_bytes=16 * KIB, copies=copies, inflight_bytes=inflight * KIB)
        )
        for copies, inflight in ((4, 64), (4, 96), (2, 64), (2, 96), (1, 16), (1, 32))
    }
    assert rate[4, 64] == rate[4, 96] < rate[2, 64] < rate[2, 96]
    assert rate[1, 16] < 0.5 * machine.share


def test_chunks_go_to_groups_of_warps_in_turn() -> None:
    four, shared, two = variant(), variant(chunk=2), variant(matrix=2)
    times = [VM.chunks_us(count * 16 * KIB, variant(chunk_bytes=16 * KIB)) for count in (1, 4, 5, 8)]
    assert times[1] - times[0] == pytest.approx(3 * 16 * KIB / VM.bytes_per_us)
    assert times[2] - times[1] > VM.chunk_us
    assert times[3] == pytest.approx(2 * times[1])
    assert VM.chunks_us(0, four) == 0.0
    assert VM.chunks_us(1 << 20, four) < VM.chunks_us(1 << 20, shared)
    assert VM.chunks_us(1 << 20, four) < VM.chunks_us(1 << 20, two)


def test_warps_take_their_formats_times_as_long_and_more_of_them_shorten_it() -> None:
    block, count = variant(), 1 << 20
    plain = replace(VM, chunk_us=0.0)
    shared_us = count / plain.bytes_per_us
    own_us = plain.chunks_us(count, block) - shared_us
    for codes, times in ((DType.F8E4M3, VM.fp8_times), (DType.I8, VM.int8_times), (DType.I4, VM.int4_times)):
        assert plain.chunks_us(count, block, (codes,)) == pytest.approx(shared_us + times * own_us)
        assert plain.chunks_us(count, variant(matrix=2), (codes,)) > plain.chunks_us(count, block, (codes,))
    both = plain.chunks_us(count, block, (DType.I8, DType.I4))
    assert both == max(plain.chunks_us(count, block, (each,)) for each in (DType.I8, DType.I4))
