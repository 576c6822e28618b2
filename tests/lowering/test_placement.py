from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from flywheel.ir import MegakernelProgram, validate
from flywheel.lowering import placement
from flywheel.lowering.placement import TASK_COST_BYTES

Lowered = Callable[..., MegakernelProgram]

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=60)


def spread(costs: list[int], sizes: list[int], num_sms: int, policy: str) -> list[int]:
    return list(placement.spread([number for cost in costs for number in (cost, 1)], sizes, num_sms, policy))


def test_round_robin_deals_the_tiles_of_a_stage_in_turn() -> None:
    assert spread([5, 1, 1, 1, 1, 9, 9], [5, 2], 3, "round_robin") == [0, 1, 2, 0, 1, 0, 1]


def test_load_balance_starts_where_least_has_been_done() -> None:
    assert spread([30, 10, 20, 4, 4], [3, 2], 3, "load_balance") == [0, 2, 1, 2, 1]


def test_idle_first_starts_where_nothing_was_done_last() -> None:
    # SMs have 30, 10 and 20, then one does 9 more: the others were idle, of which SM 2 has done less.
    assert spread([30, 20, 10, 9, 4, 4, 4], [3, 1, 3], 3, "idle_first") == [0, 1, 2, 2, 1, 0, 2]


@given(COSTS, COSTS, st.integers(1, 12))
def test_load_balance_is_within_one_tile_of_even(before: list[int], costs: list[int], num_sms: int) -> None:
    sms = spread([*before, *costs], [len(before), len(costs)], num_sms, "load_balance")[len(before) :]
    own = Counter(dict.fromkeys(range(num_sms), 0))
    for sm, cost in zip(sms, costs, strict=True):
        own[sm] += cost
    assert max(own.values()) - min(own.values()) <= max(costs)
    assert len(set(sms)) == min(len(costs), num_sms)


def test_sets_that_run_side_by_side_are_spread_together(lowered: Lowered) -> None:
    qkv = [("attn_norm", "q_proj", "k_proj", "v_proj")]
    tiling = {"gemv": {"N_tile": 32}}
    together = lowered(fusion_grouping=qkv, tiling=tiling, sm_assignment="round_robin")
    apart = lowered(tiling=tiling, sm_assignment="round_robin")
    names = ("L0.q_proj", "L0.k_proj", "L0.v_proj")
    # 64 + 32 + 32 rows in tiles of 32 are four tiles for six SMs.
    assert [task.sm for task in together.tasks if task.label in names] == [0, 1, 2, 3]
    assert [task.sm for task in apart.tasks if task.label in names] == [0, 1, 0, 0]


def test_an_explicit_map_decides_for_the_tasks_that_it_names(lowered: Lowered) -> None:
    free = lowered()
    chosen = {0: 5, 7: 2, len(free.tasks) - 1: 0}
    program = lowered(sm_assignment=chosen)
    assert {number: program.tasks[number].sm for number in chosen} == chosen
    others = [task.id for task in free.tasks if task.id not in chosen]
    assert [program.tasks[number].sm for number in others] == [free.tasks[number].sm for number in others]


def test_one_sm_can_run_everything(lowered: Lowered) -> None:
    tasks = len(lowered().tasks)
    program = lowered(sm_assignment=dict.fromkeys(range(tasks), 3))
    assert {task.sm for task in program.tasks} == {3}
    assert validate(program, strict=True).ok


def test_tiles_of_a_stage_differ_by_less_than_a_task(lowered: Lowered) -> None:
    program = lowered(tiling={"gemv.lm_head": {"N_tile": 16}})
    work = Counter(dict.fromkeys(range(6), 0))
    for task in program.tasks:
        if task.label == "lm_head":
            assert task.sm is not None
            work[task.sm] += task.est_bytes + TASK_COST_BYTES
    assert max(work.values()) - min(work.values()) <= 16 * 96 * 2 + TASK_COST_BYTES
