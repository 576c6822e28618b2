from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from statistics import median
from typing import Any
from xml.etree import ElementTree

import pytest
from imagined import SPECS, TARGET
from traces import small_program, small_trace

from flywheel.cost_model import State, predict, timeline
from flywheel.lowering.lower import lower
from flywheel.report.chrome import chrome_trace, measured_slices, predicted_slices
from flywheel.report.facts import TimedSchedule
from flywheel.report.layer import (
    BY_MODEL,
    MEANINGS,
    Timeline,
    layer,
    operation,
    shares,
    step_states,
    window,
    window_states,
)
from flywheel.report.palette import RESERVED, reserved
from flywheel.report.svg import standalone
from flywheel.report.traced import hand_off_times, idle_us, layer_times, measured, operation_times
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, make_workload
from flywheel.vm.gpu.trace import Phase, hand_offs

PHASES = {phase.value for phase in Phase}


def read(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(metadata, slices)."""
    events = json.loads(text)["traceEvents"]
    return [event for event in events if event["ph"] == "M"], [event for event in events if event["ph"] == "X"]


def test_operations_and_idleness_make_up_the_whole_launch() -> None:
    trace, times = small_trace(), operation_times(small_trace())
    assert sum(each.sm_us for each in times) + idle_us(trace) == pytest.approx(trace.span_us)
    assert idle_us(trace) >= 0
    assert sum(each.tasks for each in times) == len(trace.tasks)
    assert sum(each.bytes for each in times) == sum(task.est_bytes for task in small_program().tasks)
    assert [each.sm_us for each in times] == sorted((each.sm_us for each in times), reverse=True)


def test_phases_make_up_an_operation() -> None:
    for each in operation_times(small_trace()):
        assert sum(each.phases_us.values()) == pytest.approx(each.sm_us)
        assert sum(each.share(phase) for phase in Phase) == pytest.approx(1.0)


def test_a_rate_is_of_the_time_in_which_any_sm_is_at_it() -> None:
    head = next(each for each in operation_times(small_trace()) if each.operation == "lm_head")
    tasks = [each for each in small_trace().tasks if each.task.label == "lm_head"]
    starts, ends = [each.ready_us for each in tasks], [each.phases[-1].start_us for each in tasks]
    assert max(end - start for start, end in zip(starts, ends, strict=True)) <= head.busy_us <= max(ends) - min(starts)
    assert head.gbs == pytest.approx(head.bytes / head.busy_us / 1e3)


def test_what_moves_nothing_has_no_rate() -> None:
    without = [each for each in operation_times(small_trace()) if not each.bytes]
    assert without
    assert {each.gbs for each in without} == {None}


def test_the_operations_of_a_layer_are_told_since_the_layer_before() -> None:
    """The program has two layers, so medians over layers are those of the second."""
    trace = small_trace()
    stored = [each.stored_us for each in trace.tasks if each.task.label.startswith("L0.")]
    found = layer_times(trace)
    assert [each.ready_us for each in found] == sorted(each.ready_us for each in found)
    assert {each.operation for each in found} == {
        operation(each.task.label) for each in trace.tasks if each.task.label.startswith("L1.")
    }
    down = next(each for each in found if each.operation == "down_proj")
    tasks = [each for each in trace.tasks if each.task.label == "L1.down_proj"]
    assert down.tasks == len(tasks)
    assert down.ready_us == pytest.approx(median(each.ready_us for each in tasks) - max(stored))
    assert down.stored_us == pytest.approx(median(each.stored_us for each in tasks) - max(stored))
    assert down.last_us == pytest.approx(max(each.stored_us for each in tasks) - max(stored))
    alone = tuple(each for each in trace.tasks if not each.task.label.startswith("L1."))
    assert layer_times(replace(trace, tasks=alone)) == []


def test_hand_offs_name_who_signals_and_divide_the_waiting() -> None:
    trace, found = small_trace(), {each.operation: each for each in hand_off_times(small_trace())}
    assert "embed" not in found
    assert found["lm_head"].after == ("final_norm",)
    assert found["attention"].after == ("q_rope", "k_append", "v_append")
    assert sum(each.tasks for each in found.values()) == len(hand_offs(trace))
    for each in found.values():
        assert 0 <= each.waited <= each.tasks
        assert (each.median_us is None) == (each.max_us is None) == (each.waited == 0)
        if each.median_us is not None and each.max_us is not None:
            assert 0 < each.median_us <= each.max_us
    divided = sum(each.sm_held_us + each.sm_hand_off_us for each in found.values()) * trace.sms
    waiting = sum(each.task.phases[0].end_us - each.task.phases[0].start_us for each in hand_offs(trace) if each.waited)
    assert divided == pytest.approx(waiting)


def test_a_measured_layer_is_drawn_as_a_predicted_one_and_says_so() -> None:
    program = small_program()
    drawn = standalone(layer(measured(program, small_trace()), "measured on an H100"))
    root = ElementTree.fromstring(drawn)
    texts = [each.text or "" for each in root.iter() if each.tag.endswith(("title", "text"))]
    title = "layer 1 on every SM, measured on an H100"
    assert [text for text in texts if text.endswith(title)] == [texts[0], texts[0]]  # its name, and what is seen
    assert any("began, measured on an H100" in text for text in texts)
    assert BY_MODEL not in drawn
    names = {operation(task.label) for task in program.tasks if task.label.startswith("L1.")}
    assert sum(each.get("class") == "runs" for each in root.iter()) == len(names)
    assert names <= set(texts)
    assert not re.search(r"\b(?:href|src)=", drawn)
    assert "script" not in drawn


def test_the_title_says_for_which_weights_and_sequences() -> None:
    meta = {"model": "qwen3-8b", "gpu": "h200", "weights": "int4", "batch": 8}
    drawn = layer(measured(replace(small_program(), meta=meta), small_trace()), "measured on an H200")
    assert "qwen3-8b, int4 weights, 8 sequences on h200: layer 1 on every SM, measured on an H200" in drawn
    plain = {"model": "qwen3-8b", "gpu": "h200", "batch": 1}
    drawn = layer(measured(replace(small_program(), meta=plain), small_trace()), "measured on an H200")
    assert "qwen3-8b on h200: layer 1 on every SM" in drawn


def test_rows_of_several_gpus_are_parted_and_named() -> None:
    work = Workload("small", SPECS[0], TARGET, "bf16", 256, 1, ranks=2)
    space = make_space(work)
    program = lower(work.graph, space.to_config(space.known_good()[0]), TARGET)
    program = replace(program, meta={"model": "small", "gpu": "h200"})
    drawn = standalone(layer(TimedSchedule(program, tuple(timeline(program)), predict(program), "9")))
    root = ElementTree.fromstring(drawn)
    texts = [each.text or "" for each in root.iter() if each.tag.endswith("text")]
    assert any(text.startswith("small on 2xh200: layer") for text in texts)
    assert any(text.endswith("a row is an SM; GPU 0 is at the top, GPU 1 at the bottom") for text in texts)
    (axis,) = [each.get("d") or "" for each in root.iter() if each.get("class") == "axis"]
    found = re.fullmatch(r"M[\d.]+ ([\d.]+)V([\d.]+)H[\d.]+M[\d.]+ ([\d.]+)H[\d.]+", axis)
    assert found is not None
    top, bottom, border = map(float, found.groups())
    assert border == pytest.approx((top + bottom) / 2, abs=0.02)


STARVED = 0.06
"""In the fixture, tasks are at a phase MULTIPLY for longer than this share of the launch."""


@cache
def timelines() -> dict[str, Timeline]:
    work = make_workload("smollm2-135m", "l4", "bf16", 512)
    space = make_space(work)
    program = lower(work.graph, space.to_config(space.known_good()[0]), work.target)
    predicted = TimedSchedule(program, tuple(timeline(program)), predict(program), "9")
    return {"measured": measured(small_program(), replace(small_trace(), starved=STARVED)), "predicted": predicted}


@pytest.mark.parametrize("kind", ["measured", "predicted"])
def test_the_area_of_each_colour_is_the_share_that_the_legend_states(kind: str) -> None:
    found = timelines()[kind]
    root = ElementTree.fromstring(layer(found))
    (axis,) = [each.get("d") or "" for each in root.iter() if each.get("class") == "axis"]
    left, right = map(float, re.findall(r"^M([\d.]+).*H([\d.]+)$", axis)[0])
    area: dict[str, float] = dict.fromkeys(State, 0.0)
    lines: dict[str, list[tuple[float, float]]] = {}
    for path in root.iter():
        if (path.get("class") or "").startswith("state "):
            for x, y, length in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", path.get("d") or ""):
                area[(path.get("class") or "").removeprefix("state ")] += float(length)
                lines.setdefault(y, []).append((float(x), float(x) + float(length)))
    assert len({path.get("stroke-width") for path in root.iter() if "state " in (path.get("class") or "")}) == 1
    assert len(lines) == found.sms  # each row is drawn, and nothing in it covers anything else
    for drawn in lines.values():
        assert all(before[1] <= after[0] + 0.021 for before, after in pairwise(sorted(drawn)))
        assert left - 0.01 <= min(drawn)[0] and max(drawn)[1] <= right + 0.01
    whole = (right - left) * found.sms
    area[State.IDLE] = whole - sum(area.values())
    texts = [each.text or "" for each in root.iter() if each.tag.endswith("text")]
    stated = {name: float(share) for text in texts for name, share in re.findall(r"^(\w+) ([\d.]+)% \(", text)}
    assert list(stated) == list(MEANINGS) == list(State)
    for name, share in stated.items():
        assert area[name] / whole * 100 == pytest.approx(share, abs=0.1)
    assert min(stated["multiply"], stated["starve"], stated["wait"], stated["stage"]) > 1


@pytest.mark.parametrize("kind", ["measured", "predicted"])
def test_states_make_up_all_time_of_all_sms(kind: str) -> None:
    found = timelines()[kind]
    for told in (step_states(found), window_states(found, window(found))):
        assert sum(told.values()) == pytest.approx(1.0)
        assert min(told.values()) >= 0.0


def test_states_of_a_trace_are_its_phases_and_its_starving() -> None:
    trace, times = replace(small_trace(), starved=STARVED), operation_times(small_trace())
    told = step_states(measured(small_program(), trace))
    phases = {phase: sum(each.phases_us[phase] for each in times) / trace.span_us for phase in Phase}
    assert told[State.STARVE] == pytest.approx(STARVED)
    assert told[State.MULTIPLY] == pytest.approx(phases[Phase.MULTIPLY] - STARVED)
    assert told[State.STAGE] == pytest.approx(phases[Phase.STAGE])
    assert told[State.WAIT] == pytest.approx(phases[Phase.WAIT])
    assert told[State.IDLE] == pytest.approx(idle_us(trace) / trace.span_us)
    hungry = step_states(measured(small_program(), replace(trace, starved=0.99)))
    assert hungry[State.STARVE] == pytest.approx(phases[Phase.MULTIPLY])
    assert hungry[State.MULTIPLY] == 0.0


def test_an_operation_has_one_colour_in_every_trace_file() -> None:
    assert reserved("q_norm") == reserved("final_norm")
    assert reserved("gate_proj") != reserved("down_proj")
    assert {reserved(f"somebody_elses_{number}") for number in range(20)} <= set(RESERVED)


def test_shares_of_measured_spans_leave_out_the_waiting() -> None:
    found = {each.operation: each.time_share for each in shares(measured(small_program(), small_trace()))}
    times = operation_times(small_trace())
    working = {each.operation: each.sm_us - each.phases_us[Phase.WAIT] for each in times}
    for name, share in found.items():
        assert share == pytest.approx(working[name] / sum(working.values()))


@pytest.mark.parametrize("kind", ["measured", "predicted"])
def test_a_trace_file_has_one_track_an_sm_and_each_task_once(kind: str) -> None:
    program = small_program()
    if kind == "measured":
        slices = measured_slices(small_trace())
    else:
        slices = predicted_slices(program.tasks, timeline(program))
    names, events = read(chrome_trace("small, somewhere", slices, {"position": 63}))
    assert names[0]["args"] == {"name": "small, somewhere"}
    tracks = {event["tid"]: event["args"]["name"] for event in names if event["name"] == "thread_name"}
    assert tracks == {sm + 1: f"SM {sm}" for sm in range(6)}
    assert {event["tid"] for event in events} == tracks.keys()
    assert {event["pid"] for event in names + events} == {1}
    tasks = {event["args"]["task"]: event for event in events if event["cat"] == "task"}
    assert len(tasks) == sum(event["cat"] == "task" for event in events) == len(program.tasks)
    for task in program.tasks:
        event = tasks[task.id]
        assert (event["name"], event["args"]["label"]) == (operation(task.label), task.label)
        assert event["cname"] == reserved(event["name"])
        assert (event["tid"], event["args"]["bytes"]) == (task.sm + 1 if task.sm is not None else None, task.est_bytes)
        assert event["args"]["waits"].count("counter") == len(task.waits)


def test_a_trace_file_is_in_the_order_of_time_and_parts_lie_within_tasks() -> None:
    _, events = read(chrome_trace("t", measured_slices(small_trace()), {}))
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert min(event["dur"] for event in events) >= 0
    ends: dict[int, tuple[int, int]] = {}  # of the task, of its last part; whole ns
    for event in events:
        start, end = round(event["ts"] * 1e3), round((event["ts"] + event["dur"]) * 1e3)
        task_end, part_end = ends.get(event["tid"], (0, 0))
        if event["cat"] == "task":
            assert start >= task_end
            ends[event["tid"]] = end, start
        else:
            assert event["name"] in PHASES
            assert part_end <= start < end <= task_end
            ends[event["tid"]] = task_end, end


def test_the_same_launch_gives_the_same_file() -> None:
    slices = measured_slices(small_trace())
    text = chrome_trace("t", slices, {"a": None})
    assert text == chrome_trace("t", slices[::-1], {"a": None})
    assert json.loads(text)["otherData"] == {"a": None}
