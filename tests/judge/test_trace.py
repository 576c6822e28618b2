"""The traced variant on a GPU: it computes what the other does, and leaves stamps that can be. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from flywheel.decode.cuda import CudaModel
from flywheel.decode.source import Source
from flywheel.errors import ConfigError, MismatchError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.trace import TracedStep, trace_step
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.report.traced import hand_off_times, idle_us, operation_times
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.trace import hand_offs

pytestmark = pytest.mark.gpu

CONTEXT = 96
SPEC = DecoderSpec("tiny", "llama", 512, 1024, 2, 8, 2, 64, 2000, 5e5, 1e-5, 128)
SOURCE = Source("tiny", SPEC, None, None)


@pytest.fixture(scope="module")
def program(gpu: Gpu) -> MegakernelProgram:
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    target = replace(alike, name="few", num_sms=6)
    return lower(decode_step(SPEC, CONTEXT, DType.BF16), ScheduleConfig(), target)


@pytest.fixture(scope="module")
def traced(program: MegakernelProgram) -> TracedStep:
    return trace_step(program, SOURCE)


def test_every_task_has_stamps_in_order(program: MegakernelProgram, traced: TracedStep) -> None:
    trace = traced.trace
    assert traced.verdict.passed
    assert traced.position == CONTEXT - 1
    assert [each.task.id for each in trace.tasks] == [
        task.id for sm in range(6) for task in program.tasks if task.sm == sm
    ]
    for each in trace.tasks:
        assert all(phase.start_us <= phase.end_us for phase in each.phases)
    assert 0 <= trace.stalled <= 1
    assert 0 <= trace.starved <= 1 and 0 < trace.awaiting <= 1


def test_a_launch_takes_as_long_as_its_tasks(program: MegakernelProgram, traced: TracedStep) -> None:
    trace, times = traced.trace, operation_times(traced.trace)
    assert sum(each.tasks for each in times) == len(program.tasks)
    assert sum(each.sm_us for each in times) + idle_us(trace) == pytest.approx(trace.span_us)
    assert idle_us(trace) >= 0
    assert 0 < trace.span_us < traced.traced_us
    assert 0.3 < trace.span_us / traced.latency.median_us < 3


def test_a_hand_off_takes_time(traced: TracedStep) -> None:
    trace = traced.trace
    waited = [each.latency_us for each in hand_offs(trace) if each.waited]
    assert len(waited) > 10
    assert 0.1 < float(np.median(waited)) < 20
    assert min(waited) > -0.5  # clocks of different SMs
    assert all(each.median_us is None or each.median_us > 0 for each in hand_off_times(trace))


def test_the_traced_variant_stands_beside_the_other(gpu: Gpu, program: MegakernelProgram) -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.BF16], "cuda")
    with (
        CudaModel(gpu, SPEC, DType.BF16, CONTEXT, weights) as model,
        model.load(program) as plain,
        model.load(program, trace=True) as traced,
    ):
        for position in range(3):
            wanted = plain.step(7, position).logits.clone()
            assert torch.equal(traced.step(7, position).logits, wanted)
        with pytest.raises(ConfigError, match="without trace"):
            plain.trace(7, 3, warmup=0)


def test_another_position_can_be_traced(program: MegakernelProgram) -> None:
    assert trace_step(program, SOURCE, 40).position == 40


def test_several_sequences_are_traced(gpu: Gpu) -> None:
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    program = lower(
        decode_step(SPEC, CONTEXT, DType.BF16, batch=3), ScheduleConfig(), replace(alike, name="few", num_sms=6)
    )
    traced = trace_step(program, SOURCE)
    assert traced.verdict.passed
    assert traced.batch == 3
    assert len(traced.trace.tasks) == len(program.tasks)


def test_a_wrong_program_is_no_trace(program: MegakernelProgram, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CudaModel.load

    def load(model: CudaModel, program: MegakernelProgram, *, trace: bool = False) -> object:
        if trace:
            name = next(key for key in model.weights if key.endswith("norm.weight"))
            model.weights[name].fill_(torch.nan)  # type: ignore[index]
            torch.cuda.synchronize()
        return honest(model, program, trace=trace)

    monkeypatch.setattr(CudaModel, "load", load)
    with pytest.raises(MismatchError, match="program: is wrong"):
        trace_step(program, SOURCE)
