from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest

from flywheel.cost_model.engine import Queues, Rates, simulate

RATES = Rates(total=100.0, loader=80.0, poll_us=0.0)


def awaiting(gate_sets: list[tuple[int, ...]], counter_gates: list[list[tuple[int, int]]]) -> dict[str, Any]:
    """The gates of each set, and per counter (gate, further signals), as columns."""
    return {
        "gate_ends": list(accumulate(map(len, gate_sets), initial=0)),
        "gates": [gate for gates in gate_sets for gate in gates],
        "link_ends": list(accumulate(map(len, counter_gates), initial=0)),
        "links": [link for links in counter_gates for link in links],
    }


def queues(*sms: list[tuple[int, float]], ahead: float = 1e9, **changes: object) -> Queues:
    """Queues of (bytes, work in us) that wait for nothing; each SM signals a counter of its own."""
    ends, limits, early = [], [], []
    for tasks in sms:
        end, total = 0, sum(size for size, _ in tasks)
        for size, _ in tasks:
            early.append(min(end + ahead, total))
            end += size
            ends.append(end)
            limits.append(min(end + ahead, total))
    first = [0]
    for tasks in sms:
        first.append(first[-1] + len(tasks))
    built = Queues(
        first=first,
        early_limit=early,
        stream_end=ends,
        limit=limits,
        ahead_us=[0.0] * first[-1],
        work_us=[work for tasks in sms for _, work in tasks],
        tail_us=[0.0] * first[-1],
        signal=[sm for sm, tasks in enumerate(sms) for _ in tasks],
        awaits=[0] * first[-1],
        **awaiting([()], [[] for _ in sms]),
        visible_us=[],
    )
    return replace(built, **changes)  # type: ignore[arg-type]


def test_one_loader_cannot_draw_more_than_its_own_rate() -> None:
    assert simulate(queues([(800, 0.0)]), RATES).finish_us == [pytest.approx(10.0)]


def test_loaders_share_the_memory_and_the_rest_goes_faster_when_one_is_done() -> None:
    # 50 each until the first has its 500 at 10 us, then 80 for the other 500 of the second.
    trace = simulate(queues([(500, 0.0)], [(1000, 0.0)]), RATES)
    assert trace.finish_us == [pytest.approx(10.0), pytest.approx(16.25)]


def test_a_task_ends_neither_before_its_work_nor_before_its_bytes() -> None:
    assert simulate(queues([(80, 5.0)]), RATES).finish_us == [pytest.approx(5.0)]
    assert simulate(queues([(800, 5.0)]), RATES).finish_us == [pytest.approx(10.0)]


def test_bytes_of_the_next_task_arrive_during_the_work_of_this_one() -> None:
    tasks = [(0, 10.0), (800, 0.0)]
    assert simulate(queues(tasks), RATES).finish_us == [pytest.approx(10.0)]
    assert simulate(queues(tasks, ahead=400.0), RATES).finish_us == [pytest.approx(15.0)]
    assert simulate(queues(tasks, ahead=0.0), RATES).finish_us == [pytest.approx(20.0)]


def two_sms_with_a_join(consumer_bytes: int) -> Queues:
    """Both SMs work (3 and 5 us) and signal counter 0; then both wait for it and stream `consumer_bytes`."""
    return queues(
        [(0, 3.0), (consumer_bytes, 0.0)],
        [(0, 5.0), (consumer_bytes, 0.0)],
        signal=[0, 1, 0, 1],
        awaits=[0, 1, 0, 1],
        **awaiting([(), (0,)], [[(0, 2)], []]),
        visible_us=[1.0],
    )


def test_a_join_opens_one_visibility_after_its_last_signal() -> None:
    trace = simulate(two_sms_with_a_join(0), RATES)
    assert trace.finish_us == [pytest.approx(6.0), pytest.approx(6.0)]
    ends = trace.end_us[[0, 2]]
    assert trace.start_us[[1, 3]] - ends == pytest.approx([3.0, 1.0])


def test_a_wait_that_is_already_satisfied_costs_a_poll() -> None:
    program = queues(
        [(0, 1.0)],
        [(0, 5.0), (0, 1.0)],
        signal=[0, 1, 1],
        awaits=[0, 0, 1],
        **awaiting([(), (0,)], [[(0, 1)], []]),
        visible_us=[1.0],
    )
    assert simulate(program, replace(RATES, poll_us=0.25)).finish_us[1] == pytest.approx(6.25)


def test_a_counter_opens_its_gates_in_the_order_of_their_thresholds() -> None:
    program = queues(
        [(0, 1.0), (0, 1.0)],
        [(0, 0.0)],
        [(0, 0.0)],
        signal=[0, 0, 1, 1],
        awaits=[0, 0, 1, 2],
        **awaiting([(), (1,), (0,)], [[(0, 1), (1, 1)], []]),
        visible_us=[1.0, 1.0],
    )
    assert simulate(program, RATES).finish_us == [pytest.approx(2.0), pytest.approx(3.0), pytest.approx(2.0)]


def test_what_a_task_does_ahead_is_hidden_by_its_wait() -> None:
    joined = two_sms_with_a_join(0)
    # They wait 3 and 1 us, one of which is the hand-off.
    hidden, longer = (replace(joined, ahead_us=[0.0, us, 0.0, us]) for us in (1.0, 2.5))
    assert simulate(hidden, RATES).finish_us == [pytest.approx(6.0), pytest.approx(6.0)]
    assert simulate(longer, RATES).finish_us == [pytest.approx(6.0), pytest.approx(7.5)]
    assert simulate(queues([(0, 1.0)], ahead_us=[2.0]), RATES).finish_us == [pytest.approx(1.0)]  # it waits for nothing


def test_a_hand_off_takes_longer_while_the_memory_is_busy() -> None:
    crowded = replace(RATES, crowd_us=2.0)
    assert simulate(two_sms_with_a_join(0), crowded).finish_us == [pytest.approx(6.0), pytest.approx(6.0)]
    # The third streams all along at 80 of 100 bytes per us, when the second signals at 5 us.
    busy = queues([(0, 3.0), (0, 0.0)], [(0, 5.0), (0, 0.0)], [(8000, 0.0)])
    busy = replace(
        busy, signal=[0, 1, 0, 1, 2], awaits=[0, 1, 0, 1, 0], **awaiting([(), (0,)], [[(0, 2)], [], []]),
        visible_us=[1.0],
    )
    assert simulate(busy, crowded).finish_us[:2] == [pytest.approx(7.6), pytest.approx(7.6)]


def test_a_loader_that_stood_still_brings_nothing_in_for_a_while() -> None:
    tasks = queues([(0, 10.0), (800, 0.0)], ahead=400.0)
    assert simulate(tasks, replace(RATES, restart_us=1.5)).finish_us == [pytest.approx(16.5)]
    assert simulate(queues([(800, 0.0)]), replace(RATES, restart_us=1.5)).finish_us == [pytest.approx(10.0)]


def test_a_loader_goes_on_when_its_sm_comes_to_a_task_that_waits() -> None:
    joined = two_sms_with_a_join(160)
    closed = replace(joined, early_limit=[0.0] * 4, limit=[0.0, 160.0] * 2)
    opened = replace(closed, early_limit=[0.0, 160.0] * 2)
    # 160 bytes each at 50 us: read from 6 us on, or while they wait, the second one from 5 us on.
    assert simulate(closed, RATES).finish_us == [pytest.approx(9.2), pytest.approx(9.2)]
    assert simulate(opened, RATES).finish_us == [pytest.approx(6.0), pytest.approx(7.0)]


def test_a_queue_that_waits_for_ever_is_reported() -> None:
    program = queues(
        [(0, 1.0), (0, 1.0)],
        signal=[0, 0],
        awaits=[0, 1],
        **awaiting([(), (0,)], [[(0, 2)]]),
        visible_us=[1.0],
    )
    assert simulate(program, RATES).stuck == 1
    assert simulate(queues([(0, 1.0)]), RATES).stuck is None


def test_a_trace_tells_when_each_task_ran() -> None:
    trace = simulate(two_sms_with_a_join(500), RATES)
    assert trace.start_us.tolist() == [pytest.approx(t) for t in (0.0, 6.0, 0.0, 6.0)]
    assert trace.end_us.tolist() == [pytest.approx(t) for t in (3.0, 10.0, 5.0, 10.0)]
