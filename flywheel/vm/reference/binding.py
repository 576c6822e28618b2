"""Binds tasks to memory: resolves operands, columns and scratch once, so that a launch only computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flywheel.errors import InvalidProgramError
from flywheel.ir import INHERITED_PARAMS, Buffer, BufferKind, DType, InstructionKind, Task
from flywheel.ir.access import tile, tile_rows
from flywheel.ir.operations import APPENDS, PRODUCTS
from flywheel.ir.recipe import Arg, Output, RecipeStep, Scratch, Target, recipe_steps
from flywheel.ir.validate.tasks import task_findings
from flywheel.ir.window import in_rows
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.reference.memory import scratch
from flywheel.vm.reference.operands import Call, Params
from flywheel.vm.reference.ops import OPS, copy

_K = InstructionKind


class Binder:
    """Binds the tasks of one program to `tensors` by buffer id.

    Tasks run one at a time. So all recipes share scratch tensors by step, shape and dtype.
    """

    __slots__ = ("_buffers", "_device", "_proved", "_scratch", "_tensors")

    def __init__(
        self, buffers: Sequence[Buffer], tensors: Mapping[int, Tensor], device: torch.device, proved: bool
    ) -> None:
        self._buffers = {buffer.id: buffer for buffer in buffers}
        self._proved = proved
        self._tensors = tensors
        self._device = device
        self._scratch: dict[tuple[int, tuple[int, ...], DType], Tensor] = {}

    def bind(self, task: Task) -> list[Call]:
        """The calls that run `task`.

        In a program without a proof, raises InvalidProgramError, with the validator's text, for a task that violates a
        rule on its own.
        """
        wrong = [] if self._proved else task_findings(task, self._buffers)
        if wrong:
            raise InvalidProgramError(wrong[0].message)
        task = replace(task, params=in_rows(task.params)) if "window" in task.params else task
        return self._bind_recipe(task) if task.op is _K.FUSED else self._bind_primitive(task)

    def _bind_primitive(self, task: Task) -> list[Call]:
        if not task.outputs:
            return []
        inputs = tuple([self._tensors[number] for number in task.inputs])
        out = self._tensors[task.outputs[0]]
        if task.op in PRODUCTS:
            out = _tile_of(out, inputs[0], task.params, task.params["n_off"])
        return [(OPS[task.op], inputs, out, task.params)]

    def _bind_recipe(self, task: Task) -> list[Call]:
        inherited = {name: task.params[name] for name in INHERITED_PARAMS if name in task.params}
        slots: dict[Target, Tensor] = {}
        calls: list[Call] = []
        for index, step in enumerate(recipe_steps(task)):
            inputs = tuple([self._operand(task, arg, slots) for arg in step.args])
            target = self._target(task, step.out.number) if isinstance(step.out, Output) else None
            calls += self._bind_step(index, step, inputs, target, {**inherited, **step.params}, slots)
        return calls

    def _operand(self, task: Task, arg: Arg, slots: Mapping[Target, Tensor]) -> Tensor:
        return slots[arg] if isinstance(arg, Scratch) else self._tensors[task.inputs[arg.number]]

    def _bind_step(
        self,
        index: int,
        step: RecipeStep,
        inputs: tuple[Tensor, ...],
        target: Tensor | None,
        params: Params,
        slots: dict[Target, Tensor],
    ) -> list[Call]:
        """The calls of one step. A second call rounds the result if its dtype is not the output's."""
        op, shape, dtype = step.op, step.shape, step.dtype
        if op in APPENDS and target is not None:
            return [(OPS[op], inputs, target, params)]
        moves: list[Call] = []
        fits = target is not None and target.numel() == torch.Size(shape).numel() and target.is_contiguous()
        if target is not None and fits and target.dtype is TORCH_DTYPES[dtype]:
            result = target.view(shape)
        else:
            result = self._result(index, shape, dtype)
            if target is None:
                slots[step.out] = result
            else:
                moves.append((copy, (result,), target, {}))
        out = _tile_of(result, inputs[0], params, 0) if op in PRODUCTS else result
        return [(OPS[op], inputs, out, params), *moves]

    def _target(self, task: Task, place: int) -> Tensor:
        """The part of `outputs[place]` that a step writes: the task's columns of the first output, all of any other and
        of a cache."""
        number = task.outputs[place]
        columns = tile(task.params)
        if place or columns is None or self._buffers[number].kind is BufferKind.KV_CACHE:
            return self._tensors[number]
        return self._tensors[number].view(tile_rows(task.params), -1)[:, slice(*columns)]

    def _result(self, index: int, shape: tuple[int, ...], dtype: DType) -> Tensor:
        key = (index, shape, dtype)
        if key not in self._scratch:
            self._scratch[key] = scratch(shape, TORCH_DTYPES[dtype], self._device)
        return self._scratch[key]


def _tile_of(out: Tensor, x: Tensor, params: Params, start: int) -> Tensor:
    """Columns `start`..`start + N_tile` of `out`, which has as many rows as x [M, K]."""
    rows = x.numel() // params["K"]
    return out.view(rows, -1)[:, start : start + params["N_tile"]]
