"""Windows that move with the position: the rows that tasks read, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flywheel.ir import KvRows, MegakernelProgram, Wait, at_position, program_from_json, program_to_json, validate
from flywheel.ir.window import first_row, in_rows, rows_in_sight

Change = Callable[..., MegakernelProgram]
PAST, NEW = KvRows.PAST.value, KvRows.NEW.value
LAST = 7


def rows(program: MegakernelProgram, number: int) -> list[int]:
    params = in_rows(next(task.params for task in program.tasks if task.id == number))
    return list(range(params["kv_start"], params["kv_start"] + params["kv_len"]))


def codes(program: MegakernelProgram) -> set[str]:
    return {finding.code for finding in validate(program, strict=True).errors}


def windowed(window: int, start: int = 0, **more: Any) -> dict[str, int]:
    """Params of a task that attends to all rows in sight from the `start`th on, in a program at the last position."""
    past = more.get("kv_rows") == PAST
    return {"window": window, "pos": LAST, "kv_start": start, "kv_len": min(window, LAST + 1) - start - past, **more}


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, 20])
def test_a_window_sees_the_last_rows_up_to_its_token_at_every_position(
    window: int, tiny: MegakernelProgram, with_task: Change
) -> None:
    lowered = with_task(tiny, 107, params=windowed(window))
    assert codes(lowered) == set()
    for pos in range(LAST + 1):
        moved = at_position(lowered, pos)
        assert rows(moved, 107) == [row for row in range(pos + 1) if row > pos - window]
        assert codes(moved) == set()


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("block", [1, 2, 3])
def test_blocks_of_a_window_have_each_row_in_sight_once_and_the_past_has_not_the_new_row(
    window: int, block: int, tiny: MegakernelProgram, with_task: Change
) -> None:
    for kv_rows in ({}, {"kv_rows": PAST}):
        blocks = []
        for start in range(0, window - len(kv_rows), block):
            whole = windowed(window, start, **kv_rows)
            blocks.append(with_task(tiny, 107, params={**whole, "kv_len": min(block, whole["kv_len"])}))
        for pos in range(LAST + 1):
            read = [row for each in blocks for row in rows(at_position(each, pos), 107)]
            seen = [row for row in range(pos + 1) if row > pos - window]
            assert read == (seen[:-1] if kv_rows else seen)


def test_tasks_of_the_past_need_no_order_with_the_append_and_others_do(
    tiny: MegakernelProgram, with_task: Change
) -> None:
    apart, early = replace(tiny, pages=None), (Wait(52, 2),)
    assert codes(with_task(apart, 107, params=windowed(4, kv_rows=PAST), waits=early)) == set()
    assert codes(with_task(apart, 107, params=windowed(4), waits=early)) == {"race-read"}


@pytest.mark.parametrize(
    ("params", "code"),
    [
        (windowed(4) | {"kv_len": 5}, "bad-param"),
        (windowed(4) | {"kv_start": 1}, "bad-param"),
        (windowed(4, kv_rows=PAST) | {"kv_len": 4}, "bad-param"),
        (windowed(4) | {"kv_rows": NEW}, "bad-param"),
        (windowed(4) | {"window": 0}, "bad-param"),
        (windowed(4) | {"window": "4"}, "bad-param"),
        (windowed(4) | {"pos": LAST - 1}, "kv-window"),
        (windowed(4) | {"pos": LAST + 1}, "kv-bounds"),
    ],
    ids=["longer", "later", "new row of the past", "new", "none", "text", "behind", "beyond"],
)
def test_a_window_that_does_not_move_with_its_token_is_refused(
    params: dict[str, Any], code: str, tiny: MegakernelProgram, with_task: Change
) -> None:
    assert code in codes(with_task(tiny, 107, params=params))


def test_a_window_is_of_a_cache(tiny: MegakernelProgram, with_task: Change) -> None:
    assert codes(with_task(tiny, 101, params={"window": 4, "pos": LAST, "kv_start": 0, "kv_len": 1})) == {"kv-window"}


def test_a_window_needs_a_position(tiny: MegakernelProgram, with_task: Change) -> None:
    (finding,) = validate(with_task(tiny, 107, params={"window": 4, "kv_len": 4}), strict=True).errors
    assert (finding.code, finding.message.endswith("window without pos, kv_start and kv_len")) == ("bad-param", True)


def test_a_file_keeps_windows(tiny: MegakernelProgram, with_task: Change) -> None:
    lowered = with_task(tiny, 107, params=windowed(4))
    text = program_to_json(lowered)
    assert program_to_json(program_from_json(text)) == text
    assert '"window": 4' in text


def test_without_a_window_rows_count_from_the_first_of_the_cache() -> None:
    params = {"kv_start": 3, "kv_len": 2, "pos": 9}
    assert (in_rows(params) is params, first_row(params), rows_in_sight(params, 9)) == (True, 0, 10)


def test_a_masked_window_takes_the_masks_rows_that_it_sees(tiny: MegakernelProgram) -> None:
    from flywheel.vm.reference.attention import attention_tile

    generator = torch.Generator().manual_seed(0)
    keys, values, query = (torch.randn(8, 1, 4, generator=generator) for _ in range(3))
    mask, out, wanted = torch.randn(8, generator=generator), torch.empty(1, 4), torch.empty(1, 4)
    fixed = {"head_dim": 4, "n_heads": 1, "n_kv_heads": 1, "scale": 0.5}
    attention_tile([query[:1], keys, values, mask], out, {**fixed, **in_rows(windowed(3))})
    unseen = torch.where(torch.arange(8) > LAST - 3, mask, -torch.inf)
    attention_tile([query[:1], keys, values, unseen], wanted, {**fixed, "kv_start": 0, "kv_len": 8})
    torch.testing.assert_close(out, wanted)
