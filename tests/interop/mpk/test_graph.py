from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.errors import IrFormatError, UnsupportedModelError
from flywheel.interop.mpk.converting import convert
from flywheel.interop.mpk.graph import (
    INVALID,
    METADATA,
    MpkGraph,
    event_id,
    is_remote,
    place_of,
    rank_of,
    read_graph,
    write_graph,
)
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.rescheduling import LAUNCHES, GraphSchedule, reschedule
from flywheel.interop.mpk.timing import bounds_of, predict_step
from flywheel.ir import TARGETS
from flywheel.models.spec import DecoderSpec

MICRO = DecoderSpec("micro", "qwen3", 64, 128, 2, 4, 2, 16, 128, 1e4, 1e-6, 64, qk_norm=True)
SAMPLES = sorted(path.name.removesuffix(".json.xz") for path in (Path(__file__).parent / "graphs").glob("*.xz"))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_comes_back_byte_for_byte(
    sample: Callable[[str], bytes], graph: Callable[..., MpkGraph], name: str
) -> None:
    found = graph(name)
    assert write_graph(found.document, found.layout) == sample(name)


def test_a_file_of_2025_comes_back_byte_for_byte(sample: Callable[[str], bytes]) -> None:
    document = json.loads(sample("micro_2layer"))
    for task in document["all_tasks"]:
        for name in METADATA:
            del task[name]
    data = json.dumps(document, indent=2).encode() + b"\n"
    found = read_graph(data)
    assert {task.metadata for task in found.tasks} == {()}
    assert write_graph(found.document, found.layout) == data


def test_the_rank_is_that_of_the_event_which_begins_an_iteration(graph: Callable[..., MpkGraph]) -> None:
    assert [graph(name).rank for name in ("micro_2gpu_r0", "micro_2gpu_r1", "tiny4g_r2")] == [0, 1, 2]


def test_an_event_id_holds_rank_place_and_whether_it_is_remote() -> None:
    event = event_id(3, 77, remote=True)
    assert (rank_of(event), place_of(event), is_remote(event)) == (3, 77, True)
    assert not is_remote(event_id(3, 77))
    assert is_remote(INVALID)  # why each use asks first whether there is an event


def _set(*path: str | int) -> Callable[[dict[str, Any], Any], None]:
    def change(document: dict[str, Any], value: Any) -> None:
        place: Any = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("all_tasks",), {}, "all_tasks: a dict is not a list"),
        (("all_tasks", 3), 7, "all_tasks[3]: 7 is not an object"),
        (("all_tasks", 3, "task_type"), "x", "all_tasks[3]: task_type: 'x' is not an int in 0..18446744073709551615"),
        (("all_tasks", 3, "trigger_event"), -1, "all_tasks[3]: trigger_event: -1 is not an int"),
        (("all_tasks", 3, "inputs", 0, "dims"), [1, True], "all_tasks[3].inputs[0].dims[1]: True is not an int"),
        (("all_tasks", 3, "inputs", 0, "dims"), [1], "all_tasks[3].inputs[0]: 1 dims and 2 strides"),
        (("all_tasks", 3, "inputs", 0, "base_ptr"), None, "all_tasks[3].inputs[0]: base_ptr None is not a string"),
        (("all_tasks", 3, "inputs"), [{}] * 8, "all_tasks[3].inputs: 8 tensors, more than the 7 that a task holds"),
        (("all_tasks", 1, "trigger_event"), INVALID, "all_tasks[1]: trigger_event is invalid"),
        (("all_events", 2, "num_triggers"), 1.5, "all_events[2]: num_triggers: 1.5 is not an int"),
        (("first_tasks", 0), None, "first_tasks[0]: None is not an int"),
    ],
)
def test_a_schema_error_is_one_line_that_names_the_place(
    sample: Callable[[str], bytes], path: tuple[str | int, ...], value: Any, message: str
) -> None:
    document = json.loads(sample("micro_2layer"))
    _set(*path)(document, value)
    with pytest.raises(IrFormatError) as error:
        read_graph(json.dumps(document).encode())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["request_id", "task_offset"])
def test_metadata_is_all_there_or_not_at_all(sample: Callable[[str], bytes], name: str) -> None:
    document = json.loads(sample("micro_2layer"))
    del document["all_tasks"][5][name]
    with pytest.raises(IrFormatError, match=name):
        read_graph(json.dumps(document).encode())


def _read_or_refused(data: bytes) -> MpkGraph | str:
    """The graph, or why it is none."""
    try:
        return read_graph(data)
    except IrFormatError as error:
        return str(error)


def _accepts(found: MpkGraph, workers: int | None = None) -> bool:
    """Whether the proof accepts a graph, which it says without raising."""
    result = check([found], workers)
    assert result.ok == (not result.errors)
    return result.ok


@given(st.binary(max_size=200) | st.text(alphabet='{}[]":,0123456789truefalsn"eE+-. \\u', max_size=200).map(str.encode))
@settings(max_examples=examples(300, 60), deadline=None)
def test_any_bytes_are_read_or_refused_in_one_line(data: bytes) -> None:
    found = _read_or_refused(data)
    if isinstance(found, str):
        assert len(found.splitlines()) == 1
    else:
        _accepts(found)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([0, 1, 2, 5, 900, 903, 910, 2**31 - 1, 2**40, INVALID, event_id(1, 3), event_id(1, 3, True)]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 2**31), max_size=5),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def _used(found: MpkGraph) -> None:
    """What is made of a graph that the proof accepts is made without an error, or refused in a line."""
    bounds_of(found)
    for launch in LAUNCHES:
        moved = reschedule(found, GraphSchedule("met", "split", launch, 8))
        assert predict_step(moved, workers=8).latency_us > 0
    try:
        convert(found, MICRO, TARGETS["h200"], 16)
    except UnsupportedModelError as error:
        assert "\n" not in str(error)


@given(st.data())
@settings(max_examples=examples(150, 30), deadline=None)
def test_a_file_with_any_values_changed_is_refused_or_judged(
    sample: Callable[[str], bytes], data: st.DataObject
) -> None:
    document = json.loads(sample("micro_2layer"))
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["all_tasks", "all_events"]))
        item: Any = data.draw(st.sampled_from(document[kind]))
        name = data.draw(st.sampled_from(sorted(item)))
        if isinstance(item[name], list) and item[name] and data.draw(st.booleans()):
            item = data.draw(st.sampled_from(item[name]))
            if not isinstance(item, dict) or not item:
                continue
            name = data.draw(st.sampled_from(sorted(item)))
        item[name] = data.draw(JUNK)
    found = _read_or_refused(json.dumps(document).encode())
    if isinstance(found, str):
        assert len(found.splitlines()) == 1
        return
    _accepts(found, 3)
    if _accepts(found):
        _used(found)


def test_an_indentation_deeper_than_any_writer_s_is_not_written_back(sample: Callable[[str], bytes]) -> None:
    data = json.dumps(json.loads(sample("micro_2layer")), indent=600).encode()
    found = read_graph(data)
    assert len(write_graph(found.document, found.layout)) < len(data) / 10
