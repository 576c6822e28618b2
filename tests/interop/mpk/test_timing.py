from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from effort import LONG

from flywheel.interop.mpk.graph import MpkGraph, read_graph
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.timing import H200, bounds_of, predict_step, shares, streamed_bytes
from flywheel.report.chrome import chrome_trace
from flywheel.report.mpk import mpk_slices


@pytest.fixture(scope="module")
def steps() -> ModuleType:
    """experiments/mpk_steps.py."""
    path = Path(__file__).parents[3] / "experiments" / "mpk_steps.py"
    spec = importlib.util.spec_from_file_location("mpk_steps", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_experiment_makes_the_graph_that_mpk_makes_byte_for_byte(
    steps: ModuleType, sample: Callable[[str], bytes]
) -> None:
    assert json.dumps(steps.llama_document(steps.LLAMA_1B), indent=2).encode() == sample("l1b")


@pytest.mark.parametrize("name", ["llama3.2-1b", pytest.param("llama3-8b", marks=LONG)])
def test_a_measured_step_of_mpk_is_predicted_within_a_tenth(steps: ModuleType, name: str) -> None:
    dims = {"llama3.2-1b": steps.LLAMA_1B, "llama3-8b": steps.LLAMA_8B}[name]
    found = read_graph(json.dumps(steps.llama_document(dims)).encode())
    assert check([found], H200.workers).ok
    timing = predict_step(found, context=steps.CONTEXT)
    assert timing.latency_us == pytest.approx(steps.MEASURED_US[name], rel=0.1)
    assert 0.99 * timing.latency_us < bounds_of(found, context=steps.CONTEXT).unqueued_us < timing.latency_us


def test_a_worker_runs_one_task_at_a_time_in_the_order_of_its_queue(graph: Callable[..., MpkGraph]) -> None:
    found = graph("tiny")
    timing = predict_step(found, workers=16)
    assert sorted(span.node for span in timing.spans) == list(range(len(found.tasks) - 2))
    for worker in range(16):
        spans = sorted((span for span in timing.spans if span.worker == worker), key=lambda span: span.node)
        assert [span.node % 16 for span in spans] == [worker] * len(spans)
        for first, second in pairwise(spans):
            assert first.ready_us <= first.met_us <= first.done_us <= second.ready_us


def test_a_task_runs_after_all_that_signal_its_event(graph: Callable[..., MpkGraph]) -> None:
    found = graph("tiny")
    timing = predict_step(found)
    spans = {span.node: span for span in timing.spans}
    ended = {}
    for place, task in enumerate(found.tasks[2:]):
        ended[task.trigger] = max(ended.get(task.trigger, 0.0), spans[place].done_us)
    for place, task in enumerate(found.tasks[2:]):
        if task.dependent in ended:
            assert spans[place].met_us >= ended[task.dependent]


def test_more_bandwidth_or_cheaper_events_make_no_step_slower(graph: Callable[..., MpkGraph]) -> None:
    found = graph("tiny")
    plain = predict_step(found).latency_us
    assert predict_step(found, replace(H200, memory_gbs=2 * H200.memory_gbs)).latency_us <= plain
    assert predict_step(found, replace(H200, event_us=0.5 * H200.event_us)).latency_us < plain


def test_only_weights_and_the_rows_of_a_cache_that_are_needed_come_from_memory(graph: Callable[..., MpkGraph]) -> None:
    found = graph("l1b")
    nbytes = sum(streamed_bytes(found, 512))
    layers = 16 * (3072 * 2048 + 2048 * 2048 + 3 * 8192 * 2048 + 2 * 2048) + 2048
    head, caches = 153600 * 2048, 16 * 2 * 512 * 512
    assert nbytes == 2 * (layers + head + caches + 2048)


def test_two_gpus_are_predicted_as_if_the_other_were_as_far(graph: Callable[..., MpkGraph]) -> None:
    found = graph("tiny2g_r0")
    timing = predict_step(found)
    assert len(timing.spans) == len(found.tasks) - 2
    assert timing.latency_us > timing.floor_us


def test_shares_add_up_to_all_spans_and_a_trace_holds_them(graph: Callable[..., MpkGraph]) -> None:
    found = graph("micro_2layer")
    timing = predict_step(found)
    listed = shares(found, timing)
    assert sum(share.tasks for share in listed) == len(timing.spans)
    assert sum(share.ran_us for share in listed) == pytest.approx(sum(s.done_us - s.met_us for s in timing.spans))
    events = json.loads(chrome_trace("a step", mpk_slices(found, timing), {}))["traceEvents"]
    assert sum(event.get("cat") == "task" for event in events) == len(timing.spans)
