from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import imagined
import pytest

from flywheel.ir import TARGETS, DType, InstructionKind, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan.nodes import make_nodes
from flywheel.plan.program import make_plan
from flywheel.plan.routine import Routine, make_routine
from flywheel.plan.rules import steps_of
from flywheel.plan.step import ABSENT, RESULT_REF, Form


def forms() -> Iterator[tuple[Form, int]]:
    """What the tasks of small models do, and the bytes of their staging areas."""
    for number in (0, 1):
        for program in imagined.programs(number, 12):
            plan = make_plan(program)
            for form in make_nodes(program, plan.grouping)[1]:
                yield form, plan.variant.staged_bytes


def routines() -> Iterator[Routine]:
    for form, staged_bytes in forms():
        yield make_routine(steps_of(form), form, DType.BF16, staged_bytes)


def test_every_product_multiplies_one_staged_operand_and_these_follow_each_other() -> None:
    for routine in routines():
        staged = [step for staging in routine.stagings for step in staging.steps]
        assert staged == list(routine.matrices)
        assert all(one.end < other.start for one, other in pairwise(routine.stagings))


def test_an_operand_that_is_staged_where_it_is_made_is_announced_by_the_step_that_makes_it() -> None:
    found = 0
    for routine in routines():
        for staging in routine.stagings:
            assert staging.start == (staging.ref - RESULT_REF if staging.in_place else staging.steps[0])
            assert not staging.scaled_later or routine.steps[staging.start].op is InstructionKind.RMSNORM
            found += staging.in_place
    assert found


def test_a_view_is_a_copy_of_columns_of_an_input_that_nobody_runs() -> None:
    views = [routine.steps[place] for routine in routines() for place in routine.views]
    assert views
    assert all(view.op is InstructionKind.COPY and view.out == ABSENT and view.args[0] < RESULT_REF for view in views)


def test_only_inputs_that_outgrow_the_area_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(step.sliced is None for routine in routines() for step in routine.steps)
    found, known = 0, list(forms())
    monkeypatch.setattr("flywheel.plan.staging.MAX_STAGED_BYTES", 160 * 2)
    for form, staged_bytes in known:
        for step in make_routine(steps_of(form), form, DType.BF16, staged_bytes).steps:
            if step.sliced is not None:
                assert step.args[0] < RESULT_REF and step.sliced <= 160 < step.params["K"]
                found += 1
            elif step.matrix:
                assert step.args[0] >= RESULT_REF or step.params["K"] <= 160
    assert found


def test_steps_that_others_do_on_the_way_are_those_right_before_an_attention() -> None:
    rows, turns = 0, 0
    for routine in routines():
        ops = [step.op for step in routine.steps]
        for turn in routine.turns:
            assert (ops[turn.rope], ops[turn.attention]) == (InstructionKind.ROPE, InstructionKind.ATTENTION_TILE)
            assert turn.rope == turn.attention - 1 and turn.norm in (None, *range(turn.rope))
            turns += 1
        if routine.new_row is not None:
            assert routine.new_row.attention == len(ops) - 1
            rows += 1
    assert rows and turns


@pytest.mark.parametrize(("kv_block", "rows"), [(64, {True}), (256, set())])
def test_the_kernel_of_an_attention_to_older_rows_reads_no_scratch_value_whose_place_may_be_taken(
    kv_block: int, rows: set[bool]
) -> None:
    spec = DecoderSpec("normed", "gemma4_text", 128, 256, 1, 4, 2, 64, 300, 1e4, 1e-6, 512, qk_norm=True, v_norm=True)
    group = ["k_norm", "v_norm", "k_rope", "k_append", "v_append", "q_norm", "q_rope", "attention"]
    config = ScheduleConfig(tiling={"attention": {"kv_block": kv_block}}, fusion_grouping=[group])
    program = lower(decode_step(spec, 256), config, TARGETS["h100"])
    plan = make_plan(program)
    made = [make_routine(steps_of(form), form, DType.BF16, plan.variant.staged_bytes)
            for form in make_nodes(program, plan.grouping)[1]]  # fmt: skip
    assert any(step.op is InstructionKind.RMSNORM and len(step.args) == 1 for each in made for step in each.steps)
    assert {each.new_row.alone for each in made if each.new_row is not None} == rows
