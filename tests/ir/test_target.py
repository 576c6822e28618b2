from __future__ import annotations

import pytest

from flywheel.ir import TARGETS


def test_the_registry_holds_the_gpus_that_the_project_promises() -> None:
    assert set(TARGETS) == {"rtx5090", "b200", "h100", "h200", "a100", "l40s", "l4", "a10g", "rtx4090"}


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


def test_only_the_watched_gpu_is_under_a_display_driver() -> None:
    assert [gpu.name for gpu in TARGETS.values() if gpu.wddm_tdr] == ["rtx5090"]
    assert TARGETS["rtx5090"].num_sms == 82
