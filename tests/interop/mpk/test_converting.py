from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from mpk_llama import llama_graph

from flywheel.decode.cuda import CudaModel, prepare_torch
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import NoGpuError, UnsupportedModelError
from flywheel.interop.mpk.converting import convert
from flywheel.interop.mpk.graph import MpkGraph, read_graph
from flywheel.interop.mpk.rescheduling import GraphSchedule, reschedule
from flywheel.ir import TARGETS, DType, InstructionKind, MegakernelProgram, validate
from flywheel.judge.verdicts import verify
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu, open_gpu

CONTEXT = 32
H200 = TARGETS["h200"]
MICRO = DecoderSpec("micro", "qwen3", 64, 128, 2, 4, 2, 16, 128, 1e4, 1e-6, 64, qk_norm=True)
TINY = DecoderSpec("tiny", "qwen3", 512, 1024, 2, 8, 4, 64, 2048, 1e4, 1e-6, 64, qk_norm=True)
WIDE = DecoderSpec("wide", "qwen3", 1024, 2048, 2, 8, 8, 128, 8192, 1e4, 1e-6, 64, qk_norm=True)
LLAMA = DecoderSpec("small", "llama", 64, 128, 2, 4, 2, 16, 96, 1e4, 1e-5, 64)
MODELS = {"micro_2layer": MICRO, "tiny": TINY, "tinyamp": WIDE, "tinybw": WIDE}

Graphs = Callable[..., MpkGraph]


def check_logits(program: MegakernelProgram, spec: DecoderSpec, positions: Sequence[int] = (0, 7, CONTEXT - 1)) -> None:
    """Assert that the reference VM makes of each tensor, up to the logits, what the oracle of the model makes."""
    result = validate(program, strict=True)
    assert result.ok, result.report()
    dtype = next(buffer.dtype for buffer in program.buffers if buffer.name == "x_out")
    weights = random_weights(spec, 1, TORCH_DTYPES[dtype], "cpu")
    verdict = verify(ReferenceSession(program, spec, weights), weights, positions)
    assert verdict.passed, verdict


@pytest.mark.parametrize("name", ["micro_2layer", "tiny"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_a_converted_graph_gives_the_logits_of_the_model(graph: Graphs, name: str, dtype: DType) -> None:
    check_logits(convert(graph(name), MODELS[name], H200, CONTEXT, dtype), MODELS[name])


@pytest.mark.parametrize("name", ["tinyamp", "tinybw"])
def test_types_of_other_gpus_are_converted_too(graph: Graphs, name: str) -> None:
    program = convert(graph(name), MODELS[name], H200, CONTEXT)
    assert validate(program, strict=True).ok


def test_a_llama_without_norms_of_queries_is_converted() -> None:
    check_logits(convert(llama_graph(LLAMA), LLAMA, H200, CONTEXT, DType.F32), LLAMA)


def test_requests_become_sequences_of_a_batch() -> None:
    program = convert(llama_graph(LLAMA, requests=3), LLAMA, H200, CONTEXT, DType.F32)
    assert program.meta["batch"] == 3
    check_logits(program, LLAMA, (0, CONTEXT - 1))


def test_tiles_joins_and_queues_are_those_of_the_graph(graph: Graphs) -> None:
    found = graph("tiny")
    program = convert(found, TINY, H200, CONTEXT)
    labels = Counter(task.label for task in program.tasks)
    assert labels["L0.silu_mul"] == 64 and labels["L1.attention"] == 4 and labels["L0.o_proj"] == 8
    assert labels["L0.q_proj"] + labels["L0.k_proj"] + labels["L0.v_proj"] == 128
    assert labels["lm_head"] == 128 and labels["argmax"] == 1
    heads = {task.sm for task in program.tasks if task.label == "L0.attention"}
    assert heads == {(place - 2) % 128 for place in range(139, 143)}
    few = convert(found, TINY, replace(H200, num_sms=8), CONTEXT)
    assert {task.sm for task in few.tasks} == set(range(8))
    assert validate(few, strict=True).ok


def test_a_rescheduled_graph_is_converted_in_its_order(graph: Graphs) -> None:
    moved = reschedule(graph("micro_2layer"), GraphSchedule("turned", "given", "ahead", 128))
    late = reschedule(graph("micro_2layer"), GraphSchedule("given", "given", "just in time", 128))
    plain = convert(graph("micro_2layer"), MICRO, H200, CONTEXT, DType.F32)
    for each in (moved, late):
        program = convert(each, MICRO, H200, CONTEXT, DType.F32)
        assert Counter(task.label for task in program.tasks) == Counter(task.label for task in plain.tasks)
        check_logits(program, MICRO, (0, CONTEXT - 1))


def test_rows_of_a_padded_vocabulary_are_left_out(graph: Graphs) -> None:
    spec = replace(MICRO, vocab=100)
    program = convert(graph("micro_2layer"), spec, H200, CONTEXT, DType.F32)
    tiles = [task for task in program.tasks if task.label == "lm_head"]
    assert sum(task.params["N_tile"] for task in tiles) == 100
    check_logits(program, spec, (0, CONTEXT - 1))


@pytest.mark.parametrize(
    ("name", "spec", "words"),
    [
        ("micro_2layer", replace(MICRO, hidden=128), "want 128 columns"),
        ("micro_2layer", replace(MICRO, n_layers=1), "layer 1 of a model of 1"),
        ("micro_2layer", replace(MICRO, qk_norm=False), "norms queries and keys"),
        ("micro_2layer", replace(MICRO, n_heads=2), "want 32 columns from element 0, 96 apart"),
        ("micro_2layer", replace(MICRO, intermediate=144), "do not share 144 columns"),
        ("micro_2layer", replace(MICRO, qkv_bias=True), "biases"),
        ("micro_2layer", replace(MICRO, window=8), "layers see 8 positions"),
        ("micro_2gpu_r0", MICRO, "only a graph of one GPU converts"),
        ("tinysplit", WIDE, "(PAGED_ATTENTION_SPLIT_KV_HOPPER): has no equivalent"),
        ("exp_mla", MICRO, "do not share"),
    ],
)
def test_what_has_no_equivalent_or_is_of_another_model_is_refused_in_a_line(
    graph: Graphs, name: str, spec: DecoderSpec, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(words)) as raised:
        convert(graph(name), spec, H200, CONTEXT)
    assert "\n" not in str(raised.value)


def test_a_model_with_more_layers_than_the_graph_is_not_what_the_graph_is_of(graph: Graphs) -> None:
    with pytest.raises(UnsupportedModelError, match="2 of 3 layers"):
        convert(graph("micro_2layer"), replace(MICRO, n_layers=3), H200, CONTEXT)


def test_a_graph_that_is_wired_otherwise_is_refused(graph: Graphs) -> None:
    def rewired(document: dict[str, Any]) -> None:
        for task in document["all_tasks"]:
            if task["task_type"] == 156 and task["inputs"][1]["base_ptr"] == "layer_1_down_proj":
                task["inputs"][2]["base_ptr"] = "embed_out"

    with pytest.raises(UnsupportedModelError, match="reads embed_out, and tasks of o_proj write attn_proj_out"):
        convert(graph("micro_2layer", rewired), MICRO, H200, CONTEXT)


def _named(kind: int, operand: int, name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    """Changes one operand, by its place among a task's inputs and outputs, of the first task that has it."""

    def change(document: dict[str, Any]) -> None:
        for task in document["all_tasks"]:
            operands = [*(task["inputs"] or []), *(task["outputs"] or [])]
            if task["task_type"] == kind and operands[operand]["base_ptr"] == name:
                operands[operand].update(changes)
                return

    return change


@pytest.mark.parametrize(
    ("kind", "operand", "name", "changes"),
    [
        (101, 1, "embed_tokens", {"offset": 128}),
        (154, 0, "embed_out", {"offset": 2}),
        (154, 1, "layer_0_input_layernorm", {"dims": [32]}),
        (155, 0, "rmsnorm_out", {"offset": 2}),
        (155, 1, "layer_0_qkv_proj", {"offset": 2}),
        (155, 1, "layer_0_qkv_proj", {"data_type": 930}),
        (155, 2, "attn_in", {"strides": [256, 1]}),
        (155, 2, "attn_in", {"base_ptr": "mlp_mid"}),
        (153, 2, "layer_0_v_cache", {"base_ptr": "layer_1_v_cache"}),
        (153, 2, "layer_0_v_cache", {"offset": 32}),
        (153, 4, "layer_0_k_norm", {"base_ptr": "layer_1_k_norm"}),
        (153, 5, "cos_position_embedding", {"base_ptr": "sin_position_embedding"}),
        (153, 7, "attn_out", {"offset": 64}),
        (156, 2, "embed_out", {"offset": 32}),
        (118, 1, "silu_mul_out", {"strides": [256, 1]}),
        (259, 0, "argmax_in", {"offset": 32}),
        (111, 1, "argmax_part_index", {"base_ptr": "argmax_part_value"}),
    ],
)
def test_an_operand_that_lies_elsewhere_is_refused(
    graph: Graphs, kind: int, operand: int, name: str, changes: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedModelError) as raised:
        convert(graph("micro_2layer", _named(kind, operand, name, **changes)), MICRO, H200, CONTEXT)
    assert "\n" not in str(raised.value)


def _changed(graph: MpkGraph, change: Callable[[dict[str, Any]], None]) -> MpkGraph:
    document = json.loads(json.dumps(graph.document))
    change(document)
    return read_graph(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_named(155, 0, "normed", dims=[1, 64]), "64 columns from element 0, 64 apart, 3 rows or more"),
        (_named(259, 0, "logits", dims=[3, 48]), "chosen from 48 of 96 columns"),
    ],
)
def test_a_graph_that_leaves_out_rows_or_tokens_is_refused(
    change: Callable[[dict[str, Any]], None], words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        convert(_changed(llama_graph(LLAMA, requests=3), change), LLAMA, H200, CONTEXT)


def test_an_attention_is_one_task_with_its_appends(graph: Graphs) -> None:
    program = convert(graph("micro_2layer"), MICRO, H200, CONTEXT)
    task = next(task for task in program.tasks if task.label == "L0.attention")
    steps = [step.op.name for step in task.params["recipe"].steps]
    assert task.op is InstructionKind.FUSED
    assert steps.count("KV_APPEND") == 2 and steps.count("RMSNORM") == 2 and steps[-1] == "ATTENTION_TILE"


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    """The GPU here."""
    try:
        prepare_torch()
        return open_gpu()
    except NoGpuError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_graph_gives_the_logits_of_the_model_on_a_gpu(graph: Graphs, gpu: Gpu, name: str) -> None:
    spec = MODELS[name]
    program = convert(graph(name), spec, H200, CONTEXT)
    weights = random_weights(spec, 1, TORCH_DTYPES[DType.BF16], "cuda")
    with CudaModel(gpu, spec, DType.BF16, CONTEXT, weights, 1) as model, model.load(program) as session:
        verdict = verify(session, weights, (0, 7, CONTEXT - 1))
    assert verdict.passed, verdict
