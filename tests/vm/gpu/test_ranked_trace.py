"""Traces of two GPUs as one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.ir import InstructionKind, Task
from flywheel.report.traced import exchange_times
from flywheel.vm.gpu.ranked_trace import join_traces
from flywheel.vm.gpu.trace import LaunchTrace, Phase, PhaseSpan, TracedTask

LATE_US = 100.0
"""What the clock of the second GPU is ahead."""


def traced(number: int, label: str, inputs: tuple[int, ...], output: int, start: float, stored: float) -> TracedTask:
    columns = {"n_off": 0, "N_tile": 16}
    task = Task(number, InstructionKind.GEMV_TILE, inputs, (output,), number, (), columns, label=label)
    phases = (PhaseSpan(Phase.RUN, start, stored), PhaseSpan(Phase.SIGNAL, stored, stored))
    return TracedTask(task, 0, start, start, stored, phases)


def parts() -> list[Any]:
    """Products 10 and 20 of two GPUs, each of which is pushed to the other one, as 21 and 11."""
    images = ({10: {1: 21}}, {20: {0: 11}})
    return [
        SimpleNamespace(part=SimpleNamespace(images=each, arrived=frozenset({11 + 10 * rank})))
        for rank, each in enumerate(images)
    ]


def traces() -> list[LaunchTrace]:
    """By the first clock: products are stored at 5 and 8 us, and 1 us later the other GPU has the sum of both; each
    has its own sum no sooner."""
    first = [traced(0, "L0.o_proj", (1,), 10, 0.0, 5.0), traced(1, "L0.attn_sum", (10, 11), 12, 5.0, 9.0)]
    second = [traced(2, "L0.o_proj", (1,), 20, 1.0, 8.0), traced(3, "L0.attn_sum", (21, 20), 22, 8.0, 8.5)]
    late = [
        replace(
            each, current_us=each.current_us + LATE_US, ready_us=each.ready_us + LATE_US,
            done_us=each.done_us + LATE_US,
            phases=tuple(PhaseSpan(name, start + LATE_US, end + LATE_US) for name, start, end in each.phases),
        )
        for each in second
    ]  # fmt: skip
    return [LaunchTrace(tuple(first), 2, 0.1, 0.3, 0.2), LaunchTrace(tuple(late), 2, 0.3, 0.5, 0.6)]


def test_clocks_are_set_by_what_goes_both_ways() -> None:
    joined = join_traces(parts(), traces())
    # There 8.5 - 5 us, back 9 - 8 us: half of the difference is taken for the clocks'.
    shift = joined.tasks[2].current_us - joined.tasks[0].current_us
    assert shift == pytest.approx(1.0 + (1.0 - 3.5) / 2)
    assert min(each.current_us for each in joined.tasks) == 0.0
    assert [each.sm for each in joined.tasks] == [0, 0, 2, 2]
    assert (joined.sms, joined.stalled, joined.starved) == (4, pytest.approx(0.2), pytest.approx(0.4))
    assert joined.awaiting == pytest.approx(0.4)


def test_a_sum_waits_for_the_last_summand_of_any_gpu() -> None:
    joined = join_traces(parts(), traces())
    assert [(each.task.task.id, each.last.task.id) for each in joined.exchanges] == [(1, 2), (3, 2)]
    assert [each.exposed_us for each in joined.exchanges] == [pytest.approx(2.25), pytest.approx(0.5)]
    (found,) = exchange_times(joined)
    assert (found.operation, found.sums, found.max_us) == ("attn_sum", 2, pytest.approx(2.25))
    assert found.mean_us == pytest.approx((2.25 + 0.5) / 2)


def test_tasks_of_other_columns_are_no_summands() -> None:
    given = traces()
    apart = replace(given[1].tasks[0].task, params={"n_off": 16, "N_tile": 16})
    given[1] = replace(given[1], tasks=(replace(given[1].tasks[0], task=apart), given[1].tasks[1]))
    assert [each.last.task.id for each in join_traces(parts(), given).exchanges] == [0, 0]
