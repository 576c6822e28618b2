from __future__ import annotations

import pytest

from flywheel.ir import TARGETS
from flywheel.ir.target import DRIVER_NAMES


def test_the_registry_holds_the_gpus_that_the_project_promises() -> None:
    assert set(TARGETS) >= {"rtx5090", "b200", "h100", "h200", "a100", "l40s", "l4", "a10g", "rtx4090"}
    assert DRIVER_NAMES.keys() == TARGETS.keys()


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_target_is_plausible_and_cites_its_source(name: str) -> None:
    gpu = TARGETS[name]
    assert gpu.name == name
    assert gpu.note
    assert 0 < gpu.smem_bytes_per_block_optin < gpu.smem_bytes_per_sm <= 256 * 1024
    assert gpu.num_sms > 0
    assert gpu.sm_arch in {80, 86, 89, 90, 100, 120}
    assert gpu.max_threads_per_sm in {1536, 2048}
    assert gpu.hbm_bandwidth_gbs > 0


def test_the_floor_is_bytes_over_bandwidth() -> None:
    assert TARGETS["h100"].bandwidth_bound_us(3_350_000) == pytest.approx(1.0)
    assert TARGETS["h100"].bandwidth_bound_us(0) == 0.0


def test_only_chips_of_laptops_are_under_a_display_driver() -> None:
    assert [gpu.name for gpu in TARGETS.values() if gpu.wddm_tdr] == ["rtx4090-laptop", "rtx5090-laptop"]


def test_a_name_without_a_suffix_is_the_sxm_board_or_the_desktop_card() -> None:
    boards = {name: (TARGETS[name].num_sms, TARGETS[name].hbm_bandwidth_gbs) for name in ("a100", "h100", "h200")}
    assert boards == {"a100": (108, 2039.0), "h100": (132, 3350.0), "h200": (132, 4800.0)}
    assert (TARGETS["rtx5090"].num_sms, TARGETS["rtx5090"].hbm_bandwidth_gbs) == (170, 1792.0)
    assert (TARGETS["rtx5090-laptop"].num_sms, TARGETS["rtx5090-laptop"].hbm_bandwidth_gbs) == (82, 896.0)
