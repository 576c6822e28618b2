"""Golden programs of the lowerer: `python tests/golden/regenerate.py` rewrites them, `git diff` shows what changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flywheel.ir import TARGETS, MegakernelProgram, ScheduleConfig, save_program
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec

FOLDER = Path(__file__).parent
TARGET = replace(TARGETS["h100"], name="four", num_sms=4, note="")
CONTEXT = 48
LLAMA = DecoderSpec(
    "tiny-llama", "llama", 64, 96, 2, 4, 2, 16, 160, 1e4, 1e-5, 64,
    tied_head=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32),
)  # fmt: skip
QWEN = DecoderSpec("tiny-qwen", "qwen3", 64, 96, 2, 4, 2, 16, 160, 1e4, 1e-6, 64, qkv_bias=True, qk_norm=True)

_QKV, _MLP = ("attn_norm", "q_proj", "k_proj", "v_proj"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul")
_DOWN, _HEAD = ("down_proj", "mlp_add"), ("final_norm", "lm_head")
CONFIGS = {
    "unfused": (LLAMA, ScheduleConfig()),
    "fused-split-kv": (
        QWEN,
        ScheduleConfig(
            tiling={"gemv": {"N_tile": 16}, "gemv.lm_head": {"N_tile": 48}, "attention": {"kv_block": 16}},
            fusion_grouping=(
                _QKV,
                ("k_norm", "k_rope", "k_append", "v_append"),
                ("q_norm", "q_rope", "attention"),
                ("attn_combine", "o_proj", "attn_add"),
                _MLP, _DOWN, _HEAD,
            ),
            pipelining_depth=4,
        ),
    ),
    "fused-one-block": (
        LLAMA,
        ScheduleConfig(
            tiling={"attention": {"kv_block": 48}, "stream": {"chunk_bytes": 16384}},
            fusion_grouping=(
                _QKV, ("k_rope", "k_append", "v_append", "q_rope", "attention"), ("o_proj", "attn_add"), _MLP, _DOWN,
                _HEAD,
            ),
            sm_assignment="round_robin",
            threads_per_block=288,
        ),
    ),
    "placed-by-hand": (
        QWEN,
        ScheduleConfig(
            tiling={"gemv": {"N_tile": 32}, "attention": {"kv_block": 32}},
            sm_assignment={0: 3, 1: 2, 5: 0, 6: 0, 20: 1},
        ),
    ),
}  # fmt: skip
"""Name of a golden file -> model and config."""


def programs() -> Iterator[tuple[Path, MegakernelProgram]]:
    """Each golden file and what belongs into it."""
    for name, (spec, config) in CONFIGS.items():
        yield FOLDER / f"{name}.json", lower(decode_step(spec, CONTEXT), config, TARGET)


if __name__ == "__main__":
    for path, program in programs():
        save_program(program, path)
