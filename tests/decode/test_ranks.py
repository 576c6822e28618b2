"""Decode steps that several GPUs share, decoded and judged as those of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flywheel.decode.generate import Request, generate
from flywheel.decode.interface import as_whole
from flywheel.decode.reference import ReferenceSession
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import default_positions, verify
from flywheel.lowering.lower import lower
from flywheel.models.sharding import shared_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.search.space import make_space
from flywheel.search.workload import Workload

SPEC = DecoderSpec("tiny", "llama", 64, 128, 4, 8, 4, 16, 200, 1e4, 1e-5, 64)
TARGET = replace(TARGETS["h200"], name="few", num_sms=6)
WEIGHTS = random_weights(SPEC, 0, torch.float32)


def program_of(ranks: int, config: ScheduleConfig | None = None, batch: int = 1) -> MegakernelProgram:
    workload = Workload("tiny", SPEC, TARGET, "f32", 48, batch, ranks=ranks)
    if config is None:
        space = make_space(workload)
        config = space.to_config(space.known_good()[0])
    return lower(shared_step(SPEC, 48, DType.F32, batch, ranks=ranks), config, TARGET)


def test_buffers_of_all_ranks_are_the_models_tensors() -> None:
    program = program_of(2, ScheduleConfig(page_allocation="none"))
    whole = as_whole(program, SPEC)
    shapes = {buffer.name: tuple(buffer.shape) for buffer in whole.program.buffers}
    assert shapes["L0.q"] == (1, 128) and whole.parts["L0.q"] == ("L0.q@0", "L0.q@1")
    assert shapes["logits"] == (1, 200) and "logits" not in whole.joined
    assert {"L0.q", "L3.attn"} <= whole.joined
    assert "L0.attn_out" not in whole.parts and whole.parts["L0.attn_out@0"] == ("L0.attn_out@0",)
    assert whole.parts["L1.k_cache.h3"] == ("L1.k_cache.h3@1",)
    one = program_of(1, ScheduleConfig(page_allocation="none"))
    assert as_whole(one, SPEC).program is one


@pytest.mark.parametrize(("ranks", "batch"), [(2, 1), (2, 2), (4, 1), (8, 1)])
def test_a_shared_program_passes_its_verdict(ranks: int, batch: int) -> None:
    session = ReferenceSession(program_of(ranks, batch=batch), SPEC, WEIGHTS)
    verdict = verify(session, WEIGHTS, default_positions(48))
    assert verdict.passed, verdict.reason
    assert "L0.x_out" in session.taps.buffers


def test_a_shared_program_without_fusion_passes_its_verdict() -> None:
    session = ReferenceSession(program_of(2, ScheduleConfig(page_allocation="none")), SPEC, WEIGHTS)
    assert verify(session, WEIGHTS, default_positions(48)).passed


def test_ranks_that_differ_fail_the_verdict() -> None:
    program = program_of(2)
    session = ReferenceSession(program, SPEC, WEIGHTS)
    norms = [b.name for b in program.buffers if b.name.startswith("L2.input_norm.w@1")]
    session._given[norms[0]] = session._given[norms[0]] * 1.5
    session._bound = session._machine.bind(session._given)
    assert not verify(session, WEIGHTS, default_positions(48)).passed


def test_ranks_generate_what_one_gpu_does() -> None:
    texts = [
        generate(ReferenceSession(program_of(ranks), SPEC, WEIGHTS), Request((3, 5, 7), 8)).token_ids
        for ranks in (1, 2, 4)
    ]
    assert texts[0] == texts[1] == texts[2]
