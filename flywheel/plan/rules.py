"""What one kernel does for several operations of a task: rewrite rules of its steps, in two lists.

FUSIONS turn the operations of a recipe into fewer steps. KERNELS say which steps the kernel of another step computes.
`rewrite` tries each rule of a list, in order, at each step with one of its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from flywheel.ir import DType, InstructionKind
from flywheel.ir.operations import APPENDS, ATTENTIONS, GATES, PRODUCTS
from flywheel.ir.recipe import Scratch, Target
from flywheel.plan.formats import coding_of
from flywheel.plan.new_row import NewRow, find_new_row
from flywheel.plan.step import (
    ABSENT,
    RESULT_REF,
    Epilogue,
    Form,
    MatrixCoding,
    PlannedStep,
    StepOperand,
    copied_rows,
    names_columns,
)
from flywheel.plan.turning import Turn, find_turn

_K = InstructionKind


@dataclass(slots=True)
class Draft:
    """A task's steps while rules rewrite them, by place. Refs count these places from RESULT_REF."""

    form: Form
    steps: dict[int, PlannedStep]

    def made(self, ref: int) -> PlannedStep | None:
        """The step that makes a scratch result; None for an input."""
        return self.steps.get(ref - RESULT_REF)

    def readers(self, ref: int) -> int:
        """How often steps read a value."""
        return sum([step.reads.count(ref) for step in self.steps.values()])


@dataclass(slots=True)
class KernelDraft(Draft):
    """Also what Routine says of the steps, as far as it is known. `in_place` are steps that stage their result."""

    dtype: DType
    in_place: AbstractSet[int]
    views: set[int] = field(default_factory=set)
    new_row: NewRow | None = None
    turns: list[Turn] = field(default_factory=list)


D = TypeVar("D", bound=Draft)


@dataclass(frozen=True, slots=True)
class RewriteRule(Generic[D]):
    """A rule, tried at each step with one of `ops`. `makes` changes the draft if the step at that place matches."""

    name: str
    ops: frozenset[InstructionKind]
    makes: Callable[[D, int], None]


def rewrite(draft: D, rules: Sequence[RewriteRule[D]]) -> D:
    """The draft, after each rule was tried at each step in order."""
    for rule in rules:
        for place in sorted(draft.steps):
            if place in draft.steps and draft.steps[place].op in rule.ops:
                rule.makes(draft, place)
    return draft


def steps_of(form: Form) -> list[PlannedStep]:
    """The steps of a task. Operations that one kernel does together are one step."""
    if form.op is _K.NOP:
        return []
    if form.recipe is None:
        result = replace(form.outputs[0], kind=None)
        return [PlannedStep(form.op, tuple(range(len(form.inputs))), form.own, 0, result)]
    return _renumbered(rewrite(recipe_draft(form), FUSIONS).steps)


def recipe_draft(form: Form) -> Draft:
    """The steps of a FUSED task by their place in its recipe."""
    assert form.recipe is not None
    made: dict[Target, int] = {}
    steps: dict[int, PlannedStep] = {}
    for index, each in enumerate(form.recipe.steps):
        args = tuple(made[arg] if isinstance(arg, Scratch) else arg.number for arg in each.args)
        result, place = StepOperand(each.dtype, each.shape), ABSENT
        if isinstance(each.out, Scratch):
            made[each.out] = RESULT_REF + index
        else:
            place = each.out.number
            if each.op in APPENDS:  # writes the appended rows only, and rounds once
                result = replace(form.outputs[place], kind=None)
        steps[index] = PlannedStep(each.op, args, each.params, place, result)
    return Draft(form, steps)


def _renumbered(steps: dict[int, PlannedStep]) -> list[PlannedStep]:
    """The remaining steps in order, with refs renumbered."""
    places = {RESULT_REF + index: RESULT_REF + place for place, index in enumerate(sorted(steps))}
    return [
        replace(
            step,
            args=tuple(places.get(ref, ref) for ref in step.args),
            other=places.get(step.other, step.other),
        )
        for _, step in sorted(steps.items())
    ]


def _take_codes(draft: Draft, place: int) -> None:
    """Turn a product of rows that a DEQUANT makes into a product with the quantised matrix's rows."""
    form, step = draft.form, draft.steps[place]
    maker = draft.made(step.args[1])
    if maker is None or maker.op is not _K.DEQUANT or sum(
        [each.args[1] == step.args[1] for each in draft.steps.values() if each.matrix]
    ) != 1:
        return
    if step.params.get("n_off") != 0 or any(ref >= RESULT_REF for ref in maker.args):
        return
    bias = [_copied_columns(draft, ref) for ref in step.args[2:]]
    if ABSENT in bias:
        return
    q, scales, *zeros = (form.inputs[ref] for ref in maker.args)
    zero = zeros[0].dtype if zeros else None
    coding = coding_of(q.dtype, (scales.dtype, scales.shape), zero, maker.params, int(step.params["K"]))
    params = {name: value for name, value in step.params.items() if name not in ("n_off", "N_tile")}
    params |= {name: maker.params[name] for name in ("n_off", "N_tile") if name in maker.params}
    coded = MatrixCoding(
        coding, maker.args[1], maker.args[2] if zeros else ABSENT,
        int(maker.params["group"]), int(maker.params.get("rows_per_scale", 1)),
    )  # fmt: skip
    draft.steps[place] = replace(step, args=(step.args[0], maker.args[0], *bias), params=params, coded=coded)
    for ref in step.args[1:]:
        del draft.steps[ref - RESULT_REF]


def _take_shards(draft: Draft, place: int) -> None:
    """Turn a sum of copied columns into a sum of the inputs. The kernel selects the columns itself."""
    step = draft.steps[place]
    inputs = [_copied_columns(draft, ref, draft.form.rows) for ref in step.args]
    if step.out != 0 or ABSENT in inputs:
        return
    draft.steps[place] = replace(step, args=tuple(inputs))
    for ref in step.args:
        del draft.steps[ref - RESULT_REF]


def _copied_columns(draft: Draft, ref: int, rows: int = 1) -> int:
    """The input whose own columns, in `rows` rows, a COPY copies unrounded for one step alone; ABSENT if there is
    none."""
    form, copied = draft.form, draft.made(ref)
    if copied is None or copied.op is not _K.COPY or copied.args[0] >= RESULT_REF or not form.columns:
        return ABSENT
    own = {"n_off", "N_tile"} & copied.params.keys() or copied_rows(copied) != rows or draft.readers(ref) != 1
    exact = copied.result.dtype is form.inputs[copied.args[0]].dtype
    return copied.args[0] if exact and not own and form.written[copied.args[0]] is None else ABSENT


def _take_residual(draft: Draft, place: int) -> None:
    """Let the product of the task's columns add a COPY of those of an input."""
    step = draft.steps[place]
    if len(step.args) > 2:
        return
    for product, other in (step.args, step.args[::-1]):
        if _adds(draft, step, product, other):
            copied = draft.steps.pop(other - RESULT_REF)
            _absorb(draft, place, product, Epilogue.ADD, copied.args[0])
            return


def _take_gate(draft: Draft, place: int) -> None:
    """Let the product of the up projection apply the gate, a scratch value; or the activation that no gate has."""
    step = draft.steps[place]
    if len(step.args) == 1:
        if _takes(draft, step, step.args[0]):
            _absorb(draft, place, step.args[0], Epilogue.GELU, ABSENT)
        return
    gate, product = step.args
    if draft.made(gate) is not None and gate != product and _takes(draft, step, product):
        _absorb(draft, place, product, Epilogue[step.op.name], gate)


def _absorb(draft: Draft, place: int, product: int, epilogue: Epilogue, other: int) -> None:
    """Make a step the epilogue of the matrix step that makes `product`. The matrix step moves to its place."""
    last, matrix = draft.steps[place], draft.steps.pop(product - RESULT_REF)
    draft.steps[place] = replace(matrix, out=last.out, epilogue=epilogue, other=other)


def _takes(draft: Draft, step: PlannedStep, product: int) -> bool:
    """Whether a matrix step makes `product` for `step` alone, and rounding it before the sum is stored loses
    nothing."""
    form, matrix = draft.form, draft.made(product)
    if matrix is None or not matrix.matrix or draft.readers(product) != 1 or matrix.epilogue is not Epilogue.NONE:
        return False
    if step.result.numel != matrix.result.numel:
        return False
    if any(ref < RESULT_REF and form.written[ref] is not None for ref in matrix.args):
        return False  # the product moves to the place of `step`, past the writer of that input
    if step.out == ABSENT:
        return step.result.dtype is matrix.result.dtype
    return step.result.dtype in (DType.F32, form.outputs[step.out].dtype)


def _adds(draft: Draft, step: PlannedStep, product: int, other: int) -> bool:
    """Whether `other` copies the task's own columns of an input, and the matrix step of the same columns and rows can
    add them."""
    form, copied = draft.form, draft.made(other)
    if copied is None or copied.op is not _K.COPY or draft.readers(other) != 1 or copied.args[0] >= RESULT_REF:
        return False
    if not form.columns or {"n_off", "N_tile"} & copied.params.keys() or not _takes(draft, step, product):
        return False
    matrix, source, rows = draft.steps[product - RESULT_REF], form.inputs[copied.args[0]], copied_rows(copied)
    x = draft.made(matrix.args[0])
    numel = form.inputs[matrix.args[0]].numel if x is None else x.result.numel
    if {"n_off", "N_tile"} & matrix.params.keys() or matrix.result.rows != rows:
        return False
    if numel // int(matrix.params["K"]) != rows:
        return False
    return form.written[copied.args[0]] is None and copied.result.dtype in (source.dtype, DType.F32)


FUSIONS: Final[Sequence[RewriteRule[Draft]]] = (
    RewriteRule("codes", PRODUCTS, _take_codes),
    RewriteRule("shards", frozenset({_K.ALLREDUCE_SHARD}), _take_shards),
    RewriteRule("residual", frozenset({_K.ADD}), _take_residual),
    RewriteRule("gate", GATES, _take_gate),
)
"""What makes one step of several operations."""


def _view(draft: KernelDraft, place: int) -> None:
    """Let the readers of a COPY of columns of an input that the task does not write read them in the input."""
    form, step = draft.form, draft.steps[place]
    if place in draft.in_place or not names_columns(step, form) or step.out != ABSENT or step.args[0] >= RESULT_REF:
        return
    source = form.inputs[step.args[0]]
    if source.dtype is step.result.dtype and source.dtype is not DType.I4 and form.written[step.args[0]] is None:
        draft.views.add(place)


def _new_row(draft: KernelDraft, place: int) -> None:
    """Let one kernel make the new row of a KV head; see `find_new_row`."""
    if place == len(draft.steps) - 1:
        draft.new_row = find_new_row(list(draft.steps.values()), draft.form, draft.dtype, draft.views)


def _turn(draft: KernelDraft, place: int) -> None:
    """Let an attention apply RoPE to its queries; see `find_turn`."""
    if not 0 < place < (len(draft.steps) if draft.new_row is None else draft.new_row.key_rope):
        return
    turn = find_turn(place, list(draft.steps.values()), draft.form, draft.dtype, draft.views)
    if turn is not None:
        draft.turns.append(turn)


KERNELS: Final[Sequence[RewriteRule[KernelDraft]]] = (
    RewriteRule("view", frozenset({_K.COPY}), _view),
    RewriteRule("new row", ATTENTIONS, _new_row),
    RewriteRule("turn", ATTENTIONS, _turn),
)
"""What a step's kernel does for other steps."""
