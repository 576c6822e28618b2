from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.errors import InvalidProgramError
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.formats import parse_formats
from flywheel.models.spec import DecoderSpec
from flywheel.vm.pack import pack

FEW = replace(TARGETS["h100"], name="few", num_sms=3, note="")
SPEC = DecoderSpec("small", "llama", 128, 256, 1, 4, 2, 32, 64, 1e4, 1e-5, 64)


def test_two_matrices_with_one_buffer_of_scales_are_refused() -> None:
    formats = parse_formats("fp8-tensor", "bf16")
    program = lower(decode_step(SPEC, 16, DType.BF16, 1, formats), ScheduleConfig(), FEW)
    ids = {buffer.name: buffer.id for buffer in program.buffers}
    own, other = ids["L0.k_proj.w.scales"], ids["L0.q_proj.w.scales"]
    tasks = tuple(
        replace(task, inputs=tuple(other if each == own else each for each in task.inputs)) for task in program.tasks
    )
    with pytest.raises(InvalidProgramError, match=r"has scales of L0.q_proj.w, not of L0.k_proj.w"):
        pack(replace(program, tasks=tasks))
