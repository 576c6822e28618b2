from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.ir import MegakernelProgram, ScheduleConfig
from flywheel.lowering.tiling import even_rows, read_tiling
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec

Lowered = Callable[..., MegakernelProgram]


@given(st.integers(1, 10**6), st.integers(1, 1000))
def test_even_rows_are_the_fewest_whole_fragments_that_cover(n_out: int, parts: int) -> None:
    rows = even_rows(n_out, parts)
    assert rows % 16 == 0
    assert parts * rows >= n_out
    assert parts * (rows - 16) < n_out


def test_a_projections_own_size_beats_the_archetypes_which_beats_the_default(spec: DecoderSpec) -> None:
    config = ScheduleConfig(tiling={"gemv": {"N_tile": 48}, "gemv.q_proj": {"N_tile": 16}})
    graph = decode_step(spec, 8)
    tiling = read_tiling(config, graph, 6)
    assert [tiling.rows(name, 160) for name in ("q_proj", "k_proj")] == [16, 48]
    assert read_tiling(ScheduleConfig(), graph, 6).rows("q_proj", 160) == 32


def test_the_last_tile_takes_what_is_left(lowered: Lowered, spec: DecoderSpec) -> None:
    program = lowered(spec=replace(spec, vocab=100), tiling={"gemv": {"N_tile": 48}})
    tiles = [(task.params["n_off"], task.params["N_tile"]) for task in program.tasks if task.label == "lm_head"]
    assert tiles == [(0, 48), (48, 48), (96, 4)]


def test_a_tile_is_no_taller_than_its_projection(lowered: Lowered) -> None:
    program = lowered(tiling={"gemv": {"N_tile": 16384}})
    tiles = [task for task in program.tasks if task.label == "L0.gate_proj"]
    assert [task.params["N_tile"] for task in tiles] == [160]


@pytest.mark.parametrize(
    ("kv_block", "context", "windows"),
    [
        (16, 40, [(0, 16), (16, 16), (32, 8)]),
        (48, 40, [(0, 40)]),
        (32, 64, [(0, 32), (32, 32)]),
        (16, 1, [(0, 1)]),
    ],
)
def test_kv_blocks_end_with_the_context(
    kv_block: int, context: int, windows: list[tuple[int, int]], lowered: Lowered, spec: DecoderSpec
) -> None:
    program = lowered(context=context, tiling={"attention": {"kv_block": kv_block}})
    found = [(t.params["kv_start"], t.params["kv_len"]) for t in program.tasks if t.label == "L0.attention"]
    assert found == [window for window in windows for _ in range(spec.n_kv_heads)]


def test_kv_blocks_have_128_positions_by_default(lowered: Lowered) -> None:
    starts = {t.params["kv_start"] for t in lowered(context=300).tasks if "kv_start" in t.params}
    assert starts == {0, 128, 256}
