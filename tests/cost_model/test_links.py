"""What a step of several GPUs should take."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from imagined import SPECS, TARGET

from flywheel.cost_model import predict, timeline
from flywheel.cost_model.links import NVLINK, Link, exchanges_us, link_of
from flywheel.cost_model.machine import machine_for
from flywheel.cost_model.predict import predict_us
from flywheel.ir import MegakernelProgram, program_from_json, program_to_json
from flywheel.lowering.lower import lower
from flywheel.measure.ceiling import PeerLink
from flywheel.models.catalog import CATALOG
from flywheel.search.space import make_space
from flywheel.search.workload import Workload


def shared(ranks: int, batch: int = 1) -> MegakernelProgram:
    work = Workload("small", SPECS[0], TARGET, "bf16", 256, batch, ranks=ranks)
    space = make_space(work)
    return lower(work.graph, space.to_config(space.known_good()[0]), TARGET)


def test_one_gpu_exchanges_nothing() -> None:
    assert exchanges_us(shared(1)) == 0.0


@pytest.mark.parametrize("batch", [1, 4])
def test_an_exchange_adds_the_further_way_and_its_bytes(batch: int) -> None:
    (spec, _), program = SPECS, shared(2, batch)
    exchanges = 2 * spec.n_layers + 1
    nbytes = 4 * batch * (2 * spec.n_layers * spec.hidden + spec.vocab / 2)
    further = exchanges * (NVLINK.one_way_us - NVLINK.same_gpu_us)
    assert exchanges_us(program) == pytest.approx(further + nbytes / NVLINK.gbs / 1e3, rel=0.01)
    assert exchanges_us(program_from_json(program_to_json(program))) == pytest.approx(exchanges_us(program))


def pair(peer: int, one_way_us: float, gbs: float) -> PeerLink:
    return PeerLink("Few", None, "lab", peer, one_way_us, 0.5, gbs, gbs + 1, "2026-01-02T03:04:05+00:00")


def test_the_slowest_pair_of_a_probe_is_the_link() -> None:
    assert link_of([]) is None
    assert link_of([pair(1, 0.9, 390.0), pair(2, 1.4, 400.0), pair(3, 1.0, 380.0)]) == Link(1.4, 0.5, 380.0)


def test_a_probed_link_prices_the_exchanges_and_leaves_one_gpu_alone() -> None:
    slow = replace(machine_for(TARGET), link=Link(5.0, 0.5, 20.0))
    program = shared(2)
    more = exchanges_us(program, Link(5.0, 0.5, 20.0)) - exchanges_us(program)
    assert more > 0
    for predicted in (predict_us, lambda *given: predict(*given).latency_us):
        assert predicted(program, slow) - predicted(program) == pytest.approx(more)
        assert predicted(shared(1), slow) == predicted(shared(1))
    assert exchanges_us(program, Link(0.4, 0.5, 1e6)) < exchanges_us(program, Link(0.6, 0.5, 1e6))
    assert exchanges_us(program, Link(0.4, 0.5, 1e6)) >= 0


def test_both_predictions_of_several_gpus_agree() -> None:
    program = shared(2)
    assert predict_us(program) == predict(program).latency_us
    assert predict(program).latency_us > predict(program).floor_us


def test_more_gpus_take_less_of_a_large_model() -> None:
    times = []
    for ranks in (1, 2, 4):
        work = Workload("llama3-8b", CATALOG["llama3-8b"], TARGET, "bf16", 64, ranks=ranks)
        space = make_space(work)
        times.append(predict_us(lower(work.graph, space.to_config(space.known_good()[0]), TARGET)))
    assert all(one > 1.5 * other for one, other in pairwise(times))


def test_the_timeline_has_every_task_but_pushes_on_its_gpu() -> None:
    program = shared(2)
    buffers = {buffer.id: buffer for buffer in program.buffers}
    made = [task for task in program.tasks if buffers[task.outputs[0]].rank == task.rank]
    spans = {span.task: span for span in timeline(program)}
    assert spans.keys() == {task.id for task in made}
    for task in made:
        assert task.sm is not None
        assert spans[task.id].sm == task.sm + TARGET.num_sms * task.rank


def test_a_sum_right_behind_a_product_takes_no_time_of_its_own() -> None:
    program = shared(2)
    labels = {task.id: task.label for task in program.tasks}
    spans = timeline(program)
    sums = [span for span in spans if labels[span.task].endswith("_sum")]
    assert sums and all(span.end_us == span.start_us for span in sums)
    assert any(span.end_us > span.start_us for span in spans if labels[span.task].endswith("o_proj"))
