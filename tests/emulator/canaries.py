"""Launches of any program in the emulator, with bytes around every buffer that nobody may write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from emulator.gpu import EmulatedGpu, build_variant
from torch import Tensor

from flywheel.ir import Buffer, BufferKind, MegakernelProgram
from flywheel.plan.kernels import arch_name
from flywheel.vm.elements import stored_type, values
from flywheel.vm.gpu.driver import load_variant
from flywheel.vm.gpu.loader import LoadedProgram
from flywheel.vm.gpu.weights import ResidentWeights, needed_weights
from flywheel.vm.pack import PackedProgram

GAP: Final = 256
SLACK: Final = 0x5A
"""What the emulator has behind each allocation."""

Bytes = npt.NDArray[np.uint8]


def octets(tensor: Tensor) -> Bytes:
    """The bytes of a tensor."""
    return np.frombuffer(bytes(tensor.contiguous().flatten().untyped_storage()), np.uint8)


def apart(packed: PackedProgram) -> PackedProgram:
    """The program with a gap behind each buffer of its arena."""
    ends = sorted(set(packed.arena.offsets.values()))
    moved = {start: start + GAP * place for place, start in enumerate(ends)}
    awaited = sum(start < packed.arena.awaited_bytes for start in ends)
    arena = replace(
        packed.arena,
        offsets={row: moved[start] for row, start in packed.arena.offsets.items()},
        nbytes=packed.arena.nbytes + GAP * len(ends),
        awaited_bytes=packed.arena.awaited_bytes + GAP * awaited,
    )
    return replace(packed, arena=arena)


def launch(gpu: EmulatedGpu, packed: PackedProgram, given: Mapping[str, Tensor]) -> dict[str, Tensor | Any]:
    """One launch: outputs by name. Asserts that it writes nothing but what the tasks declare as outputs.

    Raises GpuFaultError for a fault of the kernel and for a launch that does not end in `gpu.limit_s`.
    """
    packed, program = apart(packed), packed.program
    variant = packed.variant
    kernel = build_variant(
        arch_name(gpu.sm_arch), variant.threads, packed.dtype, matrix_warps=variant.matrix_warps,
        features=variant.features,
    )
    caches = {each.name: gpu.alloc(each.nbytes + 2 * GAP) for each in program.buffers if _is_cache(each)}
    for name, memory in caches.items():
        gpu.upload(memory, octets(given[name]), GAP)
    addresses = {name: memory.address + GAP for name, memory in caches.items()}
    with (
        ResidentWeights(gpu, packed.dtype) as weights,  # type: ignore[arg-type]
        _loaded(gpu, packed, kernel, weights, given, addresses) as loaded,
    ):
        loaded.poison()
        _mark_gaps(gpu, loaded)
        for buffer in program.buffers:
            if buffer.kind is BufferKind.IO_INPUT:
                gpu.upload(loaded._arena, octets(given[buffer.name]), loaded._offset(loaded._row(buffer.name)))
        arena = gpu.download(loaded._arena, np.uint8, (loaded._arena.nbytes,))
        before = {name: gpu.download(memory, np.uint8, (memory.nbytes,)) for name, memory in caches.items()}
        loaded.launch()
        loaded.sync(1.0)
        after = gpu.download(loaded._arena, np.uint8, (loaded._arena.nbytes,))
        _check_arena(packed, arena, after)
        _check_caches(program, before, {n: gpu.download(m, np.uint8, (m.nbytes,)) for n, m in caches.items()})
        for address, held in gpu._held.items():
            end = address - held.ctypes.data + gpu.sizes[address]
            assert (held[: address - held.ctypes.data] == SLACK).all() and (held[end:] == SLACK).all(), "past a memory"
        found = {b.name: loaded.read_output(b.name) for b in program.buffers if b.kind is BufferKind.IO_OUTPUT}
        for name, memory in caches.items():
            buffer = next(each for each in program.buffers if each.name == name)
            stored = gpu.download(memory, np.uint8, (buffer.nbytes,), GAP)
            found[name] = values(stored.view(stored_type(buffer.dtype)).reshape(tuple(buffer.shape)), buffer.dtype)
    for memory in caches.values():
        gpu.free(memory)
    return found


class MeasuredGpu(EmulatedGpu):
    """One that remembers how large its allocations are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sizes: dict[int, int] = {}

    def alloc(self, nbytes: int) -> Any:
        memory = super().alloc(nbytes)
        self.sizes[memory.address] = nbytes
        return memory


def _loaded(
    gpu: EmulatedGpu, packed: PackedProgram, kernel: Any, weights: ResidentWeights, given: Mapping[str, Tensor],
    caches: Mapping[str, int],
) -> LoadedProgram:  # fmt: skip
    for name, buffer, layout in needed_weights(packed):
        tensor = given[buffer.name]
        array = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
        weights.put(name, array, tuple(buffer.shape), buffer.dtype, layout)
    return LoadedProgram(gpu, packed, load_variant(gpu, kernel), weights, caches)  # type: ignore[arg-type]


def _mark_gaps(gpu: EmulatedGpu, loaded: LoadedProgram) -> None:
    """Other bytes in each gap, so that what is copied from one to another shows; those of awaited buffers are reset."""
    offsets, buffers = loaded.packed.arena.offsets, loaded.packed.program.buffers
    marks = np.random.default_rng(0)
    for start in sorted(set(offsets.values())):
        if start >= loaded.packed.arena.awaited_bytes:
            end = start + max(buffers[row].nbytes for row, offset in offsets.items() if offset == start)
            gpu.upload(loaded._arena, marks.integers(0, 256, GAP, np.uint8), end)


def _is_cache(buffer: Buffer) -> bool:
    return buffer.kind is BufferKind.KV_CACHE


def _check_arena(packed: PackedProgram, before: Bytes, after: Bytes) -> None:
    program = packed.program
    outputs = {number for task in program.tasks for number in task.outputs}
    free = np.ones(len(before), np.bool_)
    for row, start in packed.arena.offsets.items():
        buffer = program.buffers[row]
        if buffer.id in outputs:
            free[start : start + buffer.nbytes] = False
            if start < packed.arena.awaited_bytes:
                again = start + packed.arena.nbytes
                free[again : again + buffer.nbytes] = False
    wrong = np.flatnonzero(free & (before != after))
    assert not len(wrong), f"byte {wrong[0]} of the arena was written"


def _check_caches(program: MegakernelProgram, before: Mapping[str, Bytes], after: Mapping[str, Bytes]) -> None:
    outputs = {number for task in program.tasks for number in task.outputs}
    for buffer in program.buffers:
        if _is_cache(buffer):
            first, last = (0, 0) if buffer.id not in outputs else (GAP, GAP + buffer.nbytes)
            changed = np.flatnonzero(before[buffer.name] != after[buffer.name])
            assert ((changed >= first) & (changed < last)).all(), f"{buffer.name} was written"
