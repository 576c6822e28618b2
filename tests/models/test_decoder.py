from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.errors import ConfigError, UnsupportedModelError
from flywheel.ir import BufferKind, DType, InstructionKind
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import cache_names, decode_step
from flywheel.models.families import count_params
from flywheel.models.graph import Block, Graph
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec

PLAIN = DecoderSpec("plain", "llama", 64, 96, 2, 4, 2, 16, 300, 1e4, 1e-5, 128)
QWEN2 = replace(PLAIN, name="qwen2", family="qwen2", qkv_bias=True)
QWEN3 = replace(PLAIN, name="qwen3", family="qwen3", qk_norm=True, tied_head=True)
SCALED = replace(PLAIN, name="scaled", rope_scaling=RopeScaling(8.0, 1.0, 4.0, 64))


def blocks(graph: Graph) -> tuple[Block, ...]:
    return graph.blocks


@pytest.mark.parametrize("spec", [PLAIN, QWEN2, QWEN3, SCALED, *CATALOG.values()], ids=lambda spec: spec.name)
def test_operations_read_only_what_was_made_before_them(spec: DecoderSpec) -> None:
    graph = decode_step(spec, 16)
    outer = {name for name, tensor in graph.prologue.tensors.items() if tensor.kind is not BufferKind.ACTIVATION}
    caches = {*cache_names("k", spec.n_kv_heads), *cache_names("v", spec.n_kv_heads)}
    assert caches <= graph.kinds[0].tensors.keys()
    for block in blocks(graph):
        weights = {name for name, tensor in block.tensors.items() if tensor.kind is BufferKind.WEIGHT}
        known = outer | weights | ({"x"} if block is not graph.prologue else set())
        for op in block.ops:
            assert set(op.inputs) <= known, op.name
            known.add(op.output)


@pytest.mark.parametrize("spec", [PLAIN, QWEN2, QWEN3], ids=lambda spec: spec.name)
def test_projections_fit_their_weights(spec: DecoderSpec) -> None:
    graph = decode_step(spec, 16)
    tensors = {**graph.prologue.tensors, **graph.kinds[0].tensors, **graph.epilogue.tensors}
    tensors["x"] = graph.prologue.tensors["x_out"]
    for op in (op for block in blocks(graph) for op in block.ops if op.kind is InstructionKind.GEMV_TILE):
        n_out, depth = tensors[op.inputs[1]].shape
        assert (tensors[op.inputs[0]].width, tensors[op.output].width, op.params["K"]) == (depth, n_out, depth)
        assert all(tensors[bias].shape == (n_out,) for bias in op.inputs[2:])


def test_only_models_with_biases_and_head_norms_have_them() -> None:
    def names(spec: DecoderSpec) -> set[str]:
        return {op.name for op in decode_step(spec, 8).kinds[0].ops}

    assert names(QWEN3) - names(PLAIN) == {"q_norm", "k_norm"}
    arity = {spec.name: [len(op.inputs) for op in decode_step(spec, 8).kinds[0].ops][1:4] for spec in (PLAIN, QWEN2)}
    assert arity == {"plain": [2, 2, 2], "qwen2": [3, 3, 3]}
    norms = [op for op in decode_step(QWEN3, 8).kinds[0].ops if op.name in ("q_norm", "k_norm")]
    assert [op.params["hidden"] for op in norms] == [16, 16]


def test_a_tied_head_reads_the_embedding_table() -> None:
    heads = {spec.name: decode_step(spec, 8).epilogue.ops[1].inputs[1] for spec in (PLAIN, QWEN3)}
    assert heads == {"plain": "lm_head.w", "qwen3": "embed.w"}


def test_rope_scaling_reaches_both_rope_operations() -> None:
    ropes = [op.params for op in decode_step(SCALED, 8).kinds[0].ops if op.kind is InstructionKind.ROPE]
    assert len(ropes) == 2
    assert all(
        rope == {
            "head_dim": 16,
            "theta": 1e4,
            "rope_factor": 8.0,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 4.0,
            "rope_original_max_position": 64,
        }
        for rope in ropes
    )  # fmt: skip
    assert {"head_dim", "theta"} == decode_step(PLAIN, 8).kinds[0].ops[4].params.keys()


def test_the_new_token_stands_last_in_the_window() -> None:
    params = {op.name: op.params for op in decode_step(PLAIN, 100).kinds[0].ops}
    assert params["k_append"]["pos"] == params["v_append"]["pos"] == 99
    assert (params["attention"]["kv_start"], params["attention"]["kv_len"]) == (0, 100)
    assert params["attention"]["scale"] == 0.25


def test_each_kv_head_has_caches_of_its_own() -> None:
    tensors = decode_step(PLAIN, 100).kinds[0].tensors
    caches = {name: tensor.shape for name, tensor in tensors.items() if tensor.kind is BufferKind.KV_CACHE}
    assert caches == dict.fromkeys(("k_cache.h0", "k_cache.h1", "v_cache.h0", "v_cache.h1"), (100, 1, 16))


def test_weights_activations_and_caches_have_the_asked_dtype_and_logits_are_f32() -> None:
    graph = decode_step(PLAIN, 8, DType.F16)
    tensors = [tensor for block in blocks(graph) for tensor in block.tensors.values()]
    inner = [tensor for tensor in tensors if tensor.kind not in (BufferKind.IO_INPUT, BufferKind.IO_OUTPUT)]
    assert {tensor.dtype for tensor in inner} == {DType.F16}
    assert graph.epilogue.tensors["logits"].dtype is DType.F32


def test_every_parameter_of_the_model_is_read() -> None:
    for spec in (PLAIN, QWEN2, QWEN3):
        graph = decode_step(spec, 8)
        sizes = []
        for block, repeats in zip(blocks(graph), (1, spec.n_layers, 1), strict=True):
            read = {name for op in block.ops for name in op.inputs}
            weights = [tensor for tensor in block.tensors.values() if tensor.kind is BufferKind.WEIGHT]
            assert all(tensor.name in read for tensor in weights)
            sizes += [repeats * weight.width * (weight.shape[0] if len(weight.shape) > 1 else 1) for weight in weights]
        assert sum(sizes) == count_params(spec)


@pytest.mark.parametrize("context", [0, -1, 129])
def test_contexts_out_of_the_models_reach_are_refused(context: int) -> None:
    with pytest.raises(ConfigError, match=rf"^plain: context {context} is not in 1\.\.128$"):
        decode_step(PLAIN, context)
    assert decode_step(PLAIN, 128).context == 128


def test_layers_without_rope_are_a_kind_of_their_own() -> None:
    spec = replace(PLAIN, family="smollm3", n_layers=10, turned=(True, True, True, False))
    graph = decode_step(spec, 8)
    assert graph.order == (0, 0, 0, 1, 0, 0, 0, 1, 0, 0)
    turned, plain = ({op.kind for op in kind.ops} for kind in graph.kinds)
    assert turned - plain == {InstructionKind.ROPE}


def test_a_family_that_is_none_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="family='gpt2' is not one of cohere, "):
        decode_step(replace(PLAIN, family="gpt2"), 8)
