"""Caches of several lanes: what is refused, and that what is accepted is no race at any position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    Task,
    Wait,
    at_position,
    simulate_adversarial,
    validate,
)
from flywheel.ir.dag import dependency_edges
from flywheel.ir.recipe import recipe_from_dict
from flywheel.ir.window import in_rows, rows_in_sight

_K = InstructionKind
ROWS = 8
BASE = 5
LANES = 3
NEW = Buffer(0, "new", BufferKind.IO_INPUT, DType.F32, (1, 1, 4))
CACHE = Buffer(1, "cache", BufferKind.KV_CACHE, DType.F32, (ROWS, 1, 4))
TWO = Buffer(2, "two", BufferKind.IO_INPUT, DType.F32, (2, 1, 4))
OUT = 3
ATTEND = {"head_dim": 4, "n_heads": 1, "n_kv_heads": 1, "kv_start": 0, "scale": 0.5}


def program(tasks: Sequence[Task]) -> MegakernelProgram:
    outputs = [
        Buffer(number, f"out{number}", BufferKind.IO_OUTPUT, DType.F32, (1, 4))
        for number in sorted({each for task in tasks for each in task.outputs} - {1})
    ]
    counters = [Counter(number) for number in sorted({task.out_counter for task in tasks})]
    return MegakernelProgram(
        target=TARGETS["h100"], buffers=(NEW, CACHE, TWO, *outputs), counters=counters, tasks=tuple(tasks)
    )


def append(number: int, lane: int, waits: Sequence[int] = (), **params: Any) -> Task:
    own = {"pos": BASE + lane, "lane": lane, **params}
    return Task(number, _K.KV_APPEND, (0, 1), (1,), number, tuple(Wait(each, 1) for each in waits), own)


def attend(number: int, lane: int, waits: Sequence[int] = (), **params: Any) -> Task:
    own = {**ATTEND, "kv_len": BASE + lane + 1, "lane": lane, **params}
    outputs = (OUT + number,)
    return Task(number, _K.ATTENTION_TILE, (0, 1, 1), outputs, number, tuple(Wait(each, 1) for each in waits), own)


def codes(*tasks: Task) -> set[str]:
    return {finding.code for finding in validate(program(tasks), strict=True).errors}


APPENDS = [append(lane, lane) for lane in range(LANES)]


def test_appends_of_lanes_need_no_order_and_who_attends_waits_for_its_own_and_those_before() -> None:
    assert codes(*APPENDS, *(attend(3 + lane, lane, range(lane + 1)) for lane in range(LANES))) == set()


@pytest.mark.parametrize("missing", [0, 1])
def test_an_attention_that_does_not_wait_for_a_lane_before_it_is_a_race(missing: int) -> None:
    waits = [lane for lane in range(2) if lane != missing]
    assert codes(*APPENDS, attend(3, 1, waits)) == {"race-read"}


def test_an_attention_before_the_append_of_its_lane_is_a_race() -> None:
    assert codes(attend(3, 0), append(0, 0, [3])) == {"race-read"}


def test_two_appends_of_one_lane_in_no_order_are_a_race() -> None:
    assert codes(append(0, 0), append(1, 1), append(2, 1), attend(3, 1, [0, 1, 2])) == {"race-write"}


def test_an_attention_to_the_row_of_a_lane_that_nobody_appends_is_refused() -> None:
    assert codes(append(0, 0), append(2, 2), attend(3, 2, [0, 2])) == {"partial-write"}


@pytest.mark.parametrize(
    "wrong",
    [
        [append(0, 0), append(1, 1, pos=BASE)],
        [append(0, 3, pos=2)],
        [append(0, 0), append(1, 1, kv_rows=2, kv_start=BASE + 1, kv_len=1)],
        [append(0, 0), attend(3, 0, [0], kv_len=BASE + 2)],
        [append(0, 0), attend(3, 0, [0], kv_len=BASE, kv_rows=1, pos=BASE)],
        [append(0, 0), append(1, 1), attend(3, 0, [0, 1], kv_len=3, window=3, pos=BASE + 1)],
        [append(0, 0), replace(append(1, 1), inputs=(2, 1))],
        [append(0, 0), Task(3, _K.COPY, (1,), (OUT,), 3, (Wait(0, 1),))],
    ],
    ids=["rows that are no lanes", "before row 0", "new row", "past its lane", "past", "window",
         "two rows", "copy"],
)
def test_what_else_touches_a_cache_of_several_lanes_is_refused(wrong: list[Task]) -> None:
    tasks = [replace(task, outputs=(OUT,)) if task.op is _K.COPY else task for task in wrong]
    found = program(tasks)
    if any(task.op is _K.COPY for task in tasks):
        whole = Buffer(OUT, "out", BufferKind.IO_OUTPUT, DType.F32, (ROWS, 1, 4))
        found = replace(found, buffers=(*found.buffers[:3], whole))
    assert {finding.code for finding in validate(found, strict=True).errors} == {"kv-lane"}


def test_a_task_that_appends_to_a_cache_of_several_lanes_may_not_attend_to_it() -> None:
    steps = [
        {"op": "KV_APPEND", "args": [{"in": 0}, {"in": 1}], "out": {"out": 1}, "params": {}, "out_shape": [1, 32],
         "out_dtype": "F32"},
        {"op": "ATTENTION_TILE", "args": [{"in": 0}, {"in": 1}, {"in": 1}], "out": "final", "out_shape": [1, 4],
         "params": {"head_dim": 4, "n_heads": 1, "n_kv_heads": 1, "scale": 0.5}, "out_dtype": "F32"},
    ]  # fmt: skip
    params = {"pos": BASE + 1, "lane": 1, "kv_start": 0, "kv_len": BASE + 2}
    params["recipe"] = recipe_from_dict({"steps": steps})
    both = Task(1, _K.FUSED, (0, 1), (OUT, 1), 1, (Wait(0, 1),), params)
    assert codes(append(0, 0), both) == {"kv-lane"}


def test_a_window_of_a_lane_waits_for_the_lanes_in_sight_alone() -> None:
    far = attend(3, 2, [1, 2], kv_len=2, window=2, pos=BASE + 2)
    assert codes(*APPENDS, far) == set()
    assert codes(*APPENDS, attend(3, 2, [1, 2], kv_len=3, window=3, pos=BASE + 2)) == {"race-read"}


@pytest.mark.parametrize("lane", [-1, 8])
def test_a_lane_that_a_launch_does_not_have_is_refused(lane: int) -> None:
    task = append(0, 0)
    assert codes(replace(task, params={**task.params, "lane": lane})) == {"bad-param"}


def test_lanes_of_different_sequences_do_not_share_a_cache() -> None:
    assert codes(append(0, 0, sequence=0), append(1, 1, sequence=1)) == {"kv-sequence"}


@st.composite
def programs(draw: st.DrawFn) -> MegakernelProgram:
    tasks: list[Task] = []
    for number in range(draw(st.integers(2, 6))):
        waits = draw(st.lists(st.integers(0, number - 1), unique=True)) if number else []
        lane = draw(st.integers(0, LANES - 1))
        if not number or draw(st.booleans()):
            tasks.append(append(number, lane, waits))
        else:
            start, window = draw(st.sampled_from([(0, None), (3, None), (BASE, None), (0, 1), (0, 2), (0, 3), (0, 8)]))
            moving = {} if window is None else {"window": window, "pos": BASE + lane}
            seen = rows_in_sight(moving, BASE + lane)
            tasks.append(attend(number, lane, waits, kv_start=start, kv_len=seen - start, **moving))
    return program(tasks)


def rows_read(task: Task) -> range:
    params = in_rows(task.params)
    return range(params["kv_start"], params["kv_start"] + params["kv_len"])


def is_race_at(found: MegakernelProgram, pos: int) -> bool:
    """Whether two tasks of which one writes a row that the other touches are in no order, or a row that a launch writes
    is read before every write, by a look at every pair."""
    tasks = at_position(found, pos).tasks
    before = {task.id: set[int]() for task in tasks}
    for one, other in dependency_edges(found):  # producers stand before consumers in the list
        before[other] |= {one}
    for task in tasks:
        for earlier in list(before[task.id]):
            before[task.id] |= before[earlier]
    writers = [task for task in tasks if task.op is _K.KV_APPEND]
    for task in tasks:
        own = [task.params["pos"]] if task in writers else rows_read(task)
        for row in own:
            others = [each for each in writers if each.id != task.id and each.params["pos"] == row]
            ordered = [each for each in others if each.id in before[task.id] or task.id in before[each.id]]
            early = [each for each in others if each.id in before[task.id]]
            if len(ordered) < len(others) or (task not in writers and others and not early):
                return True
    return False


@settings(max_examples=300, deadline=None)
@given(programs())
def test_what_is_proved_is_no_race_at_any_position_and_what_is_refused_is_one_at_some(
    found: MegakernelProgram,
) -> None:
    result = validate(found, strict=True)
    races = [pos for pos in range(BASE + 1) if is_race_at(found, pos)]
    if result.ok:
        assert not races
        assert simulate_adversarial(found, 4) == []
    elif not {finding.code for finding in result.errors} - {"race-read", "race-write"}:
        assert races
