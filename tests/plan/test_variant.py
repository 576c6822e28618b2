from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, MegakernelProgram, ScheduleConfig
from flywheel.plan import kernel_variant, variant_of
from flywheel.plan.variant import RESERVED_BYTES

H100 = TARGETS["h100"]


def test_the_ring_takes_what_staging_and_reserve_leave() -> None:
    variant = kernel_variant(ScheduleConfig(), H100, 16384)
    assert variant.smem_bytes == H100.smem_bytes_per_block_optin
    ring_bytes = variant.chunk_bytes * variant.ring_slots
    assert ring_bytes + 16384 + RESERVED_BYTES <= variant.smem_bytes
    assert ring_bytes + variant.chunk_bytes + 16384 + RESERVED_BYTES > variant.smem_bytes
    assert (variant.threads, variant.matrix_warps, variant.vector_warps, variant.prefetch_depth) == (256, 3, 3, 2)
    assert variant.sm_arch == 90


def test_a_config_names_its_chunk() -> None:
    config = ScheduleConfig(tiling={"stream": {"chunk_bytes": 8192}}, smem_bytes_per_block=65536)
    variant = kernel_variant(config, H100, 0)
    assert (variant.smem_bytes, variant.chunk_bytes, variant.ring_slots) == (65536, 8192, 4)


@pytest.mark.parametrize(("warps", "matrix", "vector"), [(4, 1, 1), (5, 2, 1), (6, 2, 2), (10, 4, 4), (32, 15, 15)])
def test_a_loader_and_a_control_warp_leave_the_rest_to_matrix_and_vector_warps(
    warps: int, matrix: int, vector: int
) -> None:
    variant = kernel_variant(ScheduleConfig(threads_per_block=32 * warps), H100, 0)
    assert (variant.matrix_warps, variant.vector_warps) == (matrix, vector)


@pytest.mark.parametrize(
    ("config", "staged"),
    [
        (ScheduleConfig(smem_bytes_per_block=-1), 0),
        (ScheduleConfig(smem_bytes_per_block=H100.smem_bytes_per_block_optin + 1), 0),
        (ScheduleConfig(threads_per_block=0), 0),
        (ScheduleConfig(threads_per_block=32), 0),
        (ScheduleConfig(threads_per_block=96), 0),
        (ScheduleConfig(threads_per_block=100), 0),
        (ScheduleConfig(threads_per_block=2048), 0),
        (ScheduleConfig(pipelining_depth=-1), 0),
        (ScheduleConfig(pipelining_depth=1025), 0),
        (ScheduleConfig(tiling={"stream": {"chunk_bytes": 0}}), 0),
        (ScheduleConfig(tiling={"stream": {"chunk_bytes": 1000}}), 0),
        (ScheduleConfig(tiling={"stream": {"chunk_bytes": 262144}}), 0),
        (ScheduleConfig(smem_bytes_per_block=16384), 8192),
    ],
)
def test_a_broken_bound_is_a_config_error(config: ScheduleConfig, staged: int) -> None:
    with pytest.raises(ConfigError) as caught:
        kernel_variant(config, H100, staged)
    assert len(str(caught.value).splitlines()) == 1


def test_a_config_of_before_may_say_that_loaders_never_pause_and_one_that_has_them_pause_is_refused_by_a_line() -> None:
    never, paused = (ScheduleConfig(tiling={"stream": {"pause_cycles": cycles}}) for cycles in (0, 3000))
    assert kernel_variant(never, H100, 0) == kernel_variant(ScheduleConfig(), H100, 0)
    with pytest.raises(ConfigError) as caught:
        kernel_variant(paused, H100, 0)
    assert str(caught.value) == "tiling.stream.pause_cycles=3000: no loader pauses since 2026-11-28; leave it out"


def test_a_program_without_a_config_has_the_default_variant(tiny: MegakernelProgram) -> None:
    assert variant_of(replace(tiny, config=None)) == variant_of(replace(tiny, config=ScheduleConfig()))
    with pytest.raises(ConfigError, match="no target"):
        variant_of(replace(tiny, target=None))


def test_warps_that_multiply_may_share_chunks_as_far_as_there_are_some() -> None:
    target = TARGETS["h200"]

    def sharing(warps: dict[str, int]) -> int:
        return kernel_variant(ScheduleConfig(tiling={"warps": warps}, threads_per_block=448), target, 0).chunk_warps

    assert [sharing({}), sharing({"matrix": 4, "chunk": 4}), sharing({"matrix": 3, "chunk": 2})] == [1, 4, 2]
    for chunk in (0, -1, 5):
        with pytest.raises(ConfigError, match=f"tiling.warps.chunk={chunk} is not in 1..4"):
            sharing({"matrix": 4, "chunk": chunk})
