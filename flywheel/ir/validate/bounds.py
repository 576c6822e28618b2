"""Tiles and KV windows stay inside their buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.findings import Findings
from flywheel.ir.validate.recipe import Recipe

_MATRIX = (InstructionKind.GEMV_TILE, InstructionKind.GEMM_TILE)

Operands = list[Buffer | None]


def check_bounds(task: Task, recipe: Recipe | None, buffers: Mapping[int, Buffer], findings: Findings) -> None:
    """Bounds of a task, and of each step of its recipe whose operands are buffers."""
    op = task.op
    if recipe is None:
        if op in _BOUNDED:
            inputs: Operands = [buffers[number] for number in task.inputs]
            _check(task, op, task.params, inputs, buffers[task.outputs[0]], findings)
        return
    params = task.params
    end = params["n_off"] + params["N_tile"] if "n_off" in params and "N_tile" in params else None
    final = buffers[task.outputs[0]]
    if end is not None and end > final.numel:
        _too_wide(task, end, final, findings)
    for step in recipe.steps:
        if step.op in _BOUNDED:
            operands = [buffers[task.inputs[number]] if role == "in" else None for role, number in step.args]
            _check(task, step.op, {**params, **step.params}, operands, None, findings)


def _check(
    task: Task, op: InstructionKind, params: Mapping[str, Any], inputs: Operands, output: Buffer | None, findings: Findings
) -> None:
    if op in _MATRIX:
        _check_matrix(task, params, inputs, output, findings)
    elif op is InstructionKind.ATTENTION_TILE:
        row = params["n_kv_heads"] * params["head_dim"]
        for cache in inputs[1:3]:
            if cache is not None and (params["kv_start"] + params["kv_len"]) * row > cache.numel:
                end = params["kv_start"] + params["kv_len"]
                _past_cache(task, f"KV window ends at row {end}", cache, findings)
    elif op is InstructionKind.KV_APPEND:
        new, cache = inputs
        if cache is not None:
            row = cache.numel // cache.shape[0]
            rows = new.numel // row if new is not None and len(new.shape) > 2 else 1
            if params["pos"] + rows > cache.shape[0]:
                _past_cache(task, f"appends {rows} rows at pos={params['pos']}", cache, findings)
    elif op is InstructionKind.COPY and inputs[0] is not None and "n_off" in params and "N_tile" in params:
        if params["n_off"] + params["N_tile"] > inputs[0].numel:
            _too_wide(task, params["n_off"] + params["N_tile"], inputs[0], findings)


def _check_matrix(
    task: Task, params: Mapping[str, Any], inputs: Operands, output: Buffer | None, findings: Findings
) -> None:
    x, weight = inputs[0], inputs[1]
    bias = inputs[2] if len(inputs) > 2 else None
    depth, end = params["K"], params["n_off"] + params["N_tile"]
    if weight is not None and len(weight.shape) == 2:
        if end > weight.shape[0]:
            _too_wide(task, end, weight, findings)
        if depth > weight.shape[1]:
            findings.error("tile-bounds", _message(task, f"K={depth} exceeds the {weight.shape[1]} columns", weight), task.id)
    if x is not None and depth > x.numel:
        findings.error("tile-bounds", _message(task, f"K={depth} exceeds the {x.numel} elements", x), task.id)
    if bias is not None and end > bias.numel:
        _too_wide(task, end, bias, findings)
    if output is not None:
        rows = max(1, x.numel // depth) if x is not None else 1
        if end > output.numel // rows:
            _too_wide(task, end, output, findings)


def _too_wide(task: Task, end: int, buffer: Buffer, findings: Findings) -> None:
    findings.error("tile-bounds", _message(task, f"the tile ends at {end}, past shape {tuple(buffer.shape)}", buffer), task.id)


def _past_cache(task: Task, what: str, cache: Buffer, findings: Findings) -> None:
    findings.error("kv-bounds", _message(task, f"{what}, past the {cache.shape[0]} rows", cache), task.id)


def _message(task: Task, what: str, buffer: Buffer) -> str:
    return f"task {task.id} ({task.label}): {what} of buffer {buffer.id} ({buffer.name})"


_BOUNDED = frozenset({*_MATRIX, InstructionKind.ATTENTION_TILE, InstructionKind.KV_APPEND, InstructionKind.COPY})
