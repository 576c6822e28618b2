"""Tasks of ours for the parts of operations that MPK's tasks compute: opcode, operands by name, and params."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from flywheel.interop.mpk.roles import RolePart
from flywheel.ir import DType, InstructionKind
from flywheel.ir.recipe import FINAL, Arg, Output, Recipe, RecipeBuilder
from flywheel.models.graph import Graph, Op

_K: Final = InstructionKind


@dataclass(frozen=True, slots=True)
class UnplacedTask:
    """A task without its place: operands are names of a block's tensors."""

    op: InstructionKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: Mapping[str, Any]
    est_bytes: int = 0
    est_flops: int = 0


class Recipes:
    """Makes the works of a decode step. Tasks that differ only in their tile share a recipe."""

    def __init__(self, step: Graph) -> None:
        self._step = step
        self._ops = {op.name: op for block in step.blocks for op in block.ops}
        self._over = {} if step.batch == 1 else {"M_tile": step.batch}
        self._matrix = _K.GEMV_TILE if step.batch == 1 else _K.GEMM_TILE
        self._vocab = step.epilogue.tensors["logits"].width
        self._known: dict[tuple[str, int], tuple[Recipe, tuple[str, ...]]] = {}

    def works(self, part: RolePart) -> list[UnplacedTask]:
        """The tasks of a part: one, but for the choice of tokens one for each sequence."""
        op = self._ops[part.name]
        if part.name == "argmax" and self._step.batch > 1:
            return [self._choice(op, row) for row in range(self._step.batch)]
        return [self._work(part, op)]

    def _work(self, part: RolePart, op: Op) -> UnplacedTask:
        if part.name == "attention":
            return self._attention(part.start)
        if part.name == "silu_mul":
            return self._tiled(part, self._silu, 0)
        if part.name in ("o_proj", "down_proj"):
            return self._tiled(part, self._with_residual, int(op.params["K"]))
        if op.kind is _K.GEMV_TILE:
            tile = {**op.params, "N_tile": part.rows, "n_off": part.start, **self._over}
            return UnplacedTask(self._matrix, op.inputs, (op.output,), tile, *self._cost(part.rows, op.params["K"]))
        flops = self._step.batch * int(op.params.get("hidden", 1))
        return UnplacedTask(op.kind, op.inputs, (op.output,), op.params, 0, flops)

    def _tiled(self, part: RolePart, make: Any, depth: int) -> UnplacedTask:
        key = part.name, part.rows
        if key not in self._known:
            builder = RecipeBuilder()
            make(builder, self._ops[part.name], part.rows)
            self._known[key] = builder.build(), tuple(builder.inputs)
        recipe, inputs = self._known[key]
        after = {"o_proj": "attn_add", "down_proj": "mlp_add"}.get(part.name, part.name)
        params = {"N_tile": part.rows, "n_off": part.start, **self._over, "recipe": recipe}
        return UnplacedTask(_K.FUSED, inputs, (self._ops[after].output,), params, *self._cost(part.rows, depth))

    def _with_residual(self, builder: RecipeBuilder, op: Op, rows: int) -> None:
        add = self._ops[{"o_proj": "attn_add", "down_proj": "mlp_add"}[op.name]]
        args = [builder.operand(name) for name in op.inputs]
        product = self._step_of(builder, self._matrix, args, rows, {**op.params, **self._over})
        residual = self._columns(builder, add.inputs[1], rows)
        self._step_of(builder, add.kind, [product, residual], rows, add.params, FINAL)

    def _silu(self, builder: RecipeBuilder, op: Op, rows: int) -> None:
        args = [self._columns(builder, name, rows) for name in op.inputs]
        self._step_of(builder, op.kind, args, rows, op.params, FINAL)

    def _columns(self, builder: RecipeBuilder, name: str, rows: int) -> Arg:
        """The task's own columns of each row."""
        return self._step_of(builder, _K.COPY, [builder.operand(name)], rows, self._over)

    def _step_of(
        self, builder: RecipeBuilder, kind: InstructionKind, args: list[Arg], width: int, params: Mapping[str, Any],
        out: Output | None = None,
    ) -> Arg:  # fmt: skip
        return builder.step(kind, args, width, self._step.dtype, params, out, self._step.batch)

    def _attention(self, stream: int) -> UnplacedTask:
        """One key-value head of one sequence: its norms and rotations, its appends, and its attention."""
        step, ops = self._step, self._ops
        width, group, dtype = step.head_dim, step.group * step.head_dim, step.dtype
        caches = [f"{side}_cache.{step.streams[stream]}" for side in "kv"]
        row = stream // step.n_kv_heads
        builder = RecipeBuilder()
        turn = None if step.batch == 1 else builder.columns("position", row, 1, DType.I32)
        query = builder.columns("q", stream * group, group, dtype)
        if "q_norm" in ops:
            query = self._headwise(builder, "q_norm", query, group)
        key = builder.columns("k", stream * width, width, dtype)
        if "k_norm" in ops:
            key = self._headwise(builder, "k_norm", key, width)
        key = self._headwise(builder, "k_rope", key, width, turn)
        rows = step.context * width
        builder.step(_K.KV_APPEND, [key, builder.operand(caches[0])], rows, dtype, {}, Output(1))
        value = builder.columns("v", stream * width, width, dtype)
        builder.step(_K.KV_APPEND, [value, builder.operand(caches[1])], rows, dtype, {}, Output(2))
        query = self._headwise(builder, "q_rope", query, group, turn)
        own = {"head_dim": width, "n_heads": step.group, "n_kv_heads": 1, "scale": ops["attention"].params["scale"]}
        attended = [query, *(builder.operand(name) for name in caches)]
        builder.step(_K.ATTENTION_TILE, attended, group, dtype, own, FINAL)
        window = {"kv_start": 0, "kv_len": step.context, "pos": step.context - 1}
        window |= {} if step.batch == 1 else {"sequence": row}
        params = {**window, "N_tile": group, "n_off": stream * group, "recipe": builder.build()}
        nbytes, flops = 2 * dtype.nbytes(rows), 4 * group * step.context
        return UnplacedTask(_K.FUSED, tuple(builder.inputs), ("attn", *caches), params, nbytes, flops)

    def _headwise(self, builder: RecipeBuilder, name: str, value: Arg, width: int, turn: Arg | None = None) -> Arg:
        """The result of a norm or a rotation of one head; `turn` is the position of its sequence, if it has one."""
        op = self._ops[name]
        args = [value, *([turn] if turn is not None else map(builder.operand, op.inputs[1:]))]
        return builder.step(op.kind, args, width, self._step.dtype, op.params)

    def _choice(self, op: Op, row: int) -> UnplacedTask:
        """The token of one sequence."""
        builder = RecipeBuilder()
        (name,) = op.inputs
        logits = builder.columns(name, row * self._vocab, self._vocab, DType.F32)
        builder.step(op.kind, [logits], 1, DType.I32, op.params, FINAL)
        params = {"N_tile": 1, "n_off": row, "recipe": builder.build()}
        return UnplacedTask(_K.FUSED, op.inputs, (op.output,), params, 0, self._vocab)

    def _cost(self, rows: int, depth: int) -> tuple[int, int]:
        dtype: DType = self._step.dtype
        return dtype.nbytes(rows * depth), 2 * rows * max(1, depth) * self._step.batch
