from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from flywheel.interop.mpk.graph import LAUNCH_MASSIVE, MpkGraph
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.rescheduling import LAUNCHES, ORDERS, GraphSchedule, components, launch_of, reschedule
from flywheel.interop.mpk.timing import H200, bounds_of, predict_step

SAFE = ["micro_2layer", "tinysplit"]


def join_silu(document: dict[str, Any]) -> None:
    """One event in place of those that the tiles of SILU_MUL wait for in a layer, or signal."""
    tasks, events = document["all_tasks"], document["all_events"]
    runs: list[list[int]] = []
    for place, task in enumerate(tasks):
        if task["task_type"] == 118:
            if not runs or runs[-1][-1] != place - 1:
                runs.append([])
            runs[-1].append(place)
    for places in runs:
        awaited = sorted({tasks[place]["dependent_event"] for place in places})
        for task in tasks:
            for field in ("trigger_event", "dependent_event"):
                task[field] = awaited[0] if task[field] in awaited else task[field]
        events[awaited[0]]["num_triggers"] = sum(events[event]["num_triggers"] for event in awaited)
        events[awaited[0]]["last_task_id"] = events[awaited[-1]]["last_task_id"]


@pytest.mark.parametrize("name", SAFE)
@pytest.mark.parametrize("launch", LAUNCHES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_schedule_of_a_safe_graph_is_safe(
    graph: Callable[..., MpkGraph], name: str, order: str, launch: str
) -> None:
    made = reschedule(graph(name), GraphSchedule(order, "split", launch, 128))
    result = check([made])
    assert result.ok, result.report()
    assert launch_of(made) == launch
    assert len(predict_step(made).spans) == len(made.tasks) - 2


def test_the_schedule_of_a_file_leaves_it_as_it_is(graph: Callable[..., MpkGraph]) -> None:
    found = graph("micro_2layer")
    assert reschedule(found, GraphSchedule("given", "given", "ahead", 96)) is found
    moved = reschedule(found, GraphSchedule("turned", "given", "ahead", 96))
    assert moved.document != found.document


def test_what_was_launched_ahead_is_so_again_after_it_was_launched_just_in_time(
    graph: Callable[..., MpkGraph],
) -> None:
    found = graph("micro_2layer")
    late = reschedule(found, GraphSchedule("given", "given", "just in time", 128))
    assert LAUNCH_MASSIVE in {event.kind for event in late.events}
    early = reschedule(late, GraphSchedule("given", "given", "ahead", 128))
    assert early.document == found.document


@pytest.mark.parametrize("name", ["micro_2layer", "tiny", "tinysplit", "exp_mla", "l1b"])
def test_mpks_events_are_as_fine_as_what_their_tasks_touch(graph: Callable[..., MpkGraph], name: str) -> None:
    assert components(graph(name)) == {}


def test_events_that_a_compiler_had_joined_are_split_to_what_they_were(graph: Callable[..., MpkGraph]) -> None:
    whole, joined = graph("micro_2layer"), graph("micro_2layer", join_silu)
    assert check([joined]).ok
    assert len(components(joined)) == 2
    split = reschedule(joined, GraphSchedule("given", "split", "ahead", 128))
    assert check([split]).ok
    assert Counter(event.triggers for event in split.events) >= Counter(event.triggers for event in whole.events)
    assert predict_step(split).latency_us == pytest.approx(predict_step(whole).latency_us)
    assert predict_step(joined).latency_us >= predict_step(split).latency_us


def test_no_schedule_is_faster_than_the_bounds(graph: Callable[..., MpkGraph]) -> None:
    for name in SAFE:
        found = graph(name)
        bounds = bounds_of(found)
        for order in ORDERS:
            timing = predict_step(reschedule(found, GraphSchedule(order, "given", "ahead", 128)))
            assert timing.latency_us >= max(bounds.path_us, bounds.load_us, bounds.floor_us) - 1e-6


def test_launches_just_in_time_cost_what_schedulers_take(graph: Callable[..., MpkGraph]) -> None:
    late = reschedule(graph("tiny"), GraphSchedule("given", "given", "just in time", 128))
    timing = predict_step(late)
    slow = timing.latency_us
    assert slow > predict_step(graph("tiny")).latency_us
    assert predict_step(late, replace(H200, schedule_us=1.0, dispatch_us=0.0)).latency_us < slow
    for worker in range(128):
        spans = sorted((s for s in timing.spans if s.worker == worker), key=lambda s: s.ready_us)
        assert all(first.done_us <= second.ready_us for first, second in pairwise(spans))


def test_a_graph_that_waits_for_other_gpus_stays_launched_ahead_of_time(graph: Callable[..., MpkGraph]) -> None:
    found = graph("micro_2gpu_r0")
    assert launch_of(reschedule(found, GraphSchedule("given", "given", "just in time", 128))) == "ahead"
