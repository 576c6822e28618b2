"""Operations over one whole vector, each a single task."""

from __future__ import annotations

from flywheel.ir import RECIPE_PARAM_FIELDS, InstructionKind
from flywheel.ir.opcodes import PARAM_FIELDS
from flywheel.lowering.emit.scope import Scope
from flywheel.lowering.recipe import RecipeBuilder
from flywheel.lowering.work import Tile, TileSet
from flywheel.models.graph import Op

_RECIPE_ONLY = RECIPE_PARAM_FIELDS.keys() - PARAM_FIELDS.keys()


def emit_single(scope: Scope, op: Op) -> list[TileSet]:
    """One task; a recipe of one step where a param does not reach the device otherwise (RoPE scaling)."""
    output = scope.tensor(op.output)
    read = sum(scope.tensor(name).width for name in op.inputs if name not in ("embed.w",))
    streamed = output.dtype.nbytes(output.width) if op.kind is InstructionKind.EMBED else 0
    kind, params, inputs = op.kind, op.params, op.inputs
    if _RECIPE_ONLY & params.keys():
        builder = RecipeBuilder(op.inputs)
        args = [builder.operand(name) for name in op.inputs]
        builder.step(op.kind, args, output.width, output.dtype, op.params, "final")
        kind, params = InstructionKind.FUSED, {"recipe": builder.build()}
    return [TileSet(op.name, op.name, kind, inputs, (op.output,), op.name, (Tile(params, streamed, read),))]
