"""Products of weights with an activation's rows: plain tiles, or fused with a norm, a merge of partials, SwiGLU or the
residual."""

from __future__ import annotations

from collections.abc import Sequence

from flywheel.errors import ConfigError
from flywheel.ir import PARAM_FIELDS, DType, InstructionKind, Stretch, Tiles
from flywheel.ir.recipe import FINAL, Arg, Recipe, RecipeBuilder
from flywheel.lowering.emit.scope import Scope, TileSet
from flywheel.lowering.fusion import Group
from flywheel.models.graph import Op, quantised_names

_K = InstructionKind


def emit_projection(scope: Scope, group: Group, partials: Sequence[str] = ()) -> list[TileSet]:
    """Tile sets of a group with GEMVs. `partials` are merged into the input of its only GEMV.

    Sibling GEMVs that nothing joins (q, k, v) become one set each. Each set repeats the operations before them.
    """
    anchors = [op for op in group.ops if op.kind is _K.GEMV_TILE]
    first, last = group.ops.index(anchors[0]), group.ops.index(anchors[-1])
    before, after = group.ops[:first], group.ops[last + 1 :]
    units = [anchors] if after else [[anchor] for anchor in anchors]
    return [_emit_unit(scope, before, unit, after, partials, group.names[0]) for unit in units]


def _emit_unit(
    scope: Scope, before: Sequence[Op], anchors: Sequence[Op], after: Sequence[Op], partials: Sequence[str], stage: str
) -> TileSet:
    name, output = anchors[0].name, after[-1].output if after else anchors[0].output
    first, stop = anchors[0].rows or (0, scope.tensor(anchors[0].inputs[1]).shape[0])
    n_out = stop - first
    sizes = {anchor.name: scope.tiling.rows(anchor.name, n_out) for anchor in anchors}
    if len(set(sizes.values())) > 1:
        wanted = ", ".join(f"{key}={rows}" for key, rows in sizes.items())
        raise ConfigError(f"tiling: fused projections need one N_tile, got {wanted}")
    depth = anchors[0].params["K"]
    cuts = scope.tiling.cuts(name, n_out)
    quantised = any(scope.tensor(anchor.inputs[1]).format is not None for anchor in anchors)
    alone = not before and not after and not partials and not quantised
    plain = alone and anchors[0].params.keys() <= PARAM_FIELDS.keys()
    recipes = {}
    inputs: tuple[str, ...] = anchors[0].inputs
    batch = scope.graph.batch
    kind = _matrix_op(batch) if plain else _K.FUSED
    own = {**(anchors[0].params if plain else {}), **_over_rows(batch)}
    if not plain:
        for _, rows, _ in cuts:
            recipes[rows], inputs = _recipe(scope, before, anchors, after, partials, rows)
    tiles = Tiles(
        [
            Stretch(
                {**own, "N_tile": rows, "n_off": first + start, **({} if plain else {"recipe": recipes[rows]})},
                sum(_tile_bytes(scope, anchor, rows) for anchor in anchors),
                2 * rows * depth * len(anchors) * batch,
                count,
            )
            for start, rows, count in cuts
        ]
    )
    return TileSet(name, stage, kind, inputs, (output,), name, tiles)


def _recipe(
    scope: Scope, before: Sequence[Op], anchors: Sequence[Op], after: Sequence[Op], partials: Sequence[str], rows: int
) -> tuple[Recipe, tuple[str, ...]]:
    builder = RecipeBuilder()
    values: dict[str, Arg] = {}
    batch = scope.graph.batch
    if partials:
        source = anchors[0].inputs[0]
        made = scope.tensor(source)
        args = [builder.operand(part) for part in partials]
        values[source] = builder.step(
            _K.ATTENTION_COMBINE, args, made.width, made.dtype, scope.heads(), rows=batch
        )
    for op in before:
        args = [builder.operand(operand) for operand in op.inputs]
        made = scope.tensor(op.output)
        values[op.output] = builder.step(op.kind, args, made.width, made.dtype, op.params, rows=batch)
    final = (after or anchors)[-1]
    for op in anchors:
        args = [values.get(op.inputs[0]) or builder.operand(op.inputs[0]), *_weights(scope, builder, op, rows)]
        out = FINAL if op is final else None
        first = {} if scope.tensor(op.inputs[1]).format is None else {"n_off": 0}
        params = {**op.params, **first, **_over_rows(batch)}
        values[op.output] = builder.step(
            _matrix_op(batch), args, rows, scope.tensor(op.output).dtype, params, out, batch
        )
    for op in after:
        args = [values.get(operand) or _own_columns(builder, operand, rows, scope) for operand in op.inputs]
        out = FINAL if op is final else None
        values[op.output] = builder.step(
            op.kind, args, rows, scope.tensor(op.output).dtype, op.params, out, batch
        )
    return builder.build(), tuple(builder.inputs)


def _weights(scope: Scope, builder: RecipeBuilder, op: Op, rows: int) -> list[Arg]:
    """The args of a product's matrix and bias: whole, or of a quantised matrix the tile's rows and columns."""
    name, *bias = op.inputs[1:]
    tensor = scope.tensor(name)
    if tensor.format is None:
        return [builder.operand(each) for each in op.inputs[1:]]
    params = {
        "qdtype": int(tensor.dtype),
        "group": tensor.format.group_of(tensor.shape),
        "rows_per_scale": tensor.format.rows_per_scale(tensor.shape),
    }
    stored = [builder.operand(each) for each in quantised_names(name, tensor.format)]
    matrix = builder.step(_K.DEQUANT, stored, tensor.width, DType.F32, params, rows=rows)
    return [
        matrix,
        *(builder.step(_K.COPY, [builder.operand(each)], rows, scope.tensor(each).dtype) for each in bias),
    ]


def _tile_bytes(scope: Scope, op: Op, rows: int) -> int:
    """Bytes of `rows` rows of a product's matrix."""
    tensor = scope.tensor(op.inputs[1])
    if tensor.format is None:
        return tensor.dtype.nbytes(rows * tensor.width)
    whole = tensor.format
    scales = -(-rows // whole.rows_per_scale(tensor.shape)) * whole.scale_shape(tensor.shape)[1]
    return tensor.dtype.nbytes(rows * tensor.width) + scales * whole.scale_bytes(scope.graph.dtype)


def _own_columns(builder: RecipeBuilder, name: str, rows: int, scope: Scope) -> Arg:
    """The task's own columns of operand `name`: a COPY that inherits n_off and N_tile."""
    batch, dtype = scope.graph.batch, scope.tensor(name).dtype
    return builder.step(_K.COPY, [builder.operand(name)], rows, dtype, _over_rows(batch), rows=batch)


def _matrix_op(batch: int) -> InstructionKind:
    return _K.GEMV_TILE if batch == 1 else _K.GEMM_TILE


def _over_rows(batch: int) -> dict[str, int]:
    """Params of an operation that takes its columns from each of several rows."""
    return {} if batch == 1 else {"M_tile": batch}
