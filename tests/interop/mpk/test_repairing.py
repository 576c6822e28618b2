from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from flywheel.interop.mpk.graph import EMPTY, END, INVALID, MpkGraph, is_remote, read_graph, write_graph
from flywheel.interop.mpk.kinds import BEGIN, STRIDED_PUT
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.repairing import Repair, repair

Graphs = Callable[..., MpkGraph]


def _again(found: Repair) -> list[MpkGraph]:
    """The graphs as their files say them."""
    return [read_graph(write_graph(graph.document, graph.layout)) for graph in found.graphs]


def _without(document: dict[str, Any], *names: str) -> list[str]:
    """All tasks but relays, without the fields that a repair may change."""
    tasks = document["all_tasks"]
    return [
        json.dumps({name: value for name, value in task.items() if name not in names}, sort_keys=True)
        for place, task in enumerate(tasks)
        if place < 2 or task["task_type"] != BEGIN
    ]


def test_a_safe_graph_is_left_as_it_is(graph: Graphs) -> None:
    found = repair([graph("micro_2layer")], None, {})
    assert (found.relays, found.result.ok) == (0, True)
    assert found.graphs[0].document == graph("micro_2layer").document


@pytest.mark.parametrize("workers", [None, 128])
def test_the_gather_of_mla_comes_before_its_attention_for_two_relays(graph: Graphs, workers: int | None) -> None:
    found = repair([graph("exp_mla")], workers, {})
    assert (found.relays, found.result.ok) == (2, True)
    (mended,) = _again(found)
    assert check([mended], workers).ok
    assert not [warning for warning in check([mended]).warnings if warning.code == "late-read"]
    changed = ("dependent_event", "trigger_event")
    before, after = (_without(dict(each.document), *changed) for each in (graph("exp_mla"), mended))
    assert Counter(before) == Counter(after)
    assert [event.kind for event in mended.events][-1] == END


def test_an_all_reduce_is_repaired_on_both_gpus_under_any_placement(graph: Graphs) -> None:
    graphs = [graph("micro_2gpu_r0"), graph("micro_2gpu_r1")]
    found = repair(graphs, None, {})
    assert found.result.ok
    mended = _again(found)
    assert check(mended).ok and check(mended, 7).ok
    for old, new in zip(graphs, mended, strict=True):
        kinds = Counter(task.kind for task in new.tasks)
        kinds.subtract(Counter(task.kind for task in old.tasks))
        assert {kind for kind, count in kinds.items() if count} == {BEGIN, STRIDED_PUT}
        assert kinds[BEGIN] + kinds[STRIDED_PUT] == found.relays / 2
        assert kinds[STRIDED_PUT] == 4  # one for each all-reduce, the last one for the next iteration's


def test_a_relay_to_another_gpu_writes_the_slot_that_nobody_reads(graph: Graphs) -> None:
    found = repair([graph("micro_2gpu_r0"), graph("micro_2gpu_r1")], None, {})
    for whole in found.graphs:
        puts = [task for task in whole.tasks if task.kind == STRIDED_PUT]
        slots = Counter(task.outputs[0].offset // (task.outputs[0].strides[0] * 2) for task in puts)
        assert slots == {whole.rank: 16, 1 - whole.rank: 4}
        assert all(is_remote(task.trigger) for task in puts)


def test_a_dropped_wait_is_found_again(graph: Graphs) -> None:
    def drop(document: dict[str, Any]) -> None:
        document["all_tasks"][23]["dependent_event"] = INVALID  # a product that then reads before its norm

    broken = graph("micro_2layer", drop)
    assert not check([broken]).ok
    found = repair([broken], None, {})
    assert (found.relays, found.result.ok) == (0, True)
    assert found.graphs[0].tasks[23].dependent == graph("micro_2layer").tasks[23].dependent


def test_what_is_no_race_is_not_repaired(graph: Graphs) -> None:
    def starve(document: dict[str, Any]) -> None:
        document["all_events"][5]["num_triggers"] += 1

    found = repair([graph("micro_2layer", starve)], None, {})
    assert (found.relays, found.result.ok) == (0, False)
    assert EMPTY == 900
