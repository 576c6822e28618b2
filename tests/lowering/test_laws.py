"""What every lowered program is, whatever the model, the GPU and the config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flywheel.ir import (
    ABI_MAX_INPUTS,
    ABI_MAX_OUTPUTS,
    ABI_MAX_WAITS,
    TARGETS,
    BufferKind,
    GpuTarget,
    InstructionKind,
    MegakernelProgram,
    ScheduleConfig,
    Task,
    at_position,
    program_from_json,
    program_to_json,
    validate,
)
from flywheel.ir.recipe import Input, recipe_steps
from flywheel.ir.simulate import simulate_adversarial, simulate_counters
from flywheel.ir.window import in_rows
from flywheel.lowering.fusion import patterns_of
from flywheel.lowering.lower import lower
from flywheel.measure.floor import weight_bytes_read
from flywheel.models.decoder import DTYPES, decode_step
from flywheel.models.families import count_params, layer_weight_shapes
from flywheel.models.rope import Rope, RopeScaling
from flywheel.models.spec import DecoderSpec, model_weight_shapes
from flywheel.plan import program_id
from flywheel.search.space import make_space
from flywheel.search.workload import Workload

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
TWO_SMS = replace(TARGETS["h100"], name="two", num_sms=2)
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": SCALING},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"turned": (True, False), "o_bias": True, "mlp_bias": True},
    "phi3": {"rotary_dim": 2},
    "cohere2": {"norms": "shared", "logits_scale": 0.5},
    "starcoder2": {"norm": "layer", "gated": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "granite": {"embed_scale": 6.0, "residual_scale": 0.22, "attention_scale": 0.1, "logits_scale": 0.125},
    "olmo3": {"norms": "behind", "wide_qk_norm": True, "qk_norm": True, "local_rope": Rope(3e2)},
    "gemma2": {
        "norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh", "attention_cap": 2.0, "logits_cap": 2.0
    },
    "gemma3_text": {"norms": "around", "embed_scale": 3.0, "qk_norm": True, "local_rope": Rope(1e2)},
    "gemma4_text": {
        "norms": "around", "qk_norm": True, "v_norm": True, "layer_scalar": True, "full_head_dim": 24,
        "full_kv_heads": 1, "full_k_is_v": True,
    },
}


@dataclass(frozen=True)
class Case:
    """A model, what to do with it, and the program that came of it."""

    spec: DecoderSpec
    context: int
    dtype: str
    target: GpuTarget
    config: ScheduleConfig

    @property
    def program(self) -> MegakernelProgram:
        return lower(decode_step(self.spec, self.context, DTYPES[self.dtype]), self.config, self.target)


@st.composite
def specs(draw: st.DrawFn) -> DecoderSpec:
    """Small decoders of every family, in sizes that are multiples of little."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    n_layers = draw(st.integers(1, 3))
    windowed = draw(st.lists(st.booleans(), min_size=n_layers, max_size=n_layers))
    n_kv_heads = draw(st.integers(1, 4))
    own = {name: value for name, value in FAMILIES[family].items() if draw(st.booleans())}
    if not own.get("gated", True):
        own["activation"] = "gelu_tanh"  # the only one without a gate
    return DecoderSpec(
        name="small",
        family=family,  # type: ignore[arg-type]
        hidden=draw(st.integers(8, 200)),
        intermediate=draw(st.integers(8, 400)),
        n_layers=n_layers,
        n_heads=n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=n_kv_heads,
        head_dim=draw(st.sampled_from((2, 6, 16, 40))),
        vocab=draw(st.integers(2, 5000)),
        rope_theta=1e4,
        norm_eps=1e-5,
        max_position=8192,
        tied_head=draw(st.booleans()),
        window=draw(st.integers(1, 600)) if any(windowed) else None,
        windowed=tuple(windowed),
        **own,
    )


@st.composite
def searched(draw: st.DrawFn, workload: Workload) -> ScheduleConfig:
    """Any point of the search space."""
    space = make_space(workload)
    return space.to_config({dim.name: draw(st.sampled_from(dim.values)) for dim in space.dimensions})


@st.composite
def groupings(draw: st.DrawFn, workload: Workload) -> list[tuple[str, ...]]:
    """Any compatible runs that fuse, in any order of names."""
    graph = workload.graph
    patterns = [pattern for block in (graph.kinds[0], graph.epilogue) for pattern in patterns_of(graph, block)]
    taken: set[str] = set()
    groups = []
    for pattern in draw(st.permutations(patterns)):
        if draw(st.booleans()):
            continue
        names = {
            *pattern.before[draw(st.integers(0, len(pattern.before))) :],
            *pattern.anchors,
            *pattern.after[: draw(st.integers(0, len(pattern.after)))],
        }
        if not names & taken:
            taken |= names
            groups.append(tuple(draw(st.permutations(sorted(names)))))
    return groups


@st.composite
def foreign(draw: st.DrawFn, workload: Workload) -> ScheduleConfig:
    """Configs that lower, most of them outside the search space."""
    rows = st.integers(1, 40).map(lambda count: {"N_tile": 16 * count})
    products = [f"gemv.{name}" for name in PROJECTIONS if name != "gate_proj" or workload.spec.gated]
    tiling: dict[str, Mapping[str, int]] = draw(st.dictionaries(st.sampled_from(["gemv", *products]), rows))
    groups = draw(groupings(workload))
    if any("gate_proj" in group and {"silu_mul", "gelu_mul"} & {*group} for group in groups):
        tiling = {**tiling, "gemv.gate_proj": {"N_tile": 48}, "gemv.up_proj": {"N_tile": 48}}
    blocks = draw(st.integers(1, 60))
    whole = any({"k_append", "attention"} <= {*group} for group in groups)
    if whole or draw(st.booleans()):
        size = -(-workload.context // (16 * (1 if whole else blocks))) * 16
        tiling = {**tiling, "attention": {"kv_block": size}}
    if draw(st.booleans()):
        tiling = {**tiling, "stream": {"chunk_bytes": 1024 * draw(st.integers(1, 16))}}
    config = ScheduleConfig(
        tiling=tiling,
        fusion_grouping=groups,
        sm_assignment=draw(st.sampled_from(("load_balance", "round_robin"))),
        pipelining_depth=draw(st.integers(0, 1024)),
        threads_per_block=32 * draw(st.integers(4, 32)),
    )
    if draw(st.booleans()):
        return config
    last = len(lower(workload.graph, config, workload.target).tasks) - 1
    sms = st.integers(0, workload.target.num_sms - 1)
    return replace(config, sm_assignment=draw(st.dictionaries(st.integers(0, last), sms, max_size=30)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A model, a context, a GPU and a config."""
    context = draw(st.one_of(st.just(1), st.integers(2, 200), st.just(512), st.integers(2000, 5000)))
    target = draw(st.sampled_from([TWO_SMS, *TARGETS.values()]))
    workload = Workload("small", draw(specs()), target, draw(st.sampled_from(sorted(DTYPES))), context)
    config = draw(st.one_of(st.just(ScheduleConfig()), searched(workload), foreign(workload)))
    return Case(workload.spec, context, workload.dtype, target, config)


def steps(task: Task) -> Iterator[tuple[str, list[int | None], Mapping[str, Any]]]:
    """(op, buffers that it reads, params) of what a task does; None for scratch."""
    if task.op is not InstructionKind.FUSED:
        yield task.op.name, list(task.inputs), task.params
        return
    for step in recipe_steps(task):
        read = [task.inputs[arg.number] if isinstance(arg, Input) else None for arg in step.args]
        yield step.op.name, read, {**task.params, **step.params}


def does(task: Task, op: str) -> bool:
    return any(name == op for name, _, _ in steps(task))


@given(cases())
def test_every_program_is_proved(case: Case) -> None:
    result = validate(case.program, strict=True)
    assert result.ok, result.report()
    assert not result.warnings


@given(cases())
def test_every_program_is_numbered_by_position_and_within_the_abi(case: Case) -> None:
    program = case.program
    for records in (program.tasks, program.buffers, program.counters):
        assert [record.id for record in records] == list(range(len(records)))
    for task in program.tasks:
        assert len(task.inputs) <= ABI_MAX_INPUTS
        assert len(task.outputs) <= ABI_MAX_OUTPUTS
        assert len(task.waits) <= ABI_MAX_WAITS
        assert task.sm is not None


@given(cases())
def test_inputs_weights_and_outputs_are_one_buffer_each(case: Case) -> None:
    buffers = case.program.buffers
    names = {kind: [b.name for b in buffers if b.kind is kind] for kind in BufferKind}
    assert names[BufferKind.IO_INPUT] == ["token_id", "position"]
    assert names[BufferKind.IO_OUTPUT] == ["logits", "next_token"]
    assert len({b.name for b in buffers}) == len(buffers)
    sources = [b.source for b in buffers if b.kind is BufferKind.WEIGHT]
    assert None not in sources
    assert len(set(sources)) == len(sources)
    used = {number for task in case.program.tasks for number in (*task.inputs, *task.outputs)}
    assert used == {b.id for b in buffers}
    parameters = sum(b.numel for b in buffers if b.kind is BufferKind.WEIGHT)
    assert parameters == count_params(case.spec)


@given(cases())
def test_no_firing_order_reads_too_early(case: Case) -> None:
    program = case.program
    assert simulate_adversarial(program, seeds=3) == []
    assert simulate_counters(program)[1] == []


@given(cases())
def test_every_program_survives_the_file_format(case: Case) -> None:
    program = case.program
    text = program_to_json(program, indent=None)
    again = program_from_json(text)
    assert program_to_json(again, indent=None) == text == program_to_json(case.program, indent=None)
    assert program_id(again) == program_id(program)
    assert again.config is not None
    assert again.config.config_id == case.config.config_id


@given(cases())
def test_every_row_of_every_projection_is_computed_once(case: Case) -> None:
    program = case.program
    spans: dict[int, list[tuple[int, int]]] = {}
    for task in program.tasks:
        for op, read, params in steps(task):
            if op == "GEMV_TILE":
                assert read[1] is not None
                spans.setdefault(read[1], []).append((params["n_off"], params["N_tile"]))
    assert len(spans) == (6 + case.spec.gated) * case.spec.n_layers + 1
    for weight, tiles in spans.items():
        assert partitions(tiles, program.buffers[weight].shape[0])


def partitions(spans: list[tuple[int, int]], end: int) -> bool:
    """Whether the (start, length) spans cover 0..end, each position once."""
    edge = 0
    for start, length in sorted(spans):
        if start != edge or length < 1:
            return False
        edge += length
    return edge == end


@given(cases())
def test_every_weight_byte_is_streamed_once(case: Case) -> None:
    program, spec = case.program, case.spec
    element = DTYPES[case.dtype].bits // 8
    streamed = sum(task.est_bytes for task in program.tasks if does(task, "GEMV_TILE"))
    layers = [layer_weight_shapes(spec, layer) for layer in range(spec.n_layers)]
    of_layers = sum(shape[0] for shapes in layers for shape in shapes.values() if len(shape) == 1)
    of_model = sum(shape[0] for shape in model_weight_shapes(spec).values() if len(shape) == 1)
    row = 0 if spec.tied_head else spec.hidden
    assert streamed + element * (of_layers + of_model + row) == weight_bytes_read(program)
    matrices = [b for b in program.buffers if b.kind is BufferKind.WEIGHT and len(b.shape) == 2]
    table = program.buffers[program.tasks[0].inputs[1]]
    assert streamed == sum(b.nbytes for b in matrices) - (0 if spec.tied_head else table.nbytes)


@given(cases())
def test_every_projection_is_shared_by_all_sms(case: Case) -> None:
    if not isinstance(case.config.sm_assignment, str):
        return
    together = next((group for group in case.config.fusion_grouping if "q_proj" in group), ())
    users: dict[str, list[int | None]] = {}
    for task in case.program.tasks:
        if does(task, "GEMV_TILE"):
            layer, _, name = task.label.rpartition(".")
            stage = "qkv" if name in together else name
            users.setdefault(f"{layer}.{stage}", []).append(task.sm)
    for sms in users.values():
        assert len(set(sms)) == min(case.target.num_sms, len(sms))


@given(cases())
def test_kv_blocks_partition_the_context_and_partials_are_merged(case: Case) -> None:
    program = case.program
    spans: dict[int, list[tuple[int, int]]] = {}
    merged: dict[int, int] = {}
    for task in program.tasks:
        for op, read, params in steps(task):
            if op == "ATTENTION_TILE":
                assert read[1] is not None
                rows = in_rows(params)
                spans.setdefault(read[1], []).append((rows["kv_start"], rows["kv_len"]))
        if does(task, "ATTENTION_COMBINE"):
            for number in task.inputs:
                merged[number] = merged.get(number, 0) + 1
    assert len(spans) == case.spec.n_layers * case.spec.n_kv_heads
    several = []
    for layer, number in enumerate(sorted(spans)):
        seen = min(case.context, case.spec.window_of(layer // case.spec.n_kv_heads) or case.context)
        first = case.context - seen
        assert partitions([(start - first, length) for start, length in spans[number]], seen)
        several.append((seen, len(spans[number])))
    assert len(set(several)) == len({seen for seen, _ in several})
    partials = [b.id for b in program.buffers if "partial." in b.name]
    assert bool(partials) == any(count > 1 for _, count in several)
    assert all(number in merged for number in partials)


@given(cases())
def test_every_kv_head_reads_its_own_columns(case: Case) -> None:
    program = case.program
    columns: dict[int, set[tuple[int, int]]] = {}
    for task in program.tasks:
        cut = [(read[0], params) for op, read, params in steps(task) if op == "COPY"]
        if not (does(task, "ATTENTION_TILE") or does(task, "KV_APPEND") or task.label.endswith("attn_combine")):
            continue
        caches = {
            program.buffers[number].name.rpartition(".h")[2] for number in task.inputs if is_cache(program, number)
        }
        head = int(caches.pop()) if caches else task.params.get("n_off", 0) // task.params.get("N_tile", 1)
        assert not caches
        assert "n_off" not in task.params or task.params["n_off"] == head * task.params["N_tile"]
        for number, params in cut:
            assert number is not None
            assert params["n_off"] == head * params["N_tile"]
            columns.setdefault(number, set()).add((params["n_off"], params["N_tile"]))
    for number, spans in columns.items():
        assert partitions(list(spans), program.buffers[number].shape[-1])


def is_cache(program: MegakernelProgram, number: int) -> bool:
    return program.buffers[number].kind is BufferKind.KV_CACHE


@given(cases(), st.data())
def test_every_program_can_be_moved_along_the_sequence(case: Case, data: st.DataObject) -> None:
    program = case.program
    for pos in {0, case.context - 1, data.draw(st.integers(0, case.context - 1))}:
        moved = at_position(program, pos)
        result = validate(moved, strict=True)
        assert result.ok, result.report()
        read = [in_rows(task.params) for task in moved.tasks if task.params.get("kv_len")]
        assert max(each["kv_start"] + each["kv_len"] for each in read) == pos + 1
    assert at_position(program, case.context - 1).tasks == program.tasks
