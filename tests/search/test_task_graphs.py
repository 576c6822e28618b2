from __future__ import annotations

import json
import lzma
from collections import Counter
from pathlib import Path

from flywheel.interop.mpk.graph import MpkGraph, read_graph
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.repairing import repair
from flywheel.interop.mpk.timing import bounds_of, predict_step
from flywheel.search.task_graphs import search_graphs, space_of

GRAPHS = Path(__file__).parents[1] / "interop" / "mpk" / "graphs"


def _graph(name: str) -> MpkGraph:
    return read_graph(lzma.decompress((GRAPHS / f"{name}.json.xz").read_bytes()))


def test_every_trial_is_proved_and_the_best_is_no_slower_than_the_file() -> None:
    graph = _graph("micro_2layer")
    found = search_graphs([graph], {}, (4, 8), trials=40)
    assert found.trials[0].latency_us == predict_step(graph, workers=4).latency_us
    assert found.best.latency_us is not None
    assert found.best.latency_us <= min(each.latency_us for each in found.trials if each.latency_us is not None)
    assert check(found.graphs, found.best.schedule.workers).ok
    assert predict_step(found.graphs[0], workers=found.best.schedule.workers).latency_us == found.best.latency_us


def test_a_search_of_the_same_seed_finds_the_same_bytes() -> None:
    graph = _graph("micro_2layer")
    first, second = (search_graphs([graph], {}, (4, 8), trials=12, seed=3) for _ in range(2))
    assert first.trials == second.trials
    assert first.graphs[0].document == second.graphs[0].document


def test_a_search_goes_on_to_what_gives_a_racy_graph_that_was_mended_a_better_order() -> None:
    mended = repair([_graph("exp_mla")], None, {})
    assert mended.result.ok
    given = predict_step(mended.graphs[0]).latency_us
    found = search_graphs(mended.graphs, {}, (128,), trials=10)
    assert found.best.latency_us is not None and found.best.latency_us <= given
    assert found.best.latency_us >= bounds_of(mended.graphs[0]).path_us


def test_knobs_that_change_nothing_have_one_value() -> None:
    values = {dimension.name: dimension.values for dimension in space_of([_graph("micro_2layer")], (128,)).dimensions}
    assert values["events"] == ("given",)
    assert values["launch"] == ("ahead", "just in time")
    ranks = [_graph("micro_2gpu_r0"), _graph("micro_2gpu_r1")]
    values = {dimension.name: dimension.values for dimension in space_of(ranks, (128,)).dimensions}
    assert values["launch"] == ("ahead",)


def test_operands_and_types_of_a_rescheduled_graph_are_those_of_the_file() -> None:
    graph = _graph("micro_2layer")
    for tried in (5, 9):
        found = search_graphs([graph], {}, (tried,), trials=10, seed=tried)
        fields = ("task_type", "variant_id", "inputs", "outputs", "request_id", "kv_idx")
        both = [
            Counter(json.dumps([task[name] for name in fields]) for task in each.document["all_tasks"])
            for each in (graph, found.graphs[0])
        ]
        assert both[0] == both[1]


def test_a_trial_that_the_proof_rejects_has_no_time_and_says_why() -> None:
    found = search_graphs([_graph("exp_mla")], {}, (128,), trials=3)
    assert all(each.latency_us is None and "contiguous_kv" in (each.reason or "") for each in found.trials)


def test_the_order_of_mended_ranks_is_proved_for_all_of_them_together() -> None:
    mended = repair([_graph("micro_2gpu_r0"), _graph("micro_2gpu_r1")], None, {})
    found = search_graphs(mended.graphs, {}, (16,), trials=5)
    assert {each.schedule.order for each in found.trials} == {"given", "met", "critical", "largest", "turned"}
    assert all(each.latency_us is not None for each in found.trials)
    assert [len(graph.tasks) for graph in found.graphs] == [len(graph.tasks) for graph in mended.graphs]
    assert check(found.graphs, 16).ok
