"""Packed tables, interpreted, compute what the reference VM computes of the program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.fusion import patterns_of
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec

CONTEXT = 48
FEW = replace(TARGETS["h100"], name="few", num_sms=3, note="")
SPECS = (
    DecoderSpec("llama", "llama", 72, 104, 2, 4, 2, 16, 50, 1e4, 1e-5, 64, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32)),
    DecoderSpec("qwen", "qwen3", 64, 96, 1, 4, 2, 16, 80, 1e4, 1e-6, 64, tied_head=True, qkv_bias=True, qk_norm=True),
    DecoderSpec("single", "llama", 40, 72, 1, 3, 1, 16, 33, 1e4, 1e-5, 64),
)
FUSED = (
    (), ("attn_norm", "q_proj", "k_proj", "v_proj"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("gate_proj", "up_proj", "silu_mul"), ("gate_proj", "up_proj"), ("down_proj", "mlp_add"), ("o_proj", "attn_add"),
    ("attn_combine", "o_proj", "attn_add"), ("attn_combine", "o_proj"), ("final_norm", "lm_head"),
    ("k_rope", "k_append", "v_append"), ("k_norm", "k_rope", "k_append", "v_append"), ("k_append", "v_append"),
    ("q_rope", "attention"), ("q_norm", "q_rope", "attention"),
    ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("q_norm", "k_norm", "q_rope", "k_rope", "k_append", "v_append", "attention"),
)  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> MegakernelProgram:
    """Small decoders of one sequence or some, under any compatible runs of the table of patterns."""
    spec = draw(st.sampled_from(SPECS))
    dtype = draw(st.sampled_from((DType.F32, DType.F32, DType.BF16)))
    batch = draw(st.sampled_from((1, 1, 2, 5, 8)))
    graph = decode_step(spec, CONTEXT, dtype, batch)
    patterns = [pattern for block in graph.blocks for pattern in patterns_of(graph, block)]
    groups: list[tuple[str, ...]] = []
    taken: set[str] = set()
    for group in draw(st.permutations(FUSED)):
        admitted = any(pattern.admits(frozenset(group)) for pattern in patterns)
        if group and admitted and not taken & set(group) and draw(st.integers(0, 3)):
            groups.append(group)
            taken |= set(group)
    rows = 16 * draw(st.integers(1, 7))
    config = ScheduleConfig(
        tiling={
            "gemv": {"N_tile": rows},
            "attention": {"kv_block": draw(st.sampled_from((16, 32, CONTEXT)))},
            "stream": {"chunk_bytes": draw(st.sampled_from((1024, 2048, 32768)))},
        },
        fusion_grouping=tuple(groups),
        sm_assignment=draw(st.sampled_from(("load_balance", "round_robin"))),
        threads_per_block=32 * draw(st.sampled_from((4, 7, 10, 32 if batch < 5 else 10))),
    )
    return lower(graph, config, draw(st.sampled_from((FEW, replace(FEW, num_sms=1)))))


@given(program=programs(), pos=st.sampled_from((None, 0, 17, CONTEXT - 1)))
def test_the_tables_of_a_decoder_mean_what_its_program_means(
    check_vm: Callable[..., None], program: MegakernelProgram, pos: int | None
) -> None:
    check_vm(program, pos)
