"""Traces without a GPU: stamps that a launch would leave if it took as long as the cost model says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from flywheel.cost_model import timeline
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.ir.operations import PRODUCTS
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.vm.abi import Stamp
from flywheel.vm.gpu.trace import LaunchTrace, Stamps, read_stamps
from flywheel.vm.pack import PackedProgram, pack

BASE_NS = 1_760_000_000_123_456_789
"""The GPU's timer counts from 1970."""
WAITS = np.tile([0.25, 0.125, 0.5], (6, 1))

STAGE, MULTIPLY, STORE = 0.2, 0.7, 0.9
"""Where in a task's span its stamps lie."""


@cache
def small_program() -> MegakernelProgram:
    """Two layers for an H100 of six SMs."""
    spec = DecoderSpec("small", "llama", 256, 384, 2, 4, 2, 64, 800, 1e4, 1e-6, 128)
    target = replace(TARGETS["h100"], name="few", num_sms=6)
    return lower(decode_step(spec, 64, DType.BF16), ScheduleConfig(), target)


def model_stamps(program: MegakernelProgram) -> tuple[PackedProgram, Stamps]:
    """The stamps of a launch of a program, as the cost model has it."""
    packed = pack(program)
    spans = {span.task: span for span in timeline(program)}
    stamps = np.zeros((len(packed.instructions), len(Stamp)), np.uint64)
    before, sm = BASE_NS, -1
    for row, instruction in zip(stamps, packed.instructions, strict=True):
        if instruction["sm"] != sm:
            before, sm = BASE_NS, instruction["sm"]
        span = spans[program.tasks[instruction["task"]].id]
        start, took = BASE_NS + round(span.start_us * 1e3), round((span.end_us - span.start_us) * 1e3)
        row[Stamp.CURRENT], row[Stamp.READY] = before, start
        if multiplies(packed, instruction):
            row[Stamp.STAGED], row[Stamp.MULTIPLIED] = start + int(took * STAGE), start + int(took * MULTIPLY)
        row[Stamp.STORED], row[Stamp.DONE] = start + int(took * STORE), start + took
        before = start + took
    return packed, stamps


def multiplies(packed: PackedProgram, instruction: Any) -> bool:
    """Whether a task has a matrix step."""
    first = instruction["first_step"]
    return bool(np.isin(packed.steps["op"][first : first + instruction["n_steps"]], list(PRODUCTS)).any())


@cache
def small_trace() -> LaunchTrace:
    """The trace of `small_program`."""
    return read_stamps(*model_stamps(small_program()), WAITS)
