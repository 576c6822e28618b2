from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product

import pytest
from fusing import PATTERNS

from flywheel.errors import ConfigError
from flywheel.ir import InstructionKind, MegakernelProgram, Task, validate
from flywheel.lowering.fusion import Pattern, plan_fusion
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan import program_id

Lowered = Callable[..., MegakernelProgram]

WHOLE = {"attention": {"kv_block": 64}}
SPLIT = {"attention": {"kv_block": 16}}


def runs(pattern: Pattern) -> list[tuple[str, ...]]:
    """Every run that a pattern admits in a model that has all its operations."""
    heads = [pattern.before[start:] for start in range(len(pattern.before) + 1)]
    tails = [pattern.after[:end] for end in range(len(pattern.after) + 1)]
    return [tuple(dict.fromkeys((*head, *pattern.anchors, *tail))) for head, tail in product(heads, tails)]


def kinds(task: Task) -> list[str]:
    """Primitive operations of a task, without the copies that cut columns."""
    if task.op is not InstructionKind.FUSED:
        return [task.op.name]
    return [step.op.name for step in task.params["recipe"].steps if step.op.name != "COPY"]


@pytest.mark.parametrize("tiling", [WHOLE, SPLIT], ids=["whole", "split"])
@pytest.mark.parametrize("name", sorted(PATTERNS))
def test_every_run_of_every_pattern_lowers_alone(
    name: str, tiling: dict[str, dict[str, int]], lowered: Lowered, spec: DecoderSpec
) -> None:
    plain = lowered(tiling=tiling)
    for run in runs(PATTERNS[name]):
        program = lowered(tiling=tiling, fusion_grouping=[run])
        result = validate(program, strict=True)
        assert result.ok, result.report()
        more = 1 if name == "append+attention" and tiling is SPLIT else 0  # a partial of the new row
        assert len(program.tasks) <= len(plain.tasks)
        assert len(program.buffers) <= len(plain.buffers) + more * spec.n_layers


@pytest.mark.parametrize(
    ("grouping", "label", "operations"),
    [
        (("attn_norm", "q_proj", "k_proj", "v_proj"), "k_proj", ["RMSNORM", "GEMV_TILE"]),
        (("k_norm", "k_rope", "k_append", "v_append"), "kv_append", ["RMSNORM", "ROPE", "KV_APPEND", "KV_APPEND"]),
        (("q_norm", "q_rope", "attention"), "attention", ["RMSNORM", "ROPE", "ATTENTION_TILE"]),
        (("attn_combine", "o_proj", "attn_add"), "o_proj", ["ATTENTION_COMBINE", "GEMV_TILE", "ADD"]),
        (
            ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
            "gate_proj",
            ["RMSNORM", "GEMV_TILE", "GEMV_TILE", "SILU_MUL"],
        ),
        (("down_proj", "mlp_add"), "down_proj", ["GEMV_TILE", "ADD"]),
    ],
)
def test_a_group_becomes_one_recipe_in_execution_order(
    grouping: tuple[str, ...], label: str, operations: list[str], lowered: Lowered
) -> None:
    program = lowered(tiling=SPLIT, fusion_grouping=[tuple(reversed(grouping))])
    fused = [task for task in program.tasks if task.label == f"L1.{label}"]
    assert fused
    assert all(kinds(task) == operations for task in fused)
    gone = {f"L1.{name}" for name in grouping} - {f"L1.{label}"}
    siblings = {"L1.q_proj", "L1.k_proj", "L1.v_proj"}
    assert not gone - siblings & {task.label for task in program.tasks}


def test_each_operation_runs_once_however_it_is_fused(lowered: Lowered, spec: DecoderSpec) -> None:
    every = [run for name, pattern in PATTERNS.items() if name != "append+attention" for run in runs(pattern)[:1]]
    plain, fused = lowered(tiling=SPLIT), lowered(tiling=SPLIT, fusion_grouping=every)
    counts = [Counter(kind for task in program.tasks for kind in kinds(task)) for program in (plain, fused)]
    for name in ("EMBED", "KV_APPEND", "ATTENTION_TILE", "SAMPLE_ARGMAX"):
        assert counts[0][name] == counts[1][name]
    appended = spec.n_layers * spec.n_kv_heads * 2
    assert counts[0]["KV_APPEND"] == appended


def test_attention_to_the_past_waits_for_no_append_and_the_new_row_for_no_past(lowered: Lowered) -> None:
    grouping = [("q_norm", "k_norm", "q_rope", "k_rope", "k_append", "v_append", "attention")]
    program = lowered(tiling=SPLIT, fusion_grouping=grouping)
    tasks = [task for task in program.tasks if task.label == "L1.attention"]
    windows = {(task.params["kv_rows"], task.params["kv_start"], task.params["kv_len"]) for task in tasks}
    assert windows == {(1, 0, 16), (1, 16, 16), (1, 32, 16), (1, 48, 15), (2, 63, 1)}
    signals = {task.out_counter for task in tasks}
    assert not signals & {wait.counter for task in tasks for wait in task.waits}
    appends = [task for task in tasks if "KV_APPEND" in kinds(task)]
    assert {task.params["kv_rows"] for task in appends} == {2}
    norms, row = ["RMSNORM", "RMSNORM"], ["ROPE", "KV_APPEND", "KV_APPEND", "ROPE", "ATTENTION_TILE"]
    assert all(kinds(task) == [*norms, *row] for task in appends)
    assert {len(task.outputs) for task in appends} == {3}


def test_a_block_of_nothing_but_the_new_row_has_no_past(lowered: Lowered) -> None:
    grouping = [("q_norm", "k_norm", "q_rope", "k_rope", "k_append", "v_append", "attention")]
    program = lowered(context=33, tiling=SPLIT, fusion_grouping=grouping)
    names = {buffer.name for buffer in program.buffers if buffer.name.startswith("L1.partial.")}
    assert names == {"L1.partial.b0", "L1.partial.b1", "L1.partial.new"}
    assert validate(program, strict=True).ok


def test_groups_of_one_and_names_in_any_order_change_nothing(lowered: Lowered) -> None:
    alone = lowered(fusion_grouping=[["attention"], ["embed"], [], ["attn_combine"]])
    assert program_id(alone) == program_id(lowered())
    first = lowered(fusion_grouping=[["down_proj", "mlp_add"], ["final_norm", "lm_head"]])
    second = lowered(fusion_grouping=[["lm_head", "final_norm"], ["mlp_add", "down_proj"]])
    assert program_id(first) == program_id(second)


def test_merging_in_the_output_projection_leaves_one_context_block_alone(lowered: Lowered) -> None:
    merging, adding = (("attn_combine", "o_proj", "attn_add"), ("o_proj", "attn_add"))
    one = [program_id(lowered(tiling=WHOLE, fusion_grouping=[group])) for group in (merging, adding)]
    assert one[0] == one[1]
    four = [program_id(lowered(tiling=SPLIT, fusion_grouping=[group])) for group in (merging, adding)]
    assert four[0] != four[1]


def test_norms_that_a_model_lacks_are_unknown_to_it(spec: DecoderSpec) -> None:
    plain = decode_step(DecoderSpec("plain", "llama", 64, 96, 1, 2, 2, 16, 32, 1e4, 1e-5, 64), 8)
    with pytest.raises(ConfigError, match=r"fusion_grouping\[0\]: plain has no operation 'k_norm'"):
        plan_fusion(plain, [["k_norm", "k_rope", "k_append", "v_append"]])
    _, layer, _ = plan_fusion(plain, [["k_rope", "k_append", "v_append"], ["q_rope", "attention"]])
    assert [group.names for group in layer if len(group.ops) > 1] == [
        ("k_rope", "k_append", "v_append"),
        ("q_rope", "attention"),
    ]
    # A run must not leave out an operation in its middle.
    with pytest.raises(ConfigError, match="no kernel fuses q_norm, attention"):
        plan_fusion(decode_step(spec, 8), [["q_norm", "attention"]])


@pytest.mark.parametrize(
    ("blocks", "levels", "merging_levels"),
    [
        (2, [1], []),
        (6, [1], []),
        (7, [1], [2]),
        (8, [1], [2]),
        (9, [2, 1], [2]),
        (64, [8, 1], [8, 2]),
        (65, [9, 2, 1], [9, 2]),
    ],
)
def test_partials_are_merged_in_a_tree(
    blocks: int, levels: list[int], merging_levels: list[int], lowered: Lowered
) -> None:
    def merges(fusion_grouping: tuple[tuple[str, ...], ...]) -> list[int]:
        """Merges by level of the tree, for one layer and KV head."""
        program = lowered(context=16 * blocks, tiling={"attention": {"kv_block": 16}}, fusion_grouping=fusion_grouping)
        outputs = [program.buffers[task.outputs[0]].name for task in program.tasks if task.label == "L0.attn_combine"]
        depth = Counter(name.split(".")[2] if "partial" in name else "top" for name in outputs)
        return [depth[level] // 2 for level in (*sorted(depth.keys() - {"top"}), "top") if depth[level]]

    assert merges(()) == levels
    assert merges((("attn_combine", "o_proj"),)) == merging_levels


def test_partials_hold_a_maximum_and_a_sum_behind_each_head(lowered: Lowered, spec: DecoderSpec) -> None:
    program = lowered(tiling=SPLIT)
    partials = [buffer for buffer in program.buffers if "partial." in buffer.name]
    assert {tuple(buffer.shape) for buffer in partials} == {(1, spec.n_heads * (spec.head_dim + 2))}
    assert {buffer.dtype.name for buffer in partials} == {"F32"}
