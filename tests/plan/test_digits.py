"""How operands are staged: the only row of products of int4 as digits, that of fp8 in a program of bf16 as F16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from flywheel.ir import TARGETS, DType, InstructionKind, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.formats import parse_formats
from flywheel.models.spec import DecoderSpec
from flywheel.plan.formats import Code
from flywheel.plan.nodes import make_nodes
from flywheel.plan.operands import Held, stagings_of
from flywheel.plan.program import make_plan
from flywheel.plan.routine import Routine, make_routine
from flywheel.plan.rules import steps_of
from flywheel.plan.step import ABSENT, RESULT_REF, Epilogue
from flywheel.vm.abi import StepFlag
from flywheel.vm.pack import pack

SPEC = DecoderSpec("small", "llama", 256, 384, 1, 4, 2, 64, 520, 1e5, 1e-5, 512)
FUSED = (("attn_norm", "q_proj", "k_proj", "v_proj"), ("mlp_norm", "gate_proj", "up_proj"))


def routines(weights: str, batch: int = 1) -> Iterator[Routine]:
    graph = decode_step(SPEC, 64, DType.BF16, batch, parse_formats(weights, "bf16"))
    program = lower(graph, ScheduleConfig(fusion_grouping=FUSED), TARGETS["h100"])
    plan = make_plan(program)
    for form in make_nodes(program, plan.grouping)[1]:
        yield make_routine(steps_of(form), form, DType.BF16, plan.variant.staged_bytes)
    assert pack(program)


HELD = {("int4", 1): Held.DIGITS, ("fp8", 1): Held.HALVES}


@pytest.mark.parametrize(("weights", "batch"), [("int4", 1), ("int4", 8), ("int8", 1), ("fp8", 1), ("fp8", 8)])
def test_one_row_of_int4_and_fp8_alone(weights: str, batch: int) -> None:
    found = 0
    for routine in routines(weights, batch):
        for staging in routine.stagings:
            quantised = all(routine.steps[step].coded is not None for step in staging.steps)
            assert staging.held is (HELD.get((weights, batch), Held.ELEMENTS) if quantised else Held.ELEMENTS)
            found += quantised
    assert found


@pytest.mark.parametrize("other", ["bf16", "fp8", "int8"])
def test_an_operand_has_products_of_one_kind(other: str) -> None:
    """Where one matrix of a model is int4 and the next one is not."""
    kinds = {Code.I4: Held.DIGITS, Code.F8: Held.HALVES}
    found = set()
    for routine in routines(f"int4,up_proj={other}"):
        for staging in routine.stagings:
            coded = [routine.steps[step].coded for step in staging.steps]
            held = {Held.ELEMENTS if each is None else kinds.get(each.coding.code, Held.ELEMENTS) for each in coded}
            assert held == {staging.held}
            found |= held
    assert found == {Held.DIGITS, Held.ELEMENTS} | ({Held.HALVES} if other == "fp8" else set())


def test_what_another_step_reads_too_is_not_made_digits_where_it_lies() -> None:
    normed = [each for each in routines("int4") if each.stagings and each.steps[0].op is InstructionKind.RMSNORM]
    routine = next(each for each in normed if each.stagings[0].held is Held.DIGITS and each.stagings[0].in_place)
    norm, product = routine.steps[0], routine.steps[routine.matrices[0]]
    product = replace(product, other=ABSENT, epilogue=Epilogue.NONE)
    assert stagings_of((norm, product), routine.form)[0].in_place
    also = replace(product, op=InstructionKind.ADD, args=(RESULT_REF, RESULT_REF), params={}, coded=None)
    (staging,) = stagings_of((norm, also, product), routine.form)
    assert staging.held is Held.DIGITS and not staging.in_place


def test_an_operand_in_digits_is_another_value_than_the_same_in_halves() -> None:
    """So a task does not take for its own what the one before it left."""
    left = {routine.left_x for routine in routines("int4,k_proj=bf16") if routine.left_x is not None}
    leaving = [routine for routine in routines("int4") if routine.left_x is not None]
    first = next(routine for routine in leaving if routine.stagings[0].held is Held.DIGITS)
    plain = next(routine for routine in routines("bf16") if routine.left_x is not None)
    assert left
    assert first.left_x is not None and plain.left_x is not None
    assert first.left_x.formula != plain.left_x.formula


@pytest.mark.parametrize(("weights", "flag"), [("int4", StepFlag.DIGITS), ("fp8", StepFlag.HALVES)])
def test_the_step_that_makes_the_operand_or_stages_it_has_the_flag(weights: str, flag: StepFlag) -> None:
    graph = decode_step(SPEC, 64, DType.BF16, 1, parse_formats(weights, "bf16"))
    packed = pack(lower(graph, ScheduleConfig(fusion_grouping=FUSED), TARGETS["h100"]))
    flagged = packed.steps[packed.steps["flags"] & int(flag) != 0]
    ops = {InstructionKind(op) for op in flagged["op"].tolist()}
    assert InstructionKind.RMSNORM in ops
    assert ops <= {InstructionKind.RMSNORM, InstructionKind.GEMV_TILE, InstructionKind.SILU_MUL}
    staging = flagged["flags"] & int(StepFlag.STAGE | StepFlag.ANNOUNCES)
    assert (staging != 0).all()
