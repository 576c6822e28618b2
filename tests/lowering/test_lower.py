from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import sample

from flywheel.errors import ConfigError
from flywheel.ir import (
    TARGETS,
    GpuTarget,
    MegakernelProgram,
    ScheduleConfig,
    config_to_dict,
    program_to_json,
    validate,
)
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan import program_id, variant_of

Lowered = Callable[..., MegakernelProgram]

SPLIT_APPEND = ("k_norm", "k_rope", "k_append", "v_append")
SPLIT_ATTENTION = ("q_norm", "q_rope", "attention")
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"),
    SPLIT_APPEND,
    SPLIT_ATTENTION,
    ("attn_combine", "o_proj", "attn_add"),
    ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"),
    ("final_norm", "lm_head"),
)


def test_the_program_says_what_it_is(lowered: Lowered, target: GpuTarget) -> None:
    program = lowered(context=33)
    assert program.meta == {
        "model": "small",
        "gpu": "few",
        "regime": "decode",
        "dtype": "bf16",
        "context": 33,
        "batch": 1,
    }
    assert program.target == target
    assert program.config == ScheduleConfig()


def test_fully_fused_layers_need_five_hand_offs(lowered: Lowered) -> None:
    split = lowered(fusion_grouping=FUSED, tiling={"attention": {"kv_block": 16}})
    whole = lowered(
        fusion_grouping=[group for group in FUSED if group not in (SPLIT_APPEND, SPLIT_ATTENTION)]
        + [SPLIT_APPEND + SPLIT_ATTENTION],
        tiling={"attention": {"kv_block": 64}},
    )
    levels = {name: validate(program, strict=True).stats["levels"] for name, program in (("s", split), ("w", whole))}
    # embed, a layer's qkv, (append,) attention, out, gate/up and down, then head and argmax
    assert levels == {"s": 1 + 2 * 6 + 2, "w": 1 + 2 * 5 + 2}


def test_fields_of_the_config_reach_the_kernel_variant(lowered: Lowered) -> None:
    variant = variant_of(
        lowered(
            tiling={"stream": {"chunk_bytes": 8192}},
            pipelining_depth=5,
            threads_per_block=160,
            smem_bytes_per_block=65536,
        )
    )
    assert (variant.threads, variant.smem_bytes, variant.chunk_bytes, variant.prefetch_depth) == (160, 65536, 8192, 5)


@pytest.mark.parametrize("config", [ScheduleConfig(), ScheduleConfig(fusion_grouping=FUSED)], ids=["plain", "fused"])
def test_other_hash_seeds_give_the_same_bytes(config: ScheduleConfig, spec: DecoderSpec, target: GpuTarget) -> None:
    source = (
        "import pathlib, sys; from flywheel.ir import *; from flywheel.models.spec import DecoderSpec;"
        "from flywheel.models.decoder import decode_step; from flywheel.lowering.lower import lower;"
        f"config = config_from_dict({config_to_dict(config)!r});"
        f"print(program_to_json(lower(decode_step({spec!r}, 100), config, {target!r})), end='')"
    )
    text = program_to_json(lower(decode_step(spec, 100), config, target))
    for seed in sample(("0", "1", "31415")):
        done = subprocess.run(
            [sys.executable, "-c", source],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.stdout == text


def test_the_whole_catalog_lowers_on_every_gpu() -> None:
    from flywheel.models.catalog import CATALOG

    ids = set()
    for spec in CATALOG.values():
        for target in (TARGETS["h100"], TARGETS["l4"]):
            program = lower(decode_step(spec, 512), ScheduleConfig(tiling={"gemv": {"N_tile": 1024}}), target)
            result = validate(program, strict=True)
            assert result.ok, result.report()
            ids.add(program_id(program))
    assert len(ids) == 2 * len(CATALOG)


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"tiling": {"gemm": {"N_tile": 16}}}, ("tiling", "'gemm'", "gemv", "gemv.q_proj", "gemv.lm_head")),
        ({"tiling": {"gemv.o": {"N_tile": 16}}}, ("tiling", "'gemv.o'", "gemv.o_proj")),
        ({"tiling": {"gemv.": {"N_tile": 16}}}, ("tiling", "'gemv.'")),
        ({"tiling": {"gemv.attn_norm": {"N_tile": 16}}}, ("tiling", "'gemv.attn_norm'")),
        ({"tiling": {"attention.q_proj": {"kv_block": 16}}}, ("tiling", "'attention.q_proj'")),
        ({"tiling": {"a\nb": {}}}, ("tiling", r"'a\nb'")),
        ({"tiling": {"gemv": {"M_tile": 16}}}, ("tiling.gemv", "'M_tile'", "'N_tile'")),
        ({"tiling": {"attention": {"a\nb": 16}}}, ("tiling.attention", "'kv_block'")),
        ({"tiling": {"gemv": {"N_tile": 24}}}, ("tiling.gemv.N_tile=24", "16")),
        ({"tiling": {"gemv.q_proj": {"N_tile": 0}}}, ("tiling.gemv.q_proj.N_tile=0", "16")),
        ({"tiling": {"gemv": {"N_tile": -16}}}, ("tiling.gemv.N_tile=-16", "positive")),
        ({"tiling": {"attention": {"kv_block": 100}}}, ("tiling.attention.kv_block=100", "16")),
        ({"tiling": {"stream": {"chunk_bytes": 0}}}, ("tiling.stream.chunk_bytes=0", "1024")),
        ({"tiling": {"stream": {"chunk_bytes": 5000}}}, ("tiling.stream.chunk_bytes=5000", "1024")),
        ({"tiling": {"stream": {"chunk_bytes": 131072}}}, ("smem_bytes_per_block", "2 chunks of 131072")),
        ({"smem_bytes_per_block": 9216}, ("smem_bytes_per_block=9216", "2 chunks of 4096")),
        ({"smem_bytes_per_block": 232449}, ("smem_bytes_per_block=232449", "232448", "few")),
        ({"smem_bytes_per_block": -1}, ("smem_bytes_per_block=-1", "0..232448")),
        ({"threads_per_block": 100}, ("threads_per_block=100", "32")),
        ({"threads_per_block": 32}, ("threads_per_block=32", "128..1024")),
        ({"threads_per_block": 2048}, ("threads_per_block=2048", "1024")),
        ({"pipelining_depth": -1}, ("pipelining_depth=-1", "0..1024")),
        ({"pipelining_depth": 1025}, ("pipelining_depth=1025", "0..1024")),
        ({"page_allocation": "first\nfit"}, ("page_allocation", "memory of their own")),
        ({"sm_assignment": "random"}, ("sm_assignment='random'", "load_balance, idle_first, round_robin")),
        ({"sm_assignment": {0: 6}}, ("sm_assignment", "task 0 on SM 6", "0..5")),
        ({"sm_assignment": {0: -1}}, ("sm_assignment", "task 0 on SM -1", "0..5")),
        ({"sm_assignment": {10**6: 0}}, ("sm_assignment", "task 1000000 on SM 0")),
        ({"sm_assignment": {-1: 0}}, ("sm_assignment", "task -1 on SM 0")),
        ({"fusion_grouping": [["q_proj"], ["z\n"]]}, ("fusion_grouping[1]", r"'z\n'", "small")),
        ({"fusion_grouping": [["o_proj"], ["o_proj"]]}, ("fusion_grouping[1]", "'o_proj'", "fusion_grouping[0]")),
        ({"fusion_grouping": [["o_proj", "o_proj"]]}, ("fusion_grouping[0]", "'o_proj'")),
        ({"fusion_grouping": [["q_proj", "o_proj"]]}, ("fusion_grouping[0]", "q_proj, o_proj")),
        ({"fusion_grouping": [["attn_norm", "q_proj"]]}, ("fusion_grouping[0]", "attn_norm, q_proj")),
        ({"fusion_grouping": [["k_norm", "k_append", "v_append"]]}, ("fusion_grouping[0]", "k_norm")),
        (
            {
                "fusion_grouping": [["gate_proj", "up_proj", "silu_mul"]],
                "tiling": {"gemv.gate_proj": {"N_tile": 16}, "gemv.up_proj": {"N_tile": 32}},
            },
            ("tiling", "gate_proj=16", "up_proj=32"),
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_one_line(
    lowered: Lowered, config: dict[str, Any], facts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        lowered(**config)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert all(fact in message for fact in facts), message


def test_a_ring_too_small_for_the_staged_vector_is_refused(lowered: Lowered) -> None:
    wide = DecoderSpec("wide", "llama", 64, 60000, 1, 1, 1, 16, 32, 1e4, 1e-6, 64)
    with pytest.raises(ConfigError, match="smem_bytes_per_block=84607: 8191 bytes are left"):
        lowered(spec=wide, smem_bytes_per_block=84607)
    assert variant_of(lowered(spec=wide, smem_bytes_per_block=84608)).ring_slots == 2
