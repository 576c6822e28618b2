from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flywheel.decode.reference import ReferenceSession
from flywheel.errors import ConfigError, InvalidProgramError, UsageError, WeightsError
from flywheel.ir import BufferKind, DType, MegakernelProgram
from flywheel.models.eager import EagerDecoder
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights

Opened = Callable[..., tuple[ReferenceSession, EagerDecoder]]
Lowered = Callable[..., MegakernelProgram]


def test_steps_from_an_empty_cache_are_the_oracles(opened: Opened) -> None:
    session, oracle = opened()
    for position, token in enumerate([3, 79, 0, 3, 41]):
        step, logits = session.step(token, position), oracle.step(token, position)
        torch.testing.assert_close(step.logits, logits, atol=1e-4, rtol=0.0)
        assert step.token == int(logits.argmax())


def test_a_written_cache_stands_for_its_tokens(opened: Opened) -> None:
    session, oracle = opened()
    for position in range(5):
        session.step(position, position)
    other, _ = opened()
    oracle.prefill(range(5))
    other.write_cache(oracle.read_cache())
    torch.testing.assert_close(other.step(9, 5).logits, session.step(9, 5).logits, atol=1e-4, rtol=0.0)


def test_a_position_that_no_token_has_written_shows(opened: Opened) -> None:
    session, oracle = opened()
    oracle.prefill(range(5))
    session.write_cache(oracle.read_cache())
    assert session.step(1, 5).logits.isfinite().all()
    assert session.step(1, 8).logits.isnan().any()


def test_tokens_and_positions_out_of_range_are_refused(opened: Opened) -> None:
    session, _ = opened()
    for token, position in ((-1, 0), (80, 0), (0, -1), (0, 64)):
        with pytest.raises(UsageError, match=r"is not in 0\.\."):
            session.step(token, position)


def test_a_cache_of_another_size_is_refused(opened: Opened) -> None:
    session, oracle = opened()
    oracle.prefill([1])
    with pytest.raises(UsageError, match="1 layers"):
        session.write_cache(oracle.read_cache()[:1])
    with pytest.raises(UsageError, match="65 positions"):
        session.write_cache([(torch.zeros(65, 2, 16), torch.zeros(65, 2, 16))] * 2)


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
