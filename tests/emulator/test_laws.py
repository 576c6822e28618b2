"""What strict validation and the packer accept ends, writes its declared outputs and no other byte, and computes what
the reference VM computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from effort import examples, sample
from emulator.canaries import MeasuredGpu, launch
from emulator.gpu import build_variant
from mutants import HERE, RECIPES, REWRITES, SINGLES, mutant, tensors

from flywheel.errors import ConfigError, GpuFaultError, InvalidProgramError
from flywheel.ir import DType, MegakernelProgram, validate
from flywheel.vm.pack import PackedProgram, pack
from flywheel.vm.reference import ReferenceVM

FEW, SHORT, LONG = examples(24, 12), examples(60, 24), 4000
OTHERS = ((90, DType.BF16), (90, DType.F16), (80, DType.F32), (80, DType.BF16))
"""Architectures and float types beside sm_90 and F32."""
ALL = ((90, DType.F32), *OTHERS)
ROOM = {DType.F32: 2e-2, DType.F16: 3e-2, DType.BF16: 6e-2}
"""What an element may be off by, of itself and of the largest of its tensor: the reference VM rounds where a recipe of
the kernel does not."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeasuredGpu]:
    monkeypatch.setattr("flywheel.vm.gpu.weights.compile_variant", build_variant)
    yield MeasuredGpu(num_sms=HERE.num_sms)


def packed(program: MegakernelProgram, dtype: DType = DType.F32) -> PackedProgram | None:
    """The tables of an accepted program of that type, None where there is no kernel for it."""
    if not validate(program, strict=True).ok:
        return None
    try:
        tables = pack(program)
    except (InvalidProgramError, ConfigError):
        return None
    return tables if tables.dtype is dtype else None


def agrees(gpu: MeasuredGpu, program: MegakernelProgram, tables: PackedProgram, seed: int) -> None:
    given = tensors(program, seed)
    wanted = ReferenceVM(program).run(given)
    found = launch(gpu, tables, given)
    for name, value in wanted.items():
        if value.dtype.is_floating_point:
            ours, theirs = np.asarray(found[name], np.float32).ravel(), value.float().numpy().ravel()
            room = ROOM[tables.dtype]
            size = max(1.0, float(np.max(np.abs(theirs), initial=0.0, where=np.isfinite(theirs))))
            assert np.allclose(ours, theirs, rtol=room, atol=room * size, equal_nan=True), (seed, name)
        else:
            assert np.asarray(found[name]).ravel().tolist() == value.ravel().tolist(), (seed, name)


def check(gpu: MeasuredGpu, seeds: range, dtype: DType = DType.F32) -> Counter[str]:
    """The law over mutants; how many were launched."""
    target = replace(HERE, sm_arch=gpu.sm_arch)
    found: Counter[str] = Counter()
    for seed in seeds:
        program = replace(mutant(seed, dtype=dtype), target=target)
        tables = packed(program, dtype)
        if tables is not None:
            agrees(gpu, program, tables, seed)
            found["launched"] += 1
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("place", range(len(REWRITES)))
def test_ordered_rewrites_run_right(gpu: MeasuredGpu, place: int, seed: int) -> None:
    gpu.seed = seed
    tables = packed(REWRITES[place])
    assert tables is not None
    agrees(gpu, REWRITES[place], tables, seed)


def test_every_opcode_runs_between_canaries(gpu: MeasuredGpu) -> None:
    """But sums over GPUs, and copies of columns of several rows."""
    without = set()
    for seed, program in enumerate(SINGLES):
        tables = packed(program)
        if tables is None:
            without |= {task.op.name for task in program.tasks}
        else:
            agrees(gpu, program, tables, seed)
    assert without == {"ALLREDUCE_SHARD", "COPY"}


def test_what_is_accepted_ends_and_writes_its_outputs_alone(gpu: MeasuredGpu) -> None:
    assert check(gpu, range(SHORT))["launched"] >= SHORT // 4


@pytest.mark.parametrize(("sm_arch", "dtype"), sample(OTHERS))
def test_what_is_accepted_ends_and_writes_its_outputs_alone_elsewhere(
    gpu: MeasuredGpu, sm_arch: int, dtype: DType
) -> None:
    gpu.sm_arch = sm_arch
    assert check(gpu, range(FEW), dtype)["launched"] >= FEW // 4


@pytest.mark.slow
@pytest.mark.parametrize(("sm_arch", "dtype"), ALL)
def test_what_is_accepted_ends_and_writes_its_outputs_alone_in_many_mutants(
    gpu: MeasuredGpu, sm_arch: int, dtype: DType
) -> None:
    gpu.sm_arch = sm_arch
    assert check(gpu, range(LONG), dtype)["launched"] >= LONG // 4


def test_a_write_past_a_buffer_shows(gpu: MeasuredGpu) -> None:
    """A table that says that an output is larger than it is."""
    program = SINGLES[1]
    tables = pack(program)
    tables.buffers["numel"] += 1
    with pytest.raises((AssertionError, GpuFaultError)):
        agrees(gpu, program, tables, 0)


def test_an_addend_of_eight_bit_floats_has_no_kernel() -> None:
    program = RECIPES[0]
    buffers = [replace(each, dtype=DType.F8E4M3) if each.name == "in2" else each for each in program.buffers]
    tested = replace(program, buffers=tuple(buffers))
    assert validate(tested, strict=True).ok
    with pytest.raises(InvalidProgramError, match="what GEMV_TILE takes in is F8E4M3, not F32"):
        pack(tested)
