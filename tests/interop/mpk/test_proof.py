from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
from effort import LONG, pairs, sample
from work import lines_run

from flywheel.interop.mpk.graph import INVALID, MpkGraph, event_id
from flywheel.interop.mpk.joint import mirrored
from flywheel.interop.mpk.kinds import KINDS
from flywheel.interop.mpk.proof import CODES, check
from flywheel.ir.validate.findings import ValidationResult

SAFE = ["micro_2layer", "tiny", "tinyamp", "tinybw", "tinysplit", "l1b", "q06", "q8b"]
PAIRS = ["micro_2gpu", "tiny2g", "h4096x2_g2", "h5120x2_g2"]

Graphs = Callable[..., MpkGraph]
Checked = Callable[..., ValidationResult]


def _ranks(name: str) -> tuple[str, str]:
    return f"{name}_r0", f"{name}_r1"


def _about(result: ValidationResult, *words: str) -> bool:
    """Whether an error has all the words."""
    return any(all(word in error.message for word in words) for error in result.errors)


@pytest.mark.parametrize(("name", "workers"), pairs(SAFE, [None, 128]))
def test_a_graph_of_one_gpu_is_safe_under_any_placement_and_under_mpks(
    checked: Checked, name: str, workers: int | None
) -> None:
    result = checked(workers, name)
    assert result.ok, result.report()
    assert result.warnings == ()


def test_a_tile_all_reduce_is_not_accepted_and_the_other_ranks_are_missing(checked: Checked) -> None:
    for workers in (None, 128):
        result = checked(workers, "tiny2gtile_r0")
        assert [error.code for error in result.errors] == ["unfinished-collective"]
        assert all(word in result.errors[0].message for word in ("NVSHMEM_TILE_ALLREDUCE", "31 more", "non-blocking"))
        assert [warning.code for warning in result.warnings] == ["missing-rank"]
        assert "no file of another rank" in result.warnings[0].message


def test_all_ranks_of_a_tile_all_reduce_are_refused_too_and_none_is_missing(graph: Graphs) -> None:
    first = graph("tiny2gtile_r0")
    result = check([first, mirrored(first, 1, 2)])
    assert {error.code for error in result.errors} == {"unfinished-collective"}
    assert result.warnings == ()


def test_the_gather_of_mla_races_with_the_attention_that_reads_what_it_gathers(checked: Checked) -> None:
    for workers in (None, 128):
        result = checked(workers, "exp_mla")
        assert [error.code for error in result.errors] == ["race-read"]
        message = result.errors[0].message
        assert all(word in message for word in ("MLA_KV_GATHER", "MLA_MTP_DECODE", "contiguous_kv", "in no order"))


@pytest.mark.parametrize("name", PAIRS)
def test_a_reduce_waits_for_no_task_of_its_own_gpu(checked: Checked, name: str) -> None:
    words = "(REDUCE): reads tensor attn_proj_out", "RESIDUAL_HOPPER), which writes it"
    assert _about(checked(None, *_ranks(name)), *words)


@pytest.mark.parametrize(("name", "workers"), pairs(PAIRS, [None, 128]))
def test_the_buffer_of_an_all_reduce_is_used_again_in_no_order(
    checked: Checked, name: str, workers: int | None
) -> None:
    words = "NVSHMEM_ALLGATHER_STRIDED_PUT): writes tensor all_reduce_buf", "(REDUCE), which reads it"
    assert _about(checked(workers, *_ranks(name)), *words)


@pytest.mark.parametrize(
    ("name", "workers", "masked"),
    sample([("h4096x2_g2", 128, True), ("h4096x2_g2", 64, True), ("h5120x2_g2", 160, True),
            ("h4096x2_g2", 96, False), ("h5120x2_g2", 128, False)]),
)  # fmt: skip
def test_the_order_of_queues_masks_the_reduce_where_its_product_is_a_multiple_of_the_workers_ahead(
    checked: Checked, name: str, workers: int, masked: bool
) -> None:
    hidden = int(name[1:5]) // 64 * 2 % workers == 0
    assert masked == hidden
    raced = _about(checked(workers, *_ranks(name)), "(REDUCE): reads tensor attn_proj_out", "which writes it")
    assert raced == (not masked)


def test_a_rank_without_a_file_is_taken_to_be_as_another_one(checked: Checked) -> None:
    whole, half = checked(None, *_ranks("tiny2g")), checked(None, "tiny2g_r0")
    assert [warning.code for warning in half.warnings] == ["missing-rank"]
    assert Counter(error.code for error in whole.errors) == Counter(error.code for error in half.errors)


def test_four_ranks_of_which_one_is_here_race_as_two_do(graph: Graphs) -> None:
    result = check([graph("tiny4g_r2")], 128)
    assert "ranks 0, 1, 3: no file" in result.warnings[0].message
    assert {error.code for error in result.errors} == {"race-read"}


@pytest.mark.parametrize("name", PAIRS)
def test_a_mirrored_rank_is_what_mpk_emits_for_it(graph: Graphs, name: str) -> None:
    first, second = (graph(each) for each in _ranks(name))
    made = mirrored(first, 1, 2)
    assert (made.rank, made.events) == (1, second.events)
    assert made.tasks == second.tasks


def test_the_same_rank_twice_is_refused(graph: Graphs) -> None:
    result = check([graph("micro_2layer"), graph("micro_2layer")])
    assert [error.code for error in result.errors] == ["rank-twice"]


def _task(place: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["all_tasks"][place].update(fields)


def _event(place: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document["all_events"][place].update(fields)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_task(0, task_type=10), "bad-task"),
        (_task(3, outputs=[]), "bad-task"),
        (_task(3, dependent_event=event_id(0, 999)), "bad-event"),
        (_task(3, dependent_event=event_id(1, 2)), "bad-event"),
        (_task(3, trigger_event=event_id(1, 2, True)), "bad-event"),
        (_event(5, event_type=5), "bad-event"),
        (_event(1, last_task_id=10**6), "bad-event"),
        (_event(37, event_type=900), "no-end"),
        (_event(3, event_type=910), "no-end"),
        (_event(1, first_task_id=3), "not-launched"),
        (_event(3, event_type=901), "not-launched"),
        (_event(3, num_triggers=3), "unsatisfiable-wait"),
        (_event(3, num_triggers=1), "partial-join"),
        (_event(37, num_triggers=2), "unsatisfiable-wait"),
        (_task(10, trigger_event=INVALID), "unsatisfiable-wait"),
        (_task(2, dependent_event=event_id(0, 4)), "cycle"),
        (_task(9, dependent_event=INVALID), "race-read"),
    ],
)
def test_a_broken_graph_is_refused_by_code(graph: Graphs, change: Callable[[dict[str, Any]], None], code: str) -> None:
    result = check([graph("micro_2layer", change)])
    assert code in {error.code for error in result.errors}, result.report()
    assert code in CODES


def test_an_unknown_type_counts_as_a_writer_of_all_that_it_lists(graph: Graphs) -> None:
    result = check([graph("micro_2layer", _task(9, task_type=999))])
    assert "unknown-type" in {warning.code for warning in result.warnings}
    assert any("type 999" in warning.message for warning in result.warnings)
    assert check([graph("micro_2layer", _task(2, task_type=999))]).ok  # alone at the beginning it harms nobody


def _swapped(document: dict[str, Any]) -> None:
    tasks = document["all_tasks"]
    tasks[3], tasks[9] = tasks[9], tasks[3]


def test_a_list_that_is_out_of_order_blocks_one_worker_and_not_eighty(graph: Graphs) -> None:
    found = graph("micro_2layer", _swapped)
    assert {error.code for error in check([found]).errors} == {"queue-deadlock"}
    assert {error.code for error in check([found], 1).errors} == {"queue-deadlock"}
    assert check([found], 80).ok


def test_more_tasks_than_a_queue_holds_are_refused(graph: Graphs) -> None:
    assert {error.code for error in check([graph("q8b")], 2).errors} == {"queue-overflow"}


@pytest.mark.parametrize("workers", [0, 161])
def test_a_number_of_workers_that_the_runtime_does_not_take_is_refused_with_the_bound(
    graph: Graphs, workers: int
) -> None:
    (error,) = check([graph("micro_2layer")], workers).errors
    assert (error.code, error.message) == ("bad-workers", f"{workers} workers; MPK's runtime takes 1..160")


def _just_in_time(document: dict[str, Any]) -> None:
    """The graph as MPK's runtime takes it where each event launches what waits for it."""
    tasks, events = document["all_tasks"], document["all_events"]
    events[1]["last_task_id"] = 3
    for event in events[2:-1]:
        event["event_type"] = 901
    for task in tasks:
        task["dependent_event"] = INVALID


@pytest.mark.parametrize("workers", [None, 4])
def test_a_graph_that_launches_just_in_time_is_safe(graph: Graphs, workers: int | None) -> None:
    assert check([graph("micro_2layer", _just_in_time)], workers).ok


def test_a_graph_that_launches_just_in_time_needs_its_events(graph: Graphs) -> None:
    def change(document: dict[str, Any]) -> None:
        _just_in_time(document)
        document["all_events"][4]["event_type"] = 900

    assert {error.code for error in check([graph("micro_2layer", change)]).errors} == {"not-launched"}


def test_two_names_of_one_tensor_are_one_where_they_are_said_to_be(graph: Graphs) -> None:
    found = graph("micro_2layer")
    assert check([found]).ok
    result = check([found], aliases={"mlp_mid": "rmsnorm_out"})
    assert "race-read" in {error.code for error in result.errors} or "race-write" in {
        error.code for error in result.errors
    }


def test_additions_commute_and_nothing_else_does(graph: Graphs) -> None:
    assert KINDS[163].adds
    found = graph("micro_2layer")
    tiles = [place for place, task in enumerate(found.tasks) if task.kind == 155 and task.variant == 0][:4]

    def overlapping(kind: int) -> MpkGraph:
        tasks = list(found.tasks)
        for place in tiles:
            tasks[place] = replace(tasks[place], kind=kind, outputs=tasks[tiles[0]].outputs)
        return replace(found, tasks=tasks)

    assert "race-write" in {error.code for error in check([overlapping(155)]).errors}
    assert "race-write" not in {error.code for error in check([overlapping(163)]).errors}


def test_a_tile_that_reads_more_of_a_layer_than_it_waits_for_races(graph: Graphs) -> None:
    found = graph("micro_2layer")
    tasks = list(found.tasks)
    norms = [place for place, task in enumerate(tasks) if task.kind == 154][:2]
    wide = replace(tasks[norms[0]].inputs[0], dims=(2, 64))
    early = next(place for place, task in enumerate(tasks) if task.kind == 118)
    tasks[early] = replace(tasks[early], inputs=(replace(wide, name="mlp_mid", dims=(2, 128), strides=(128, 1)),))
    assert "race-read" in {error.code for error in check([replace(found, tasks=tasks)]).errors}


def test_a_read_beyond_all_writes_of_its_tensor_is_named(graph: Graphs) -> None:
    found = graph("micro_2layer")
    tasks = list(found.tasks)
    place = next(place for place, task in enumerate(tasks) if task.kind == 118)
    piece = tasks[place].inputs[0]
    tasks[place] = replace(tasks[place], inputs=(replace(piece, offset=piece.offset + (1 << 20)),))
    warnings = check([replace(found, tasks=tasks)]).warnings
    assert [warning.code for warning in warnings] == ["unwritten-read"]
    assert f"task {place} (SILU_MUL)" in warnings[0].message and piece.name in warnings[0].message


LINES_A_TASK = 1000
"""qwen3-8b's graph takes about 500, and 0.8 s of one core."""


def _with_waits_dropped(graph: MpkGraph, every: int) -> MpkGraph:
    tasks = [replace(task, dependent=INVALID) if n % every == 0 else task for n, task in enumerate(graph.tasks)]
    return replace(graph, tasks=tasks)


@pytest.mark.parametrize(("every", "workers"), pairs(sample([10**6, 180, 1], 2), [128, None]))
def test_twenty_thousand_tasks_take_the_work_of_about_a_second_racy_or_not(
    graph: Graphs, every: int, workers: int | None
) -> None:
    found = _with_waits_dropped(graph("q8b"), every)
    verdicts: list[bool] = []
    assert lines_run(lambda: verdicts.append(check([found], workers).ok)) < LINES_A_TASK * len(found.tasks)
    assert verdicts == [every == 10**6]


@pytest.mark.parametrize("workers", [None, pytest.param(128, marks=LONG)])
def test_racy_ranks_take_no_more_work_than_a_task_of_one_rank(graph: Graphs, workers: int | None) -> None:
    found = graph("tiny4g_r2")
    results = []
    assert lines_run(lambda: results.append(check([found], workers))) < LINES_A_TASK * 4 * len(found.tasks)
    assert any(finding.code.startswith("race-") for finding in results[0].errors)


def test_races_that_queues_hide_do_not_hide_the_others_where_only_some_are_listed(
    graph: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [graph(name) for name in _ranks("h4096x2_g2")]
    monkeypatch.setattr(import_module("flywheel.ir.validate.sweep"), "MAX_CLASHES", 4)
    result = check(ranks, 128)
    assert not result.ok
    assert _about(result, "which reads it", "all_reduce_buf")
