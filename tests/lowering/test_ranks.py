"""Programs that several GPUs share, lowered, proved and run by the reference VM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flywheel.errors import ConfigError
from flywheel.ir import (
    TARGETS,
    BufferKind,
    DType,
    MegakernelProgram,
    Runs,
    ScheduleConfig,
    program_from_json,
    program_to_json,
    validate,
)
from flywheel.ir.exchange import is_push
from flywheel.lowering.fusion import COMBINE
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.formats import PLAIN, parse_formats
from flywheel.models.oracle import EagerDecoder
from flywheel.models.quantise import quantised
from flywheel.models.rope import LinearRope, Rope
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind, random_weights
from flywheel.plan import program_id
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference import ReferenceVM
from flywheel.vm.reference.memory import tensor_shape

TARGET = replace(TARGETS["h200"], name="few", num_sms=6)
SPEC = DecoderSpec("tiny", "llama", 64, 128, 4, 8, 4, 16, 200, 1e4, 1e-5, 64)
GEMMA: Mapping[str, Any] = {
    "tied_head": True, "norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh", "embed_scale": 8.0,
    "embed_scale_rounds": True, "attention_scale": 0.2, "window": 3, "windowed": (True, False, True, False),
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"tied_head": True},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"turned": (True, False)},
    "ministral": {"window": 3, "windowed": (True, False, True, True)},
    "phi3": {"rotary_dim": 12},
    "cohere2": {"norm": "layer", "norms": "shared", "logits_scale": 0.5},
    "starcoder2": {
        "norm": "layer", "norm_bias": True, "gated": False, "activation": "gelu_tanh", "qkv_bias": True, "o_bias": True,
        "mlp_bias": True,
    },
    "glm4": {"rotary_dim": 8, "norms": "around", "qkv_bias": True},
    "granite": {"embed_scale": 6.0, "residual_scale": 0.22, "attention_scale": 0.1, "logits_scale": 0.125},
    "gemma2": {**GEMMA, "attention_cap": 2.0, "logits_cap": 2.0},
    "gemma3_text": {**GEMMA, "qk_norm": True, "local_rope": Rope(1e2), "rope_scaling": LinearRope(8.0)},
}
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"),
    ("attn_combine", "o_proj", "attn_add"),
    ("mlp_norm", "gate_proj", "up_proj", "silu_mul", "gelu_mul"),
    ("down_proj", "mlp_add"),
    ("final_norm", "lm_head"),
)
PLAIN_CONFIG = ScheduleConfig(page_allocation="none")
FUSED_CONFIG = ScheduleConfig(
    {"attention": {"kv_block": 16}, "gemv": {"N_tile": 16}}, fusion_grouping=FUSED, page_allocation="none"
)


def shared(
    spec: DecoderSpec = SPEC,
    ranks: int = 2,
    config: ScheduleConfig = PLAIN_CONFIG,
    batch: int = 1,
    dtype: DType = DType.F32,
    weights: str | None = None,
) -> MegakernelProgram:
    formats = PLAIN if weights is None else parse_formats(weights, dtype.name.lower())
    graph = shared_step(spec, 48, dtype, batch, formats, ranks)
    there = {op.name for block in graph.blocks for op in block.ops} | {COMBINE}
    there -= {"attn_add", "mlp_add"} if spec.norms == "around" else set()  # a norm is between
    fused = [[name for name in names if name in there] for names in config.fusion_grouping]
    return lower(graph, replace(config, fusion_grouping=fused), TARGET)


def launched(
    program: MegakernelProgram,
    weights: Mapping[str, Tensor],
    tokens: list[list[int]],
    order: str = "list",
    seed: int = 0,
    behind: int = 0,
) -> list[dict[str, Tensor]]:
    """What launches make of the tokens of each position, from position 0 on; row r stands `r * behind` positions before
    row 0, or at 0."""
    caches = {
        buffer.name: torch.zeros(tensor_shape(buffer), dtype=TORCH_DTYPES[buffer.dtype])
        for buffer in program.buffers
        if buffer.kind is BufferKind.KV_CACHE
    }
    bound = ReferenceVM(program).bind({**bind(program, weights), **caches})
    results = []
    for launch in range(len(tokens)):
        places = [max(0, launch - row * behind) for row in range(len(tokens[0]))]
        given = [tokens[place][row] for row, place in enumerate(places)]
        fed = {
            buffer.name: torch.tensor(given if buffer.name.startswith("token_id") else places).int()
            for buffer in program.buffers
            if buffer.kind is BufferKind.IO_INPUT
        }
        results.append(bound.step(fed, places if behind else launch, order, seed))
    return results


def check(program: MegakernelProgram, spec: DecoderSpec, weights: Mapping[str, Tensor], batch: int = 1) -> None:
    """Logits of all ranks are the same bits, and the oracle's."""
    tokens = [[(7 * position + 3 * row + 1) % spec.vocab for row in range(batch)] for position in range(4)]
    results = launched(program, weights, tokens)
    for row in range(batch):
        oracle = EagerDecoder(spec, weights, torch.float32, 48)
        for position, each in enumerate(results):
            wanted = oracle.step(tokens[position][row], position)
            for rank in range(program.ranks):
                assert torch.equal(each[f"logits@{rank}"], each["logits@0"])
                assert torch.equal(each[f"next_token@{rank}"], each["next_token@0"])
            torch.testing.assert_close(each["logits@0"][row], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "ranks"), [*((family, 2) for family in FAMILIES), ("qwen3", 4), ("llama", 8)])
def test_every_family_makes_the_oracles_logits_on_several_ranks(family: str, ranks: int) -> None:
    spec = replace(SPEC, family=family, **FAMILIES[family])  # type: ignore[arg-type]
    program = shared(spec, ranks, FUSED_CONFIG)
    assert validate(program, strict=True).ok
    check(program, spec, random_weights(spec, 0, torch.float32))


def test_sequences_of_a_batch_stand_where_they_like() -> None:
    weights, tokens = random_weights(SPEC, 0, torch.float32), [[7 * place + 1, 5 * place + 2] for place in range(4)]
    results = launched(shared(batch=2, config=FUSED_CONFIG), weights, tokens, behind=2)
    oracle = EagerDecoder(SPEC, weights, torch.float32, 48)
    for launch, place in ((2, 0), (3, 1)):
        wanted = oracle.step(tokens[place][1], place)
        torch.testing.assert_close(results[launch]["logits@1"][1], wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [2, 8])
def test_rows_of_a_batch_each_get_the_oracles_logits(batch: int) -> None:
    check(shared(batch=batch, config=FUSED_CONFIG), SPEC, random_weights(SPEC, 0, torch.float32), batch)


def test_unfused_schedules_make_the_oracles_logits() -> None:
    check(shared(), SPEC, random_weights(SPEC, 0, torch.float32))


@pytest.mark.parametrize("weights", ["int8", "int4-g32", "fp8-tensor", "int4-g32,lm_head=int8"])
def test_a_ranks_part_of_a_quantised_matrix_has_its_scales(weights: str) -> None:
    formats = parse_formats(weights, "f32")
    given = quantised(SPEC, random_weights(SPEC, 0, torch.float32), formats, DType.F32)
    check(shared(weights=weights), SPEC, given)


@pytest.mark.parametrize("config", [PLAIN_CONFIG, FUSED_CONFIG], ids=["plain", "fused"])
def test_every_firing_order_gives_the_same_bits(config: ScheduleConfig) -> None:
    program, weights = shared(config=config, dtype=DType.BF16), random_weights(SPEC, 0)
    first, *others = [
        launched(program, weights, [[5], [9]], order, seed)[-1]
        for order, seed in [("list", 0), *(("adversarial", seed) for seed in range(5)), ("queues", 0), ("queues", 1)]
    ]
    for other in others:
        assert all(torch.equal(tensor, first[name]) for name, tensor in other.items())


@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16])
def test_summands_are_of_the_step_s_type_whether_the_config_says_16_bits_or_nothing(dtype: DType) -> None:
    silent, said = (replace(PLAIN_CONFIG, tiling=tiling) for tiling in ({}, {"exchange": {"bits": 16}}))
    program = shared(config=silent, dtype=dtype)
    assert {each.dtype for each in program.buffers if "_out.p" in each.name} == {dtype}
    assert program_id(shared(config=said, dtype=dtype)) == program_id(program)


def test_what_cannot_be_shared_out_is_refused_with_the_numbers() -> None:
    for change, ranks, text in (
        ({"n_heads": 6, "n_kv_heads": 3}, 4, "n_heads=6 is not a multiple of 4"),
        ({"n_heads": 6, "n_kv_heads": 3}, 2, "n_kv_heads=3 and 2 ranks"),
        ({"intermediate": 100}, 8, "intermediate=100 is not a multiple of 8"),
        ({}, 9, "ranks 9 is not in 1..8"),
    ):
        with pytest.raises(ConfigError, match=text):
            shared(replace(SPEC, **change), ranks)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="exchange"):
        lower(decode_step(SPEC, 48), ScheduleConfig({"exchange": {"bits": 16}}), TARGET)
    for bits in (8, 32):
        with pytest.raises(ConfigError, match=f"bits={bits}: summands have the step's type .*, or leave it out$"):
            shared(config=ScheduleConfig({"exchange": {"bits": bits}}))


def test_a_program_of_several_ranks_is_the_same_after_a_file() -> None:
    program = shared(config=FUSED_CONFIG)
    text = program_to_json(program)
    again = program_from_json(text)
    assert program_to_json(again) == text
    assert (again.ranks, program_id(again)) == (2, program_id(program))
    assert validate(again, strict=True).ok


def test_each_weight_is_on_one_rank_or_on_all() -> None:
    program = shared(ranks=4)
    parts: dict[str, list[tuple[int, int]]] = {}
    for buffer in program.buffers:
        if buffer.name.startswith("L1.") and buffer.part is not None:
            axis, first = buffer.part
            parts.setdefault(buffer.name.partition("@")[0], []).append((first, buffer.shape[axis]))
    sides = {name.removeprefix("L1.").removesuffix("_proj.w") for name in parts}
    assert sides == {"q", "k", "v", "o", "gate", "up", "down"}
    for found in parts.values():
        assert sorted(first for first, _ in found) == [number * found[0][1] for number in range(4)]


def test_a_tile_is_pushed_and_added_where_it_is_made() -> None:
    program = shared(config=replace(FUSED_CONFIG, sm_assignment="load_balance"))
    places = {}
    for task in program.tasks:
        if task.label in ("L1.o_proj", "L1.attn_sum", "L1.attn_sum.push"):
            places.setdefault((task.rank, task.params["n_off"]), set()).add(task.sm)
    assert places
    assert all(len(sms) == 1 for sms in places.values())


def test_every_rank_pushes_what_it_made_to_every_other() -> None:
    program = shared(ranks=4)
    homes = {buffer.id: buffer.rank for buffer in program.buffers}
    routes = {(task.rank, homes[task.outputs[0]]) for task in program.tasks if is_push(task)}
    assert routes == {(one, other) for one in range(4) for other in range(4) if one != other}


def each_task(program: MegakernelProgram) -> MegakernelProgram:
    """The same program without runs and layers, which is proved task by task."""
    return replace(
        program, tasks=tuple(program.tasks), buffers=tuple(program.buffers), counters=tuple(program.counters)
    )


@pytest.mark.parametrize("batch", [1, 3])
def test_the_proof_of_each_task_agrees_with_that_of_runs_and_layers(batch: int) -> None:
    program = shared(ranks=4, batch=batch, config=FUSED_CONFIG)
    by_layers, by_task = validate(program, strict=True), validate(each_task(program), strict=True)
    assert (by_layers.ok, by_layers.stats) == (by_task.ok, by_task.stats) == (True, by_layers.stats)


def test_runs_that_leave_out_a_wait_or_a_push_are_refused_as_their_tasks_are() -> None:
    program = each_task(shared(config=FUSED_CONFIG))
    runs = shared(config=FUSED_CONFIG).tasks
    assert isinstance(runs, Runs)
    damaged = 0
    for place, run in enumerate(runs.runs):
        if not run.label.startswith(("L1.", "logits")) or not run.label.endswith((".push", "_sum")):
            continue
        changes = [replace(run, waits=run.waits[:left] + run.waits[left + 1 :]) for left in range(len(run.waits))]
        changes += [replace(run, inputs=run.inputs[::-1])] if len(run.inputs) > 1 else []
        changes += [replace(run, rank=1 - run.rank)]
        for change in changes:
            other = Runs([*runs.runs[:place], change, *runs.runs[place + 1 :]], runs.sms)
            damaged += 1
            for tasks in (other, tuple(other)):
                assert not validate(replace(program, tasks=tasks), strict=True).ok, change.label
    assert damaged >= 10
