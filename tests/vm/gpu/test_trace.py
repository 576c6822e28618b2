from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from traces import BASE_NS, WAITS, model_stamps, small_program, small_trace

from flywheel.cost_model import machine_for, timeline
from flywheel.errors import TraceError
from flywheel.ir import TARGETS, DType, ScheduleConfig, dependency_edges
from flywheel.ir import InstructionKind as K
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.vm.abi import Stamp
from flywheel.vm.gpu.trace import Phase, Stamps, _multiplies, hand_offs, read_stamps
from flywheel.vm.pack import PackedProgram, pack


@pytest.fixture
def launch() -> tuple[PackedProgram, Stamps]:
    """The small program and stamps of it, to be changed."""
    return model_stamps(small_program())


def test_each_task_has_the_times_of_its_stamps_from_the_first_one_on() -> None:
    spans = {span.task: span for span in timeline(small_program())}
    trace = small_trace()
    assert {traced.task.id for traced in trace.tasks} == spans.keys()
    for traced in trace.tasks:
        span = spans[traced.task.id]
        assert traced.sm == span.sm
        assert traced.ready_us == pytest.approx(span.start_us, abs=1e-3)
        assert traced.done_us == pytest.approx(span.end_us, abs=2e-3)
    assert min(traced.current_us for traced in trace.tasks) == 0.0
    assert trace.span_us == pytest.approx(max(span.end_us for span in spans.values()), abs=2e-3)
    assert (trace.sms, trace.stalled, trace.starved, trace.awaiting) == (6, 0.25, 0.125, 0.5)


def test_phases_fill_a_task_without_a_gap() -> None:
    for traced in small_trace().tasks:
        bounds = [(phase.start_us, phase.end_us) for phase in traced.phases]
        assert (bounds[0][0], bounds[-1][1]) == (traced.current_us, traced.done_us)
        assert all(end == start for (_, end), (start, _) in pairwise(bounds))
        assert all(start <= end for start, end in bounds)


def test_a_product_stages_multiplies_and_finishes_and_all_else_runs() -> None:
    product = [Phase.WAIT, Phase.STAGE, Phase.MULTIPLY, Phase.FINISH, Phase.SIGNAL]
    other = [Phase.WAIT, Phase.RUN, Phase.SIGNAL]
    found = {traced.task.label: [phase.phase for phase in traced.phases] for traced in small_trace().tasks}
    assert found["embed"] == other
    assert found["L0.down_proj"] == product
    assert [phases for phases in found.values() if phases not in (product, other)] == []


def test_a_rope_that_norms_its_heads_multiplies_nothing() -> None:
    """The norm's place, which the ROPE names, is no number of chunks."""
    spec = DecoderSpec("small", "qwen3", 64, 96, 1, 4, 2, 64, 50, 1e4, 1e-5, 64, qk_norm=True)
    row = ("k_norm", "k_rope", "k_append", "v_append", "q_norm", "q_rope", "attention")
    few = replace(TARGETS["h200"], name="few", num_sms=3, note="")
    packed = pack(lower(decode_step(spec, 48, DType.BF16), ScheduleConfig(fusion_grouping=(row,)), few))
    turning = [at for at, step in enumerate(packed.steps) if step["op"] == K.ROPE and step["as"]["rope"]["norm"] > 0]
    assert turning
    multiplies = _multiplies(packed)
    for instruction, found in zip(packed.instructions, multiplies, strict=True):
        first = instruction["first_step"]
        steps = packed.steps[first : first + instruction["n_steps"]]
        assert found == bool({*steps["op"].tolist()} & {K.GEMV_TILE, K.GEMM_TILE})


def test_an_operand_that_was_there_takes_no_staging(launch: tuple[PackedProgram, Stamps]) -> None:
    packed, stamps = launch
    row = int(np.flatnonzero(stamps[:, Stamp.STAGED])[0])
    stamps[row, Stamp.STAGED] = 0
    phases = read_stamps(packed, stamps, WAITS).tasks[row].phases
    assert [phase.phase for phase in phases] == [Phase.WAIT, Phase.MULTIPLY, Phase.FINISH, Phase.SIGNAL]


def set_to(kind: str, stamp: Stamp, value: int) -> Callable[[Stamps], None]:
    """Change a stamp of the second task that multiplies, or that does not."""

    def change(stamps: Stamps) -> None:
        rows = np.flatnonzero((stamps[:, Stamp.MULTIPLIED] > 0) == (kind == "product"))
        stamps[rows[1], stamp] = value

    return change


def begin_early(stamps: Stamps) -> None:
    stamps[1, Stamp.CURRENT] = stamps[0, Stamp.DONE] - np.uint64(1)


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        *((set_to("product", stamp, 0), f"has no stamp {stamp.name}") for stamp in
          (Stamp.CURRENT, Stamp.READY, Stamp.STORED, Stamp.DONE)),
        (set_to("product", Stamp.MULTIPLIED, 0), "multiplies, and has no stamp MULTIPLIED"),
        (set_to("other", Stamp.STAGED, BASE_NS), "multiplies nothing, and has a stamp STAGED"),
        (set_to("product", Stamp.READY, BASE_NS - 5), "comes to READY before"),
        (set_to("product", Stamp.STAGED, BASE_NS + 10**9), "comes to MULTIPLIED before"),
        (set_to("other", Stamp.DONE, BASE_NS - 5), "comes to DONE before"),
        (begin_early, "begins before the task before it on its SM has ended"),
    ],
)  # fmt: skip
def test_stamps_that_cannot_be_are_refused_in_one_line(
    launch: tuple[PackedProgram, Stamps], change: Callable[[Stamps], None], fact: str
) -> None:
    packed, stamps = launch
    change(stamps)
    with pytest.raises(TraceError, match=rf"trace: task \d+ \(\S+\) on SM \d {fact}") as raised:
        read_stamps(packed, stamps, WAITS)
    assert len(str(raised.value).splitlines()) == 1


def test_a_launch_that_left_nothing_is_refused(launch: tuple[PackedProgram, Stamps]) -> None:
    packed, stamps = launch
    with pytest.raises(TraceError, match=r"has no stamp CURRENT \(and \d+ more\)"):
        read_stamps(packed, np.zeros_like(stamps), WAITS)
    with pytest.raises(TraceError, match="the program has"):
        read_stamps(packed, stamps[1:], WAITS)


def test_a_hand_off_is_from_the_last_of_all_producers() -> None:
    program, trace = small_program(), small_trace()
    done = {traced.task.id: traced.done_us for traced in trace.tasks}
    producers: dict[int, list[float]] = {}
    for producer, consumer in dependency_edges(program):
        producers.setdefault(consumer, []).append(done[producer])
    found = {each.task.task.id: each for each in hand_offs(trace)}
    assert found.keys() == producers.keys()
    assert {task: each.last.done_us for task, each in found.items()} == {
        task: max(times) for task, times in producers.items()
    }


def test_whoever_waited_starts_a_hand_off_after_the_last_signal() -> None:
    program = small_program()
    assert program.target is not None
    visibility_us = machine_for(program.target).visibility_us
    waited = [each for each in hand_offs(small_trace()) if each.waited]
    assert len(waited) > 10
    assert min(each.latency_us for each in waited) == pytest.approx(visibility_us, abs=2e-3)
    for each in waited:
        wait = each.task.phases[0]
        assert each.held_us + each.latency_us == pytest.approx(wait.end_us - wait.start_us)
