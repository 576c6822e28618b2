"""Who may signal what, and what waits for ever: small graphs, each of which is safe but for one thing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import pytest

from flywheel.interop.mpk.graph import INVALID, event_id, read_graph
from flywheel.interop.mpk.proof import check, races_of

IDENTITY, PUT, SPLITK = 121, 301, 163


def _tensor(name: str) -> dict[str, Any]:
    return {"base_ptr": name, "offset": 0, "dims": [1, 8], "strides": [8, 1], "data_type": 941}


def _task(kind: int, reads: str, writes: str, dependent: int = INVALID, trigger: int = INVALID) -> dict[str, Any]:
    """A task that reads and writes tensors of one letter each."""
    return {
        "task_type": kind, "variant_id": 0, "inputs": [_tensor(name) for name in reads],
        "outputs": [_tensor(name) for name in writes], "trigger_event": trigger, "dependent_event": dependent,
        "request_id": 0, "kv_idx": 0, "merge_task_offset": 0, "expert_offset": 0, "task_offset": 0,
    }  # fmt: skip


def _event(kind: int, triggers: int, first: int = 0, last: int = 0) -> dict[str, int]:
    return {"event_type": kind, "num_triggers": triggers, "first_task_id": first, "last_task_id": last}


def _graph(
    tasks: Sequence[dict[str, Any]], events: Sequence[dict[str, int]], rank: int = 0, launched: int | None = None
) -> dict[str, Any]:
    """Event 1 launches the first `launched` tasks, or all; `events` are numbered from 2."""
    last = 2 + (len(tasks) if launched is None else launched)
    begin = _task(10, "", "", trigger=event_id(rank, 1))
    return {
        "all_tasks": [_task(0, "", ""), begin, *tasks],
        "all_events": [_event(911, 1), _event(903, 1, 2, last), *events],
        "first_tasks": [1],
    }


def _codes(*documents: dict[str, Any], aliases: dict[str, str] | None = None) -> list[str]:
    graphs = [read_graph(json.dumps(document).encode()) for document in documents]
    return sorted({error.code for error in check(graphs, None, aliases or {}).errors})


def _chain() -> dict[str, Any]:
    return _graph(
        [_task(IDENTITY, "x", "a", trigger=2), _task(IDENTITY, "a", "b", 2, 3)], [_event(900, 1), _event(910, 1)]
    )


def test_a_chain_of_two_tasks_is_safe() -> None:
    assert _codes(_chain()) == []


@pytest.mark.parametrize("place", [0, 1])
def test_the_first_two_tasks_wait_for_nothing(place: int) -> None:
    document = _chain()
    document["all_tasks"][place]["dependent_event"] = 2
    assert _codes(document) == ["bad-event"]


def test_the_task_that_ends_a_launch_signals_nobody() -> None:
    document = _chain()
    document["all_tasks"][0]["trigger_event"] = 3
    document["all_events"][3]["num_triggers"] = 2
    assert _codes(document) == ["unsatisfiable-wait"]


@pytest.mark.parametrize("event", [0, 1])
def test_no_task_of_the_model_begins_an_iteration_or_ends_the_launch(event: int) -> None:
    document = _chain()
    document["all_tasks"].append(_task(IDENTITY, "y", "c", trigger=event))
    document["all_events"][1] |= {"last_task_id": 5, "num_triggers": 1 + event}
    assert _codes(document) == ["bad-event"]


def test_an_end_that_nobody_signals_never_comes() -> None:
    document = _chain()
    document["all_tasks"][3]["trigger_event"] = INVALID
    document["all_events"][3]["num_triggers"] = 0
    assert _codes(document) == ["unsatisfiable-wait"]


def test_a_put_ends_no_iteration_of_another_gpu() -> None:
    sender = _graph(
        [_task(PUT, "x", "s", trigger=event_id(1, 2, True)), _task(IDENTITY, "x", "o", trigger=2)], [_event(910, 1)]
    )
    receiver = _graph([_task(IDENTITY, "x", "o")], [_event(910, 1)], rank=1)
    assert _codes(sender, receiver) == ["bad-event"]


def test_a_put_signals_the_gpu_whose_memory_it_writes() -> None:
    assert _codes(_graph([_task(PUT, "x", "s"), _task(IDENTITY, "x", "o", trigger=2)], [_event(910, 1)])) == [
        "bad-event"
    ]


@pytest.mark.parametrize("launched", [1, 2])
def test_a_wait_in_front_of_a_task_launched_late_blocks(launched: int) -> None:
    tasks = [
        _task(IDENTITY, "x", "a", trigger=2),
        _task(IDENTITY, "b", "c", 3, 4),
        _task(IDENTITY, "a", "b", trigger=3),
    ]
    events = [_event(901, 1, 2 + launched, 5), _event(900, 1), _event(910, 1)]
    assert _codes(_graph(tasks, events, launched=launched)) == ["blocking-launch"]


def test_an_addition_races_with_a_read_in_front_of_another_addition() -> None:
    first, second = _task(SPLITK, "yw", "C", 3, 4), _task(SPLITK, "xw", "C", 2, 4)
    ends = [_task(IDENTITY, "x", "C", trigger=2), _task(IDENTITY, "C", "y", 2, 3)]
    events = [_event(900, 1), _event(900, 1), _event(900, 2), _event(910, 1)]
    for adding in ([first, second], [second, first]):
        assert _codes(_graph([*ends, *adding, _task(IDENTITY, "C", "o", 4, 5)], events)) == ["race-read"]


def test_aliases_are_followed() -> None:
    document = _graph([_task(IDENTITY, "x", "a", trigger=2), _task(IDENTITY, "x", "c", trigger=2)], [_event(910, 2)])
    assert _codes(document) == []
    for aliases in ({"a": "c"}, {"a": "b", "b": "c"}, {"b": "c", "a": "b"}, {"a": "b", "c": "b"}):
        assert _codes(document, aliases=aliases) == ["race-write"], aliases


def test_a_signal_of_the_next_iteration_does_not_stand_in_for_one_of_this() -> None:
    """Rank 0 may send twice before rank 1's own producer is done once."""
    send = _task(PUT, "x", "s", trigger=event_id(1, 2, True))
    sender = _graph([send, _task(IDENTITY, "x", "o", trigger=2)], [_event(910, 1)])
    own = _task(IDENTITY, "x", "B", trigger=event_id(1, 2))
    waiter = _task(IDENTITY, "B", "o", event_id(1, 2), event_id(1, 3))
    receiver = _graph([own, waiter], [_event(900, 2), _event(910, 1)], rank=1)
    assert _codes(sender, receiver) == ["race-write"]
    send["outputs"] = [_tensor("nullptr")]
    assert _codes(sender, receiver) == ["mixed-iterations"]


@pytest.mark.parametrize("tagged", [True, False])
def test_a_wait_for_equality_that_the_next_iteration_may_overtake_is_rejected(tagged: bool) -> None:
    """Rank 0 sends again when rank 1 has answered, whose other task may not have looked yet."""
    send = _task(PUT, "x", "s", trigger=event_id(1, 2, True))
    answer = _task(PUT, "x", "s", event_id(1, 2), event_id(0, 2, True))
    send["outputs"] = answer["outputs"] = [_tensor("nullptr")]
    done = _task(IDENTITY, "x", "o", event_id(0, 2, True), event_id(0, 3))
    waiter = _task(IDENTITY, "B", "o", event_id(1, 2, tagged), event_id(1, 3))
    sender = _graph([send, done], [_event(900, 1), _event(910, 1)])
    receiver = _graph([answer, waiter], [_event(900, 1), _event(910, 1)], rank=1)
    assert _codes(sender, receiver) == (["missed-signal"] if tagged else [])


def test_a_sweep_names_some_of_many_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("flywheel.ir.validate.sweep"), "MAX_CLASHES", 50)
    adding = [_task(SPLITK, "xw", "C", trigger=2) for _ in range(40)]
    reading = [_task(IDENTITY, "C", chr(200 + place), trigger=2) for place in range(40)]
    document = _graph([*adding, *reading], [_event(910, 80)])
    assert _codes(document) == ["race-read"]
    found = races_of([read_graph(json.dumps(document).encode())], None, {})
    assert 50 <= len(found.clashes) < 100
