from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from math import ceil
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from chains import DEEP, LLAMA_1B, LLAMA_8B, WIDE, Block, Chain, chain_program
from hypothesis import given
from hypothesis import strategies as st
from shared_pages import in_pages

from flywheel.cost_model import MACHINES, State, Vector, predict, timeline
from flywheel.cost_model.demand import demand_of
from flywheel.cost_model.predict import MODEL_VERSION, latency_us
from flywheel.errors import ConfigError, InvalidProgramError
from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    ScheduleConfig,
    Task,
    Wait,
)
from flywheel.ir.validate import weight_bytes
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.plan.handoff import by_data as by_data_of
from flywheel.plan.nodes import group_tasks

KIB = 1024
VERSION = "11"
PREDICTED_US = (
    "0x1.8766baa3bb3cfp+5",
    "0x1.6d38bcdb71e45p+5",
    "0x1.c2542e7ef163fp+5",
    "0x1.ce92d66fa3c58p+5",
    "0x1.c539c550ac799p+5",
    "0x1.eb5d975f06291p+5",
    "0x1.3c045ecf16f0bp+6",
    "0x1.f87e67448af4ep+5",
)
"""What VERSION of the model says of four programs of each small model."""


def predicted_us(chain: Chain, block: Block, hand_offs: int) -> float:
    """Predicted time of a chain on an H200."""
    return predict(chain_program(chain, block, hand_offs)).latency_us


def test_a_chain_reads_what_its_model_reads() -> None:
    assert weight_bytes(chain_program(LLAMA_1B, WIDE, 0)) / 1e9 == pytest.approx(2.471, abs=5e-4)
    assert weight_bytes(chain_program(LLAMA_8B, WIDE, 0)) / 1e9 == pytest.approx(15.009, abs=5e-4)


@pytest.mark.parametrize("block", [DEEP, WIDE])
def test_more_hand_offs_are_slower(block: Block) -> None:
    times = [predicted_us(LLAMA_1B, block, hand_offs) for hand_offs in (0, 3, 4, 5, 6)]
    assert all(fewer < more for fewer, more in pairwise(times))


def test_the_small_model_loses_the_larger_share() -> None:
    for hand_offs in (0, 4, 6):
        small, large = (predict(chain_program(chain, WIDE, hand_offs)) for chain in (LLAMA_1B, LLAMA_8B))
        assert small.floor_us / small.latency_us < large.floor_us / large.latency_us


def test_prefetch_of_any_depth_is_faster_than_none() -> None:
    none, *times = [predict(chain_program(LLAMA_1B, DEEP, 4, depth)).latency_us for depth in (0, 1, 2, 4, 8)]
    assert all(each < none for each in times)
    assert times[0] < 0.98 * none


def test_8_kib_copies_are_far_slower_than_16_kib_ones() -> None:
    small = replace(DEEP, chunk_bytes=8 * KIB, ring_slots=24)
    assert predicted_us(LLAMA_8B, small, 0) > 1.5 * predicted_us(LLAMA_8B, DEEP, 0)


def test_small_rings_are_slower() -> None:
    times = [predicted_us(LLAMA_1B, replace(DEEP, ring_slots=slots), 4) for slots in (2, 3, 4, 6, 12)]
    assert all(larger <= smaller for smaller, larger in pairwise(times))
    assert times[0] > 1.5 * times[-1]


def test_a_chain_without_hand_offs_reaches_the_read_rate_and_not_more() -> None:
    seconds = predicted_us(LLAMA_8B, WIDE, 0) / 1e6
    assert 0.98 < 15.009 / seconds / MACHINES["h200"].read_gbs < 1.0


def test_the_same_program_gets_the_same_prediction() -> None:
    programs = [chain_program(LLAMA_1B, WIDE, 4) for _ in range(2)]
    assert predict(programs[0]) == predict(programs[0]) == predict(programs[1])


def test_the_time_of_an_sm_is_waits_work_and_want_of_bytes() -> None:
    program = chain_program(LLAMA_1B, DEEP, 4)
    spans = timeline(program)
    spent = dict.fromkeys(State, 0.0)
    for before, span in zip([None, *spans], spans, strict=False):
        assert span.came_us == (before.end_us if before is not None and before.sm == span.sm else 0.0)
        at = span.came_us
        for state, start, end in span.stretches():
            assert start == at <= end
            spent[state] += end - start
            at = end
        assert at == span.end_us
        assert span.worked_us <= span.end_us - span.start_us + 1e-9
    assert all(spent[state] > 0.0 for state in State if state is not State.IDLE)
    assert predict(program).latency_us > max(span.end_us for span in spans)


def test_a_timeline_covers_every_task_once_in_queue_order_and_agrees_with_the_prediction() -> None:
    program = chain_program(LLAMA_1B, WIDE, 4)
    spans = timeline(program)
    assert sorted(span.task for span in spans) == list(range(len(program.tasks)))
    for before, after in pairwise(spans):
        assert before.start_us <= before.end_us
        assert before.sm < after.sm or before.end_us <= after.start_us
    assert {span.sm for span in spans} == set(range(132))
    signalled: dict[int, float] = {}
    for span in spans:
        counter = program.tasks[span.task].out_counter
        signalled[counter] = max(span.end_us, signalled.get(counter, 0.0))
    for span in spans:
        assert all(span.start_us > signalled[wait.counter] for wait in program.tasks[span.task].waits)


SMALL = replace(TARGETS["h200"], num_sms=4)


@st.composite
def programs(draw: st.DrawFn) -> MegakernelProgram:
    """Stages over 4 SMs of random tile sizes, each waiting for one before it or for nothing."""
    buffers: list[Buffer] = []
    tasks: list[Task] = []
    widths: list[int] = []
    for stage in range(draw(st.integers(1, 6))):
        width = draw(st.integers(1, 6))
        awaited = draw(st.none() | st.integers(0, stage - 1)) if stage else None
        waits = () if awaited is None else (Wait(awaited, widths[awaited]),)
        depth = draw(st.integers(1, 1 << 14))
        weight = Buffer(len(buffers), "w", BufferKind.WEIGHT, DType.BF16, (width, depth))
        vector = Buffer(len(buffers) + 1, "x", BufferKind.ACTIVATION, DType.BF16, (1, depth))
        buffers += [weight, vector]
        tasks += [
            Task(
                id=len(tasks) + turn,
                op=InstructionKind.GEMV_TILE,
                inputs=(vector.id, weight.id),
                outputs=(vector.id,),
                out_counter=stage,
                waits=waits,
                params={"K": depth, "N_tile": 1, "n_off": turn},
                sm=draw(st.integers(0, 3)),
                est_bytes=2 * depth * draw(st.sampled_from([1, 64])),
            )
            for turn in range(width)
        ]
        widths.append(width)
    config = ScheduleConfig(
        tiling={"stream": {"chunk_bytes": draw(st.sampled_from([4, 8, 16, 32, 64])) * KIB}},
        pipelining_depth=draw(st.integers(0, 8)),
        threads_per_block=draw(st.sampled_from([128, 256, 1024])),
    )
    counters = tuple(Counter(number) for number in range(len(widths)))
    return MegakernelProgram(target=SMALL, buffers=buffers, counters=counters, tasks=tasks, config=config)


@given(programs())
def test_no_program_beats_the_weight_floor_or_its_busiest_sm(program: MegakernelProgram) -> None:
    prediction = predict(program)
    assert prediction.latency_us > prediction.floor_us > 0
    worked: dict[int, float] = {}
    for span in timeline(program):
        worked[span.sm] = worked.get(span.sm, 0.0) + span.worked_us
    assert prediction.latency_us > max(worked.values())
    assert prediction == predict(program)


@given(programs())
def test_dropping_every_wait_is_never_slower(program: MegakernelProgram) -> None:
    free = replace(program, tasks=[replace(task, waits=()) for task in program.tasks])
    assert predict(free).latency_us <= predict(program).latency_us * 1.01


def one_task(**changes: Any) -> MegakernelProgram:
    task = replace(Task(0, InstructionKind.NOP, (), (), 0, sm=0, label="only"), **changes)
    return MegakernelProgram(target=TARGETS["h200"], counters=(Counter(0),), tasks=(task,))


def test_a_long_activation_costs_the_task_that_reads_it() -> None:
    logits = Buffer(0, "logits", BufferKind.ACTIVATION, DType.F32, (1, 128256))
    softmax = one_task(op=InstructionKind.SOFTMAX, inputs=(0,), outputs=(1,))
    machine = MACHINES["h200"]
    warps = demand_of(one_task()).variant.vector_warps

    def slower(program: MegakernelProgram) -> float:
        each = [replace(logits, shape=(1, width)) for width in (128256, 16)]
        long, short = (replace(program, buffers=(one, replace(one, id=1))) for one in each)
        return predict(long).latency_us - predict(short).latency_us

    # 513 KB in rounds of 2 KiB a warp.
    rounds = ceil(513024 / (2048 * warps)) - 1
    assert slower(softmax) == pytest.approx(rounds * machine.vector.fetch_us + 512.96 / machine.shared_gbs, abs=0.01)


def test_only_who_finds_the_largest_logit_kept_reads_no_logits(work: MegakernelProgram) -> None:
    *_, head, sample = work.tasks
    assert sample.op is InstructionKind.SAMPLE_ARGMAX
    again = replace(head, id=sample.id, outputs=head.outputs)  # a column is written twice, so nobody keeps the largest
    twice = replace(work, tasks=(*work.tasks[:-1], again, replace(sample, id=sample.id + 1)))
    read_bytes = []
    for program in (work, twice):
        demand = demand_of(program)
        read_bytes.append(demand.kinds[demand.kind_of[demand.task_ids == len(program.tasks) - 1][0]].read_bytes)
    logits = next(buffer for buffer in work.buffers if buffer.id == sample.inputs[0])
    assert read_bytes == [0, logits.nbytes]


def test_arithmetic_costs_time_without_bytes_and_hides_behind_them() -> None:
    def latency(**changes: Any) -> float:
        return predict(one_task(**changes)).latency_us

    assert latency(est_flops=1_000_000) > latency() + 2
    assert latency(est_flops=1000, est_bytes=1_000_000) == latency(est_bytes=1_000_000)


@pytest.mark.parametrize("sm", [None, -1, 132])
def test_a_task_without_an_sm_of_the_target_is_refused_by_name(sm: int | None) -> None:
    with pytest.raises(InvalidProgramError, match=rf"task 0 \(only\): sm={sm} is not in 0\.\.131"):
        predict(one_task(sm=sm))


def test_a_program_without_a_target_is_refused() -> None:
    with pytest.raises(ConfigError, match="target"):
        predict(replace(one_task(), target=None))


def test_a_program_that_waits_for_itself_is_refused_by_name() -> None:
    with pytest.raises(InvalidProgramError, match=r"task 0 \(only\): never starts"):
        predict(one_task(waits=(Wait(0, 1),)))


def test_what_a_calibration_adds_costs_time(work: MegakernelProgram) -> None:
    machine = MACHINES["h200"]
    stock = predict(work, machine).latency_us
    for name in {field.name for field in fields(Vector)} - {"slice_us"}:
        slower = replace(machine.vector, **{name: 50.0})
        assert predict(work, replace(machine, vector=slower)).latency_us > stock, name
    for name in ("round_trip_us", "copy_us", "more_copies_us"):
        assert predict(work, replace(machine, **{name: 60.0})).latency_us > stock, name
    assert predict(work, replace(machine, shared_gbs=1.0)).latency_us > stock
    assert predict(work, replace(machine, restage_share=0.0)).latency_us < stock


def test_slices_of_an_input_that_outgrows_the_area_cost_time() -> None:
    spec = DecoderSpec("deep", "llama", 128, 4096, 1, 4, 2, 32, 256, 1e4, 1e-6, 512)
    machine = MACHINES["h200"]
    slower = replace(machine, vector=replace(machine.vector, slice_us=50.0))
    for batch, cut in ((1, False), (8, True)):
        program = lower(decode_step(spec, 64, DType.BF16, batch), ScheduleConfig(), TARGETS["h200"])
        assert (predict(program, slower).latency_us > predict(program, machine).latency_us + 40) is cut


def test_predictions_change_with_the_version_of_the_model_alone(works: ModuleType) -> None:
    found = [predict(program).latency_us for program in (*works.programs(0, 4), *works.programs(1, 4))]
    assert (MODEL_VERSION, [us.hex() for us in found]) == (VERSION, list(PREDICTED_US))


def test_a_demand_is_priced_as_its_program_is_predicted(work: MegakernelProgram) -> None:
    machine = replace(MACHINES["h200"], vector=Vector(1.0, 1.0, 1.0, 1.0, 1.0), round_trip_us=2.0)
    found = predict(work, machine)
    assert latency_us(demand_of(work), machine, found.floor_us) == found.latency_us


def test_hand_offs_by_the_data_are_the_quicker_ones_where_the_packer_lets_them(works: ModuleType) -> None:
    machine = MACHINES["h200"]
    found, quicker = {False: 0, True: 0}, 0
    for number, program in enumerate(works.programs(1, 60)):
        config = program.config
        if number % 4 == 0:
            program = in_pages(program, "shared")
        by_data, by_counters = (
            replace(program, config=replace(config, tiling={**config.tiling, "hand_off": {"data": data}}))
            for data in (1, 0)
        )
        demand = demand_of(by_data)
        asked = by_data_of(by_data, group_tasks(program)).counters
        rows = {counter for task in program.tasks for wait in task.waits if (counter := wait.counter) in asked}
        assert np.count_nonzero(~demand.gates.by_data) == len(rows)
        looks = any(demand.gates.by_data)
        assert looks == (number % 4 > 0)
        found[looks] += 1
        assert not any(demand_of(by_counters).gates.by_data)
        slower, faster = (predict(each, machine).latency_us for each in (by_counters, by_data))
        assert faster < 1.05 * slower if looks else faster == slower  # others may stand in the way at another time
        quicker += faster < slower
        even = replace(machine, data_visibility_us=machine.visibility_us)
        assert predict(by_data, even).latency_us == slower
    assert found[False] and quicker > 0.9 * found[True]
