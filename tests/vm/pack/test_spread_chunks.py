"""Short tiles of quantised matrices come in chunks small enough for all matrix warps."""

from __future__ import annotations

import numpy as np
import pytest

from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.formats import parse_formats
from flywheel.models.spec import DecoderSpec
from flywheel.vm.pack import PackedProgram, pack

SPEC = DecoderSpec("wide", "llama", 2048, 2048, 1, 32, 8, 64, 520, 1e5, 1e-5, 512)


def packed(weights: str, rows: int) -> PackedProgram:
    """A layer whose products all have 2048 columns, which are two units, and whose tiles have `rows` rows."""
    products = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
    tiling = {
        **{f"gemv.{name}": {"N_tile": rows} for name in products},
        "stream": {"chunk_bytes": 16384}, "warps": {"chunk": 1, "matrix": 4},
    }  # fmt: skip
    graph = decode_step(SPEC, 64, DType.BF16, 1, parse_formats(weights, "bf16"))
    return pack(lower(graph, ScheduleConfig(tiling=tiling, threads_per_block=448), TARGETS["h100"]))


@pytest.mark.parametrize(
    ("weights", "rows", "chunks"),
    [
        ("int4", 16, 2),  # one row block of two units: two warps multiply one each
        ("int4", 32, 2),
        ("int4", 48, 1),  # some warps multiply two units in any case
        ("int4", 64, 1),  # four row blocks: each warp has one
        ("int8", 64, 2),  # a chunk holds one unit of 8-bit codes
    ],
)
def test_chunks_of_a_row_block(weights: str, rows: int, chunks: int) -> None:
    made = packed(weights, rows)
    assert made.variant.chunk_groups == 4
    full = made.segments[(made.segments["flags"] >> 16 != 0) & (made.segments["row_blocks"] == rows // 16)]
    assert len(full) and set(full["row_chunks"].tolist()) == {chunks}
    assert set((full["row_chunks"] * full["chunk_kblocks"]).tolist()) == {2}


def test_steps_name_as_many_partial_sums_as_segments_have_chunks() -> None:
    made = packed("int4", 32)
    coded = made.segments[made.segments["flags"] >> 16 != 0]
    products = made.steps["as"]["product"]
    found = np.unique(products["row_chunks"][(made.steps["params"]["K"] == 2048) & (products["scales"] == 0)])
    assert set(np.unique(coded["row_chunks"]).tolist()) <= set(found.tolist())


def test_matrices_that_are_not_quantised_keep_their_chunks() -> None:
    made = packed("bf16", 16)
    assert set(made.segments["row_chunks"].tolist()) == {4}  # 64 KiB in chunks of 16
