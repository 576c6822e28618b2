from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
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
    validate,
)
from flywheel.ir.operations import PRODUCTS
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.pack import pack
from flywheel.vm.reference import ReferenceVM

FEW = replace(TARGETS["h100"], name="few", num_sms=3, note="")

Described = tuple[BufferKind, DType, tuple[int, ...]]


def assemble(
    buffers: Mapping[str, Described], tasks: Sequence[Any], config: ScheduleConfig | None = None
) -> MegakernelProgram:
    """A program of tasks on SM 0, each after the one before: (op, input names, output names, params)."""
    ids = {name: number for number, name in enumerate(buffers)}
    return MegakernelProgram(
        target=FEW,
        buffers=tuple(Buffer(ids[name], name, *described) for name, described in buffers.items()),
        counters=tuple(Counter(number) for number in range(len(tasks))),
        tasks=tuple(
            Task(
                number,
                InstructionKind[op],
                tuple(ids[name] for name in inputs),
                tuple(ids[name] for name in outputs),
                number,
                (Wait(number - 1, 1),) if number else (),
                spelled(params),
                0,
                label=f"t{number}",
            )
            for number, (op, inputs, outputs, params) in enumerate(tasks)
        ),
        config=config,
    )


def fill(program: MegakernelProgram, pos: int) -> dict[str, Tensor]:
    """Random weights and caches, token 7 and position `pos`: the same for the same buffer in every program."""
    tensors = {}
    for buffer in program.buffers:
        generator = torch.Generator().manual_seed(sum(buffer.name.encode()))
        shape, dtype = tuple(buffer.shape), TORCH_DTYPES[buffer.dtype]
        if buffer.kind is BufferKind.IO_INPUT and dtype is torch.int32:
            tensors[buffer.name] = torch.full(shape, pos if "position" in buffer.name else 7, dtype=dtype)
        elif buffer.kind in (BufferKind.WEIGHT, BufferKind.CONST, BufferKind.IO_INPUT):
            tensors[buffer.name] = (0.2 * torch.randn(shape, generator=generator)).to(dtype)
        elif buffer.kind is BufferKind.KV_CACHE:
            tensors[buffer.name] = torch.randn(shape, generator=generator).to(dtype)
    return tensors


@pytest.fixture(scope="session")
def chain() -> Callable[..., MegakernelProgram]:
    return assemble


@pytest.fixture(scope="session")
def values() -> Callable[..., Mapping[str, Tensor]]:
    return fill


@pytest.fixture(scope="session")
def check_vm(table_vm: ModuleType) -> Callable[..., None]:
    """Asserts that the tables of a program mean, to rounding, what the reference VM makes of it, and that the kernel
    for its products' rows has no other rows to multiply."""

    def check(program: MegakernelProgram, pos: int | None = None, **given: Tensor) -> None:
        result = validate(program, strict=True)
        assert result.ok, result.report()
        tensors = fill(program, 0 if pos is None else pos) | given
        expected = ReferenceVM(program).run(tensors, pos=pos)
        packed = pack(program)
        products = np.isin(packed.steps["op"], [op.value for op in PRODUCTS])
        rows = set(packed.steps["as"]["product"]["rows"][products].tolist())
        assert packed.variant.rows == (rows.pop() if len(rows) == 1 else 0)
        made = table_vm.TableVM(packed, program, tensors).run(-1 if pos is None else pos)
        assert made.keys() == expected.keys()
        for name, value in expected.items():
            loose = 0.06 if value.dtype in (torch.float16, torch.bfloat16) else 1e-4
            size = float(value.float().abs().max().clamp(min=1.0))
            torch.testing.assert_close(made[name].float(), value.float(), rtol=loose, atol=loose * size)

    return check


@pytest.fixture(scope="session")
def table_vm() -> ModuleType:
    """The module that interprets packed tables."""
    spec = importlib.util.spec_from_file_location("table_vm", Path(__file__).parent / "table_vm.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["table_vm"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
