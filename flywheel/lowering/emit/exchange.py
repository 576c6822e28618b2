"""Exchanges between GPUs: each GPU pushes its columns to all others, and adds summands where they arrive."""

from __future__ import annotations

from flywheel.ir import InstructionKind, Stretch, Tiles
from flywheel.ir.recipe import FINAL, Recipe, RecipeBuilder
from flywheel.lowering.emit.scope import Scope, TileSet
from flywheel.models.graph import Op

_K = InstructionKind

def emit_exchange(scope: Scope, op: Op) -> list[TileSet]:
    """The pushes of a GPU's columns to each other GPU, one product tile's columns in a task.

    If the columns are summands, also the tasks that add all GPUs' summands.
    """
    adds = op.kind is _K.ALLREDUCE_SHARD
    own = op.inputs[scope.rank] if adds else op.inputs[0]
    pushed = _tiles(scope, op, own)
    others = [rank for rank in range(scope.ranks) if rank != scope.rank]
    name = f"{op.name}.push"
    sets = []
    for rank in others:
        there, arrived = (f"{own}@{rank}",), f"{op.name}.in@{rank}"
        sets.append(TileSet(name, f"{name}.{rank}", _K.FUSED, (own,), there, arrived, pushed, pushes=True))
    if adds:
        sets.append(TileSet(op.name, op.name, _K.FUSED, op.inputs, (op.output,), op.name, _tiles(scope, op, None)))
    return sets


def _tiles(scope: Scope, op: Op, pushed: str | None) -> Tiles:
    """Tiles that copy their columns of `pushed`; for None, tiles that add their columns of all inputs."""
    batch = scope.graph.batch
    first, stop = op.rows or (0, scope.tensor(op.inputs[0]).width)
    own = {} if batch == 1 else {"M_tile": batch}
    stretches = []
    for start, rows, count in scope.tiling.cuts(_product(scope, op), stop - first):
        recipe = _sum(scope, op, rows, own) if pushed is None else _copy(scope, pushed, rows, own)
        params = {**own, "N_tile": rows, "n_off": first + start, "recipe": recipe}
        flops = rows * batch * (len(op.inputs) if pushed is None else 0)
        stretches.append(Stretch(params, 0, flops, count))
    return Tiles(stretches)


def _product(scope: Scope, op: Op) -> str:
    """The product whose tiles an exchange has: the nearest that its own columns are made of."""
    makers: dict[str, Op] = {}
    for each in (each for block in scope.graph.blocks for each in block.ops):
        makers.setdefault(each.output, each)
    name = op.inputs[scope.rank] if op.kind is _K.ALLREDUCE_SHARD else op.inputs[0]
    while makers[name].kind is not _K.GEMV_TILE:
        name = makers[name].inputs[0]
    return makers[name].name


def _copy(scope: Scope, name: str, rows: int, own: dict[str, int]) -> Recipe:
    builder = RecipeBuilder()
    builder.step(_K.COPY, [builder.operand(name)], rows, scope.tensor(name).dtype, own, FINAL, scope.graph.batch)
    return builder.build()


def _sum(scope: Scope, op: Op, rows: int, own: dict[str, int]) -> Recipe:
    builder, batch = RecipeBuilder(), scope.graph.batch
    args = [
        builder.step(_K.COPY, [builder.operand(name)], rows, scope.tensor(name).dtype, own, rows=batch)
        for name in op.inputs
    ]
    builder.step(op.kind, args, rows, scope.tensor(op.output).dtype, {}, FINAL, batch)
    return builder.build()
