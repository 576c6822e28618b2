"""Operations over all rows of an activation, one task each. The choice of tokens has one task a row."""

from __future__ import annotations

from flywheel.ir import RECIPE_PARAM_FIELDS, InstructionKind
from flywheel.ir.opcodes import PARAM_FIELDS
from flywheel.ir.operations import GATHERS
from flywheel.ir.recipe import FINAL, RecipeBuilder
from flywheel.lowering.emit.scope import Scope, TileSet, one_tile
from flywheel.models.graph import Op

_RECIPE_ONLY = RECIPE_PARAM_FIELDS.keys() - PARAM_FIELDS.keys()


def emit_single(scope: Scope, op: Op) -> list[TileSet]:
    """One task. It is a recipe of one step where a plain opcode cannot carry a param (RoPE scaling)."""
    if op.kind is InstructionKind.SAMPLE_ARGMAX and scope.graph.batch > 1:
        return _emit_argmax(scope, op)
    output = scope.tensor(op.output)
    read = sum(scope.tensor(name).numel for name in op.inputs if name not in ("embed.w",))
    streamed = output.dtype.nbytes(output.numel) if op.kind in GATHERS else 0
    kind, params, inputs = op.kind, op.params, op.inputs
    if _RECIPE_ONLY & params.keys():
        builder = RecipeBuilder(op.inputs)
        args = [builder.operand(name) for name in op.inputs]
        builder.step(op.kind, args, output.width, output.dtype, op.params, FINAL, scope.graph.batch)
        kind, params = InstructionKind.FUSED, {"recipe": builder.build()}
    return [TileSet(op.name, op.name, kind, inputs, (op.output,), op.name, one_tile(params, streamed, read))]


def _emit_argmax(scope: Scope, op: Op) -> list[TileSet]:
    """One task a row. Each reads a whole vocabulary, which takes an SM as long as a tile of weights."""
    (name,), width = op.inputs, scope.tensor(op.inputs[0]).width
    sets = []
    for row in range(scope.graph.batch):
        builder = RecipeBuilder()
        logits = builder.columns(name, row * width, width, scope.tensor(name).dtype)
        builder.step(op.kind, [logits], 1, scope.tensor(op.output).dtype, op.params, FINAL)
        params = {"N_tile": 1, "n_off": row, "recipe": builder.build()}
        sets.append(TileSet(op.name, op.name, InstructionKind.FUSED, op.inputs, (op.output,), op.name,
                            one_tile(params, 0, width)))  # fmt: skip
    return sets
