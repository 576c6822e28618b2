"""A program's memory: the caller's tensors, checked, and one poisoned arena for everything that a launch writes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import torch
from torch import Tensor

from flywheel.errors import InvalidProgramError, TensorError
from flywheel.ir import Buffer, BufferKind, DType, MegakernelProgram
from flywheel.process import check_memory
from flywheel.tensors import TORCH_DTYPES

POISON: Final = 0xFF
"""The byte of unwritten memory: NaN in every float type, -1 in the signed ones."""

ALIGNMENT: Final = 256

_LARGE: Final = 2**28
"""Bytes of scratch from which on free memory is checked first."""

TRANSIENT: Final = (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT)


def tensor_shape(buffer: Buffer) -> tuple[int, ...]:
    """The shape of a buffer's tensor: the buffer's, with half the last dimension for I4.

    Raises InvalidProgramError for I4 rows with an odd number of elements.
    """
    shape = tuple(buffer.shape)
    if buffer.dtype is not DType.I4:
        return shape
    if shape[-1] % 2:
        raise InvalidProgramError(f"buffer {buffer.id} ({buffer.name}): I4 rows of an odd length, {shape[-1]}")
    return (*shape[:-1], shape[-1] // 2)


def check_tensors(buffers: Collection[Buffer], given: Mapping[str, Tensor]) -> None:
    """Check that `given` has each of `buffers` by name, and nothing else. Raises TensorError, which names the first
    mismatch."""
    names = {buffer.name for buffer in buffers}
    extra = next((name for name in given if name not in names), None)
    if extra is not None:
        raise TensorError(f"tensor {extra!r}: the program takes no tensor of this name here")
    for buffer in buffers:
        wanted = f"buffer {buffer.id} ({buffer.name}), {buffer.kind.name} {buffer.dtype.name} {list(buffer.shape)}"
        tensor = given.get(buffer.name)
        if tensor is None:
            raise TensorError(f"{wanted}: no tensor given")
        shape, dtype = tensor_shape(buffer), TORCH_DTYPES[buffer.dtype]
        if tuple(tensor.shape) != shape:
            raise TensorError(f"{wanted}: the tensor's shape is {list(tensor.shape)}, not {list(shape)}")
        if tensor.dtype is not dtype:
            raise TensorError(f"{wanted}: the tensor's dtype is {tensor.dtype}, not {dtype}")


class Arena:
    """One allocation for every activation, output and input of a program. Buffers of one page share its bytes."""

    __slots__ = ("_memory", "_poisoned", "_spans", "_tensors")

    def __init__(self, program: MegakernelProgram, device: torch.device) -> None:
        homes = program.pages.buffer_to_page if program.pages is not None else {}
        sizes = {page.id: page.nbytes for page in program.pages.pages} if program.pages is not None else {}
        offsets: dict[tuple[str, int], int] = {}
        end = 0
        transient = [buffer for buffer in program.buffers if buffer.kind in TRANSIENT]
        inputs = [buffer for buffer in program.buffers if buffer.kind is BufferKind.IO_INPUT]
        slots: dict[int, tuple[str, int]] = {}
        poisoned = 0
        for buffer in (*transient, *inputs):
            page = homes.get(buffer.id)
            slot = slots[buffer.id] = ("buffer", buffer.id) if page is None else ("page", page)
            if slot not in offsets:
                offsets[slot] = end
                end += -(-(buffer.nbytes if page is None else sizes[page]) // ALIGNMENT) * ALIGNMENT
            if buffer.kind in TRANSIENT:
                poisoned = end
        check_memory("program: its activations, inputs and outputs", end, device)
        memory = torch.empty(end, dtype=torch.uint8, device=device)
        self._memory = memory
        self._poisoned = memory[:poisoned]
        self._spans = {buffer: offsets[slots[buffer.id]] for buffer in (*transient, *inputs)}
        self._tensors = self._views(memory)

    def _views(self, memory: Tensor) -> dict[int, Tensor]:
        return {
            buffer.id: memory[start:][: buffer.nbytes].view(TORCH_DTYPES[buffer.dtype]).view(tensor_shape(buffer))
            for buffer, start in self._spans.items()
        }

    def copy(self) -> tuple[Tensor, Mapping[int, int]]:
        """(a copy of the allocation, uint8 [bytes]; buffer id -> its place)."""
        return self._memory.clone(), {buffer.id: start for buffer, start in self._spans.items()}

    def poison(self) -> None:
        """Fill activations and outputs with POISON, so that nothing of the last launch remains."""
        self._poisoned.fill_(POISON)

    def tensors(self) -> Mapping[int, Tensor]:
        """Buffers by id."""
        return self._tensors


def scratch(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A new tensor filled with POISON."""
    elements = torch.Size(shape).numel()
    if elements * dtype.itemsize >= _LARGE:
        check_memory(f"a step of a recipe, {list(shape)}", elements * dtype.itemsize, device)
    octets = torch.full((elements * dtype.itemsize,), POISON, dtype=torch.uint8, device=device)
    return octets.view(dtype).view(shape)
