from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from spelled import spelled
from torch import Tensor

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
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec
from flywheel.tensors import TORCH_DTYPES

CONTEXT = 48

SPEC = DecoderSpec(
    "small", "qwen3", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 128,
    qkv_bias=True, qk_norm=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32),
)  # fmt: skip


@pytest.fixture
def lowered() -> Callable[..., MegakernelProgram]:
    def build(config: ScheduleConfig | None = None, dtype: DType = DType.F32) -> MegakernelProgram:
        return lower(decode_step(SPEC, CONTEXT, dtype), config or ScheduleConfig(), TARGETS["h200"])

    return build


@pytest.fixture
def filled() -> Callable[..., dict[str, Tensor]]:
    """Tensors for a decode step: the same for the same buffer in every program."""

    def fill(program: MegakernelProgram, pos: int = CONTEXT - 1) -> dict[str, Tensor]:
        tensors = {}
        for buffer in program.buffers:
            generator = torch.Generator().manual_seed(sum(buffer.name.encode()))
            shape, dtype = tuple(buffer.shape), TORCH_DTYPES[buffer.dtype]
            if buffer.kind is BufferKind.IO_INPUT:
                tensors[buffer.name] = torch.full(shape, pos if "position" in buffer.name else 7, dtype=dtype)
            elif buffer.kind is BufferKind.WEIGHT:
                tensors[buffer.name] = (0.2 * torch.randn(shape, generator=generator)).to(dtype)
            elif buffer.kind is BufferKind.KV_CACHE:
                tensors[buffer.name] = torch.randn(shape, generator=generator).to(dtype)
        return tensors

    return fill


@pytest.fixture
def chain() -> Callable[..., MegakernelProgram]:
    """A program of tasks one after the other: (op, input names, output name, params) over named buffers."""

    def build(
        buffers: Mapping[str, tuple[BufferKind, DType, tuple[int, ...]]], tasks: Sequence[Any]
    ) -> MegakernelProgram:
        ids = {name: number for number, name in enumerate(buffers)}
        return MegakernelProgram(
            buffers=tuple(Buffer(ids[name], name, *described) for name, described in buffers.items()),
            counters=tuple(Counter(number) for number in range(len(tasks))),
            tasks=tuple(
                Task(
                    number,
                    InstructionKind[op],
                    tuple(ids[name] for name in inputs),
                    tuple(ids[name] for name in ([outputs] if isinstance(outputs, str) else outputs)),
                    number,
                    (Wait(number - 1, 1),) if number else (),
                    spelled(params),
                    label=f"t{number}",
                )
                for number, (op, inputs, outputs, params) in enumerate(tasks)
            ),
        )

    return build


@pytest.fixture
def without_waits() -> Callable[[MegakernelProgram, int], MegakernelProgram]:
    """The program with one task's waits taken away."""

    def strip(program: MegakernelProgram, index: int) -> MegakernelProgram:
        tasks = list(program.tasks)
        tasks[index] = replace(tasks[index], waits=())
        return replace(program, tasks=tuple(tasks))

    return strip
