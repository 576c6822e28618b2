"""The reference VM: runs a program in torch, by counters. It defines the correct result: a backend that disagrees is
wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from flywheel.errors import InvalidProgramError, TensorError
from flywheel.ir import Buffer, BufferKind, MegakernelProgram, at_position, validate
from flywheel.process import one_torch_thread
from flywheel.vm.reference.binding import Binder
from flywheel.vm.reference.firing import firing_order
from flywheel.vm.reference.memory import TRANSIENT, Arena, check_tensors, tensor_shape
from flywheel.vm.reference.operands import Call

RESIDENT = (BufferKind.WEIGHT, BufferKind.CONST, BufferKind.KV_CACHE)
"""Kinds of buffers that stay in memory from launch to launch."""


class ReferenceVM:
    """Runs a validated program. Tensors are passed and returned by the names of their buffers.

    An I4 tensor is uint8, `[..., n / 2]`. Raises InvalidProgramError for a program that `validate(strict=True)`
    rejects, and for one with two buffers of the same name.
    """

    __slots__ = ("_order", "_order_key", "device", "program", "proved")

    def __init__(self, program: MegakernelProgram, device: str | torch.device = "cpu") -> None:
        result = validate(program, strict=True)
        if not result.ok:
            more = f" (and {len(result.errors) - 1} more)" if len(result.errors) > 1 else ""
            raise InvalidProgramError(f"program: {result.errors[0]}{more}")
        self._load(program, device, proved=True)

    @classmethod
    def unchecked(cls, program: MegakernelProgram, device: str | torch.device = "cpu") -> Self:
        """A VM without the proof of safety, for tests that show the errors that the proof excludes."""
        machine = cls.__new__(cls)
        machine._load(program, device, proved=False)
        return machine

    def _load(self, program: MegakernelProgram, device: str | torch.device, proved: bool) -> None:
        seen: set[str] = set()
        for buffer in program.buffers:
            tensor_shape(buffer)
            if buffer.kind is not BufferKind.ACTIVATION and buffer.name in seen:
                raise InvalidProgramError(f"buffer {buffer.id} ({buffer.name}): another buffer has this name")
            if buffer.kind is not BufferKind.ACTIVATION:
                seen.add(buffer.name)
        self.program = program
        self.proved = proved
        self.device = torch.device(device)
        self._order_key: tuple[str, int] | None = None
        self._order: Sequence[int] = ()

    def run(
        self,
        buffers: Mapping[str, Tensor],
        order: str = "list",
        seed: int = 0,
        pos: int | Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        """Run one launch: takes every WEIGHT, CONST, IO_INPUT and KV_CACHE, and returns every IO_OUTPUT and KV_CACHE.

        `pos` moves the program, or each of its sequences, to a position (`at_position`); None keeps the position that
        it was lowered for. Arguments are not modified: caches are copied, so use `bind` to generate. `firing_order`
        explains `order` and `seed`. Raises TensorError, which names the buffer, for a tensor that is missing, unknown,
        or of another shape or type.
        """
        inputs = self.buffers(BufferKind.IO_INPUT)
        caches = {buffer.name for buffer in self.buffers(BufferKind.KV_CACHE)}
        check_tensors(self.buffers(*RESIDENT, BufferKind.IO_INPUT), buffers)
        fed = {buffer.name: buffers[buffer.name] for buffer in inputs}
        resident = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device).copy_(tensor)
            if name in caches
            else tensor
            for name, tensor in buffers.items()
            if name not in fed
        }
        return self.bind(resident).step(fed, pos, order, seed)

    def bind(self, buffers: Mapping[str, Tensor], *, apart: bool = False) -> BoundProgram:
        """The program bound to its WEIGHT, CONST and KV_CACHE tensors, for repeated launches.

        Weights are neither copied nor converted. Launches update caches in place. With `apart`, no two buffers share
        memory, whatever the pages are. Raises TensorError as `run`, and for a cache that cannot be updated in place
        because it is strided or on another device.
        """
        check_tensors(self.buffers(*RESIDENT), buffers)
        return BoundProgram(self, buffers, apart)

    def buffers(self, *kinds: BufferKind) -> list[Buffer]:
        """Buffers of these kinds."""
        return [buffer for buffer in self.program.buffers if buffer.kind in kinds]

    def firing_order(self, order: str, seed: int) -> Sequence[int]:
        """Indices into `program.tasks` in firing order. The last result is cached, since `pos` does not change it."""
        if self._order_key != (order, seed):
            self._order = firing_order(self.program.tasks, order, seed)
            self._order_key = (order, seed)
        return self._order


class BoundProgram:
    """A program in memory. Build it with `ReferenceVM.bind`."""

    __slots__ = ("_arena", "_binder", "_calls", "_machine", "_outputs", "_pos", "_tensors")

    def __init__(self, machine: ReferenceVM, given: Mapping[str, Tensor], apart: bool = False) -> None:
        program = machine.program
        self._machine = machine
        self._arena = Arena(replace(program, pages=None) if apart else program, machine.device)
        self._tensors = {
            **self._arena.tensors(),
            **{buffer.id: _resident(buffer, given[buffer.name], machine) for buffer in machine.buffers(*RESIDENT)},
        }
        self._outputs = machine.buffers(BufferKind.IO_OUTPUT, BufferKind.KV_CACHE)
        self._binder = Binder(program.buffers, self._tensors, machine.device, machine.proved)
        self._calls: list[list[Call]] = [self._binder.bind(task) for task in program.tasks]
        self._pos: int | Sequence[int] | None = None

    def step(
        self,
        inputs: Mapping[str, Tensor],
        pos: int | Sequence[int] | None = None,
        order: str = "list",
        seed: int = 0,
    ) -> dict[str, Tensor]:
        """Run one launch: takes every IO_INPUT, and returns copies of every IO_OUTPUT and the caches themselves.

        The other arguments are those of `ReferenceVM.run`. With `pos=None` the program stays at the last launch's
        position.
        """
        fed = self._machine.buffers(BufferKind.IO_INPUT)
        check_tensors(fed, inputs)
        if pos is not None:
            self._move(pos)
        firing = self._machine.firing_order(order, seed)
        with torch.no_grad(), one_torch_thread():
            for buffer in fed:
                self._tensors[buffer.id].copy_(inputs[buffer.name])
            self._arena.poison()
            self._fire(firing)
            return {
                buffer.name: tensor if buffer.kind is BufferKind.KV_CACHE else tensor.clone()
                for buffer, tensor in [(buffer, self._tensors[buffer.id]) for buffer in self._outputs]
            }

    def transients(self) -> tuple[Tensor, dict[str, int]]:
        """(a copy of the memory after the last launch, uint8 [bytes]; the offset of each activation and output in it).

        Buffers that share memory hold the one written last. Of several buffers with one name, only one is returned.
        """
        memory, starts = self._arena.copy()
        return memory, {buffer.name: starts[buffer.id] for buffer in self._machine.buffers(*TRANSIENT)}

    def _fire(self, firing: Sequence[int]) -> None:
        calls, index = self._calls, 0
        try:
            for index in firing:
                for op, inputs, out, params in calls[index]:
                    op(inputs, out, params)
        except (InvalidProgramError, TensorError) as error:
            task = self._machine.program.tasks[index]
            raise type(error)(f"task {task.id} ({task.label}): {task.op.name} {error}") from error

    def _move(self, pos: int | Sequence[int]) -> None:
        """Bind the tasks again whose params change at `pos`."""
        if pos == self._pos:
            return
        program = self._machine.program
        for index, (lowered, moved) in enumerate(zip(program.tasks, at_position(program, pos).tasks, strict=True)):
            if moved is not lowered:
                self._calls[index] = self._binder.bind(moved)
        self._pos = pos


def _resident(buffer: Buffer, tensor: Tensor, machine: ReferenceVM) -> Tensor:
    moved = tensor.detach().to(machine.device).contiguous()
    if buffer.kind is BufferKind.KV_CACHE and moved.data_ptr() != tensor.data_ptr():
        raise TensorError(
            f"buffer {buffer.id} ({buffer.name}): a cache must be contiguous and on {machine.device}"
        )
    return moved
