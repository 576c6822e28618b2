from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flywheel.errors import ConfigError
from flywheel.ir import KvRows, MegakernelProgram, at_position, program_to_json, validate
from flywheel.ir.recipe import recipe_of

Change = Callable[..., MegakernelProgram]


def params_of(program: MegakernelProgram, number: int) -> dict[str, object]:
    return dict(next(task.params for task in program.tasks if task.id == number))


def test_appends_and_windows_follow_the_position(tiny: MegakernelProgram) -> None:
    for pos in range(8):
        moved = at_position(tiny, pos)
        assert params_of(moved, 105)["pos"] == pos
        assert (params_of(moved, 107)["kv_start"], params_of(moved, 107)["kv_len"]) == (0, pos + 1)
        assert validate(moved, strict=True).ok


def test_the_last_position_is_the_program_itself(tiny: MegakernelProgram) -> None:
    assert program_to_json(at_position(tiny, 7)) == program_to_json(tiny)


def test_a_window_behind_the_position_is_empty_and_one_before_it_whole(
    tiny: MegakernelProgram, with_task: Change
) -> None:
    late = with_task(tiny, 107, params={"kv_start": 4, "kv_len": 4})
    assert [params_of(at_position(late, pos), 107)["kv_len"] for pos in (0, 3, 4, 6, 7)] == [0, 0, 1, 3, 4]
    early = with_task(tiny, 107, params={"kv_start": 0, "kv_len": 2})
    assert params_of(at_position(early, 7), 107)["kv_len"] == 2


def test_a_window_of_the_past_ends_before_the_position_and_a_new_one_is_its_row(
    tiny: MegakernelProgram, with_task: Change
) -> None:
    past = with_task(tiny, 107, params={"kv_start": 4, "kv_len": 3, "kv_rows": KvRows.PAST.value, "pos": 7})
    assert [params_of(at_position(past, pos), 107)["kv_len"] for pos in (0, 4, 5, 7)] == [0, 0, 1, 3]
    new = with_task(tiny, 107, params={"kv_start": 7, "kv_len": 1, "kv_rows": KvRows.NEW.value, "pos": 7})
    for pos in range(8):
        params = params_of(at_position(new, pos), 107)
        assert (params["kv_start"], params["kv_len"], params["pos"]) == (pos, 1, pos)
        assert validate(at_position(new, pos), strict=True).ok
        assert validate(at_position(past, pos), strict=True).ok


def test_everything_else_stays_the_same_object(tiny: MegakernelProgram) -> None:
    moved = at_position(tiny, 3)
    changed = [old.id for old, new in zip(tiny.tasks, moved.tasks, strict=True) if old is not new]
    assert changed == [105, 106, 107]
    assert moved.buffers is tiny.buffers


@pytest.mark.parametrize("pos", [-1, 8, 1000])
def test_a_position_outside_the_context_is_refused(pos: int, tiny: MegakernelProgram) -> None:
    with pytest.raises(ConfigError, match=f"position {pos} is not in 0..7"):
        at_position(tiny, pos)


def test_a_program_without_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="no task has the param pos"):
        at_position(MegakernelProgram(), 0)


def test_a_recipe_that_fixes_a_position_is_refused(tiny: MegakernelProgram, with_task: Change) -> None:
    steps = [replace(step, params={**step.params, "pos": 3}) for step in tiny.tasks[8].params["recipe"].steps]
    with pytest.raises(ConfigError, match="its recipe fixes pos"):
        at_position(with_task(tiny, 108, params={"recipe": recipe_of(steps)}), 3)


def test_each_task_moves_to_the_position_of_its_sequence(tiny: MegakernelProgram, with_task: Change) -> None:
    second = with_task(tiny, 107, params={"sequence": 1})
    moved = at_position(second, [2, 5])
    assert (params_of(moved, 105)["pos"], params_of(moved, 107)["kv_len"]) == (2, 6)
    assert program_to_json(at_position(second, 4)) == program_to_json(at_position(second, [4, 4]))
    with pytest.raises(ConfigError, match=r"sequence 1 is not in 0\.\.0"):
        at_position(second, [3])
    with pytest.raises(ConfigError, match=r"position 8 is not in 0\.\.7"):
        at_position(second, [3, 8])


def test_tasks_of_two_sequences_that_share_a_cache_are_refused(tiny: MegakernelProgram, with_task: Change) -> None:
    apart = with_task(tiny, 107, params={"sequence": 1})
    assert {finding.code for finding in validate(apart, strict=True).errors} == {"kv-sequence"}
    together = with_task(with_task(apart, 105, params={"sequence": 1}), 106, params={"sequence": 1})
    assert validate(together, strict=True).ok
    far = with_task(tiny, 107, params={"sequence": 8})
    assert {finding.code for finding in validate(far, strict=True).errors} == {"bad-param"}
