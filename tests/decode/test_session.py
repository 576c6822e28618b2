from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flywheel.decode.reference import ReferenceSession
from flywheel.errors import ConfigError, InvalidProgramError, WeightsError
from flywheel.ir import BufferKind, DType, MegakernelProgram
from flywheel.models.oracle import EagerDecoder
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights

Opened = Callable[..., tuple[ReferenceSession, EagerDecoder]]
Lowered = Callable[..., MegakernelProgram]


def test_a_program_lowered_for_fewer_positions_ends_there(lowered: Lowered, opened: Opened) -> None:
    program = lowered()
    short = [
        replace(task, params={**task.params, "pos": 30}) if "pos" in task.params else task for task in program.tasks
    ]
    session, _ = opened(replace(program, tasks=tuple(short)))
    with pytest.raises(ConfigError, match=r"0\.\.30"):
        session.step(0, 40)


def test_unsafe_programs_and_foreign_weights_are_refused(lowered: Lowered, spec: DecoderSpec) -> None:
    program = lowered()
    weights = random_weights(spec, 1, torch.float32)
    unsafe = replace(program, tasks=tuple(replace(task, waits=()) for task in program.tasks))
    with pytest.raises(InvalidProgramError):
        ReferenceSession(unsafe, spec, weights)
    renamed = [
        replace(b, source="model.layers.9.x") if b.kind is BufferKind.WEIGHT and b.name == "L1.o_proj.w" else b
        for b in program.buffers
    ]
    with pytest.raises(WeightsError, match=r"L1\.o_proj\.w.*model\.layers\.9\.x"):
        ReferenceSession(replace(program, buffers=tuple(renamed)), spec, weights)


def test_weights_are_converted_to_the_programs_dtype(lowered: Lowered, spec: DecoderSpec) -> None:
    wide = random_weights(spec, 1, torch.float32)
    narrow: dict[str, Any] = {key: weight.bfloat16() for key, weight in wide.items()}
    program = lowered(DType.BF16)
    first, second = (ReferenceSession(program, spec, weights).step(5, 0).logits for weights in (wide, narrow))
    assert torch.equal(first, second)
