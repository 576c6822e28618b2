from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flywheel.errors import ConfigError
from flywheel.ir import TARGETS, MegakernelProgram, ScheduleConfig, kernel_variant, variant_of
from flywheel.ir.variant import MAX_STAGED_BYTES, RESERVED_BYTES, staged_bytes

H100 = TARGETS["h100"]


def test_the_ring_takes_what_staging_and_reserve_leave() -> None:
    variant = kernel_variant(ScheduleConfig(), H100, 16384)
    assert variant.smem_bytes == H100.smem_bytes_per_block_optin
    assert variant.ring_bytes + 16384 + RESERVED_BYTES <= variant.smem_bytes
    assert variant.ring_bytes + variant.chunk_bytes + 16384 + RESERVED_BYTES > variant.smem_bytes
    assert (variant.threads, variant.consumer_warps, variant.prefetch_depth) == (256, 7, 2)
    assert variant.sm_arch == 90


def test_a_config_names_its_chunk() -> None:
    config = ScheduleConfig(tiling={"stream": {"chunk_bytes": 8192}}, smem_bytes_per_block=65536)
    variant = kernel_variant(config, H100, 0)
    assert (variant.smem_bytes, variant.chunk_bytes, variant.ring_slots) == (65536, 8192, 7)


@pytest.mark.parametrize(
    ("config", "staged"),
    [
        (ScheduleConfig(smem_bytes_per_block=-1), 0),
        (ScheduleConfig(smem_bytes_per_block=H100.smem_bytes_per_block_optin + 1), 0),
        (ScheduleConfig(threads_per_block=0), 0),
        (ScheduleConfig(threads_per_block=32), 0),
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


def test_the_longest_vector_is_staged_whatever_the_ids_of_its_buffers(
    tiny: MegakernelProgram, with_task: Callable[..., MegakernelProgram]
) -> None:
    assert staged_bytes(tiny.tasks, tiny.buffers) == 32 * 2
    assert staged_bytes(tiny.tasks, list(reversed(tiny.buffers))) == 32 * 2
    deep = with_task(tiny, 102, params={"K": 10**6})
    assert staged_bytes(deep.tasks, deep.buffers) == MAX_STAGED_BYTES


def test_a_program_without_a_config_has_the_default_variant(tiny: MegakernelProgram) -> None:
    assert variant_of(replace(tiny, config=None)) == variant_of(replace(tiny, config=ScheduleConfig()))
    with pytest.raises(ConfigError, match="no target"):
        variant_of(replace(tiny, target=None))
