from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.spec import DecoderSpec
from flywheel.plan.nodes import make_nodes
from flywheel.plan.program import make_plan, rank_plans
from flywheel.plan.rules import FUSIONS, KERNELS, Draft, KernelDraft, recipe_draft, rewrite, steps_of
from flywheel.plan.step import Form
from flywheel.search.workload import Workload

Groups = tuple[tuple[str, ...], ...]
SPEC = DecoderSpec("small", "qwen3", 256, 256, 1, 4, 2, 128, 800, 1e4, 1e-6, 4096, qk_norm=True)
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"), ("k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"), ("down_proj", "mlp_add"),
)  # fmt: skip
APART = (("q_rope", "attention"), *FUSED[2:])
TARGET = replace(TARGETS["h200"], name="few", num_sms=6)


def forms(weights: str | None = None, ranks: int = 1, batch: int = 1, fused: Groups = FUSED) -> Iterator[Form]:
    work = Workload("small", SPEC, TARGET, "bf16", 64, batch, weights, ranks)
    program = lower(work.graph, ScheduleConfig(fusion_grouping=fused), TARGET)
    for plan in (make_plan(program),) if ranks == 1 else rank_plans(program):
        yield from make_nodes(plan.program, plan.grouping)[1]


ALL = [*forms(), *forms("int4"), *forms(ranks=2), *forms(batch=3), *forms(fused=APART)]


@pytest.mark.parametrize("place", range(len(FUSIONS)), ids=[rule.name for rule in FUSIONS])
def test_every_rule_makes_fewer_steps_of_some_task(place: int) -> None:
    shorter = 0
    for form in ALL:
        if form.recipe is not None:
            draft = rewrite(recipe_draft(form), FUSIONS[:place])
            before = len(draft.steps)
            assert len(rewrite(draft, FUSIONS[place : place + 1]).steps) <= before
            shorter += len(draft.steps) < before
    assert shorter


def test_no_rule_finds_more_in_what_the_list_made() -> None:
    for form in ALL:
        steps = dict(enumerate(steps_of(form)))
        assert rewrite(Draft(form, dict(steps)), FUSIONS).steps == steps


@pytest.mark.parametrize("place", range(len(KERNELS)), ids=[rule.name for rule in KERNELS])
def test_every_rule_lets_some_kernel_compute_other_steps(place: int) -> None:
    found = 0
    for form in ALL:
        draft = rewrite(KernelDraft(form, dict(enumerate(steps_of(form))), DType.BF16, frozenset()), KERNELS[:place])
        before = len(draft.views), draft.new_row, len(draft.turns)
        rewrite(draft, KERNELS[place : place + 1])
        found += before != (len(draft.views), draft.new_row, len(draft.turns))
    assert found
