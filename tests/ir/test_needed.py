"""A program says the oldest version of the format that can express it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.ir import DType, ScheduleConfig, validate
from flywheel.ir.target import TARGETS
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step

OLD, NEW = "0.5.0", "0.6.0"
NEEDED = {
    "llama3.2-1b": OLD, "qwen2.5-7b": OLD, "qwen3-0.6b": OLD, "smollm3-3b": OLD, "olmo2-1b": OLD, "mistral-7b": OLD,
    "mistral-7b-v0.1": NEW, "granite-3.3-2b": NEW, "gemma2-2b": NEW, "gemma3-1b": NEW, "phi-4-mini": NEW,
    "command-r7b": NEW,
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("fused", [True, False])
def test_a_program_says_the_oldest_version_that_can_express_it(name: str, fused: bool) -> None:
    whole = CATALOG[name]
    spec = replace(whole, n_layers=2, windowed=whole.windowed[:2])
    graph = decode_step(spec, 8192 if name == "mistral-7b-v0.1" else 512, DType.BF16)
    config = ScheduleConfig({"attention": {"kv_block": 512}}, fusion_grouping=[["final_norm", "lm_head"]] * fused,
                            page_allocation="none")  # fmt: skip
    program = lower(graph, config, TARGETS["h100"])
    assert program.ir_version == NEEDED[name]
    assert validate(program, strict=True).ok
