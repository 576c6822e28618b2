"""Which operations of a graph torch computes as one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from flywheel.ir import DType, InstructionKind
from flywheel.models.calls import Call, ColumnsOf, cached_by, calls_of
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec

LLAMA = DecoderSpec("llama", "llama", 64, 96, 4, 4, 2, 16, 120, 1e4, 1e-5, 128)
QWEN3 = replace(LLAMA, family="qwen3", qk_norm=True)
BOTH = frozenset({InstructionKind.GEMV_TILE, InstructionKind.ROPE})


def layers_of(spec: DecoderSpec, *joined: InstructionKind) -> list[tuple[Call, ...]]:
    graph = decode_step(spec, 1, DType.BF16)
    return [calls_of(graph, block, frozenset(joined)) for block in graph.kinds]


def together(calls: Iterable[Call]) -> list[str]:
    return ["+".join(call.names) for call in calls if len(call.names) > 1]


@pytest.mark.parametrize(
    ("spec", "joined", "wanted"),
    [
        (LLAMA, (), ["k_append+v_append"]),
        (LLAMA, ("ROPE",), ["q_rope+k_rope", "k_append+v_append"]),
        (LLAMA, ("GEMV_TILE",), ["q_proj+k_proj+v_proj", "q_rope+k_rope", "k_append+v_append", "gate_proj+up_proj"]),
        (QWEN3, ("GEMV_TILE",), ["q_proj+k_proj+v_proj", "k_append+v_append", "gate_proj+up_proj"]),
        (QWEN3, ("ROPE",), ["q_rope+k_rope", "k_append+v_append"]),
    ],
)
def test_what_is_computed_as_one(spec: DecoderSpec, joined: tuple[str, ...], wanted: list[str]) -> None:
    (layer,) = layers_of(spec, *(InstructionKind[name] for name in joined))
    assert together(layer) == wanted


def test_a_rotation_of_joined_products_reads_their_columns_at_once() -> None:
    (layer,) = layers_of(LLAMA, *BOTH)
    rope = next(call for call in layer if call.kind is InstructionKind.ROPE)
    turned, width = LLAMA.q_width + LLAMA.kv_width, LLAMA.q_width + 2 * LLAMA.kv_width
    assert rope.inputs == (ColumnsOf("q+k+v", 0, turned, width),)


def test_a_layer_without_rope_is_a_kind_of_its_own() -> None:
    turned, plain = layers_of(replace(LLAMA, family="smollm3", turned=(True, True, True, False)))
    assert [call.names for call in turned if call.kind is not InstructionKind.ROPE] == [call.names for call in plain]


@pytest.mark.parametrize("spec", [LLAMA, QWEN3, replace(LLAMA, family="qwen2", qkv_bias=True)])
def test_a_value_lasts_until_its_last_reader_and_no_longer(spec: DecoderSpec) -> None:
    graph = decode_step(spec, 1, DType.BF16)
    for block, given, left in zip(
        graph.blocks, ({"token_id"}, {"x"}, {"x"}), ({"x_out"}, {"x_out"}, {"logits", "next_token"}), strict=True
    ):
        values = set(given)
        for call in calls_of(graph, block, BOTH):
            assert {columns.name for columns in call.inputs} <= values
            values -= set(call.done)
            values |= {call.output} if call.kind is not InstructionKind.KV_APPEND else set()
        assert values == left


def test_of_the_last_layer_only_what_the_caches_need_is_left() -> None:
    (layer,) = layers_of(LLAMA)
    assert cached_by(layer)[-1].names == ("k_append", "v_append")
    assert len(cached_by(layer)) < len(layer)
