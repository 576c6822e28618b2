"""Tiles, rows and KV windows stay inside their buffers, in a task and in each step of its recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from flywheel.ir.access import MATRIX_OPS, tile, tile_rows
from flywheel.ir.dtype import BufferKind, DType
from flywheel.ir.opcodes import INHERITED_PARAMS, InstructionKind
from flywheel.ir.records import Buffer, Task
from flywheel.ir.validate.recipe import Recipe, Slot, Step

Fault = tuple[str, str]
"""Code and text of a broken bound."""


def bound_faults(
    task: Task, recipe: Recipe | None, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
) -> Iterator[Fault]:
    """Broken bounds of a task whose operands and params are well-formed."""
    if recipe is None:
        check = _CHECKS.get(task.op)
        if check is not None:
            columns = tile(task.params) if task.op in MATRIX_OPS else None
            yield from check(task.params, inputs, outputs[0], columns)
        return
    yield from _recipe_faults(task.params, recipe, inputs, outputs)


def _recipe_faults(
    params: Mapping[str, Any], recipe: Recipe, inputs: Sequence[Buffer], outputs: Sequence[Buffer]
) -> Iterator[Fault]:
    inherited = {name: params[name] for name in INHERITED_PARAMS & params.keys()}
    values: dict[Slot, Buffer] = {("in", number): buffer for number, buffer in enumerate(inputs)}
    columns = tile(params)
    for step in recipe.steps:
        values[step.out] = step.result
        if step.out[0] == "out":
            first = step.out[1] == 0
            yield from _output_faults(step, outputs[step.out[1]], columns if first else None, tile_rows(params))
        check = _CHECKS.get(step.op)
        if check is not None:
            # A matrix step leaves its N_tile columns at the start of its result.
            own = {**inherited, **step.params}
            yield from check(own, [values[arg] for arg in step.args], step.result, (0, own.get("N_tile", 0)))


def _output_faults(step: Step, output: Buffer, columns: tuple[int, int] | None, rows: int) -> Iterator[Fault]:
    """A recipe's result fills exactly the columns that count as written, of each of `rows` rows."""
    width = step.result.numel
    if columns is not None and output.kind is not BufferKind.KV_CACHE:
        yield from _row_faults(columns, rows, output)
        wanted = (columns[1] - columns[0]) * rows
        if width != wanted:
            yield "tile-bounds", f"{step.result.name} makes {width} elements for a tile of {wanted}"
    elif width > output.numel or (width < output.numel and step.op is not InstructionKind.KV_APPEND):
        yield "tile-bounds", f"{step.result.name} makes {width} elements for the {output.numel} of {_name(output)}"


def _matrix(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    x, weight = inputs[0], inputs[1]
    depth, end = params["K"], params["n_off"] + params["N_tile"]
    if len(weight.shape) == 2:
        if end > weight.shape[0]:
            yield "tile-bounds", _past(end, weight)
        if depth > weight.shape[1]:
            yield "tile-bounds", f"K={depth} exceeds the {weight.shape[1]} columns of {_name(weight)}"
    elif end * depth > weight.numel:
        yield "tile-bounds", f"{end} rows of K={depth} exceed the {weight.numel} elements of {_name(weight)}"
    if depth > x.numel:
        yield "tile-bounds", f"K={depth} exceeds the {x.numel} elements of {_name(x)}"
    if len(inputs) > 2 and end > inputs[2].numel:
        yield "tile-bounds", _past(end, inputs[2])
    rows = max(1, x.numel // depth)
    if columns is not None and columns[1] > output.numel // rows:
        yield "tile-bounds", _past(columns[1], output)


def _gemm(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    yield from _matrix(params, inputs, output, columns)
    rows = inputs[0].numel // params["K"]
    if params["M_tile"] > rows:
        yield "tile-bounds", f"M_tile={params['M_tile']} exceeds the {rows} rows of {_name(inputs[0])}"


def _attention(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    width = params["n_heads"] * params["head_dim"]
    for buffer in (inputs[0], output):
        if width > buffer.numel:
            yield "tile-bounds", f"n_heads * head_dim = {width} exceeds the {buffer.numel} elements of {_name(buffer)}"
    row, end = params["n_kv_heads"] * params["head_dim"], params["kv_start"] + params["kv_len"]
    for cache in inputs[1:3]:
        rows, width = _rows(cache, row)
        if end > rows or width < row:
            yield "kv-bounds", f"a KV window that ends at row {end} of {row} elements does not fit {_name(cache)}"
    if len(inputs) > 3:
        rows, mask = _rows(inputs[1], row)[0], inputs[3]
        if mask.numel not in (rows, params["n_heads"] * rows):
            yield "tile-bounds", f"{_name(mask)} is no mask of {rows} cache rows, for all heads or each"


def _append(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    new, cache = inputs[0], output if output.kind is BufferKind.KV_CACHE else inputs[1]
    rows, width = _rows(cache, new.numel)
    if new.numel % width or params["pos"] + new.numel // width > rows:
        yield "kv-bounds", f"{new.numel} elements at pos={params['pos']} do not fit {_name(cache)}"


def _rows(cache: Buffer, width: int) -> tuple[int, int]:
    """Rows of a cache [max_seq, ...] and their elements; a flat one is cut into rows of `width`."""
    if len(cache.shape) == 1:
        return cache.numel // width, width
    return cache.shape[0], cache.numel // cache.shape[0]


def _copy(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    named = tile(params)
    if named is None:
        yield from _elementwise(params, inputs, output, columns)
        return
    yield from _row_faults(named, tile_rows(params), inputs[0])
    wanted = (named[1] - named[0]) * tile_rows(params)
    if wanted != output.numel:
        yield "tile-bounds", f"a slice of {wanted} elements does not fill {_name(output)}"


def _row_faults(columns: tuple[int, int], rows: int, buffer: Buffer) -> Iterator[Fault]:
    """Columns of each of `rows` rows of a buffer, which divide it."""
    if columns[1] > buffer.numel // rows:
        yield "tile-bounds", _past(columns[1], buffer)
    if buffer.numel % rows:
        yield "tile-bounds", f"M_tile={rows} does not divide the {buffer.numel} elements of {_name(buffer)}"


def _elementwise(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    for buffer in inputs:
        if buffer.numel < output.numel:
            yield "tile-bounds", f"{_name(buffer)} has too few elements for {_name(output)}"


def _norm(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    hidden, x = params["hidden"], inputs[0]
    for buffer in (*inputs, output):
        if hidden > buffer.numel:
            yield "tile-bounds", f"hidden={hidden} exceeds the {buffer.numel} elements of {_name(buffer)}"
    if x.numel % hidden:
        yield "bad-param", f"hidden={hidden} does not divide the {x.numel} elements of {_name(x)}"
    yield from _elementwise(params, [x], output, columns)


def _embed(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    hidden, (ids, table) = params["hidden"], inputs
    if hidden > table.numel:
        yield "tile-bounds", f"hidden={hidden} exceeds the {table.numel} elements of {_name(table)}"
    elif (len(table.shape) == 2 and hidden != table.shape[1]) or table.numel % hidden:
        yield "bad-param", f"hidden={hidden} is not the width of {_name(table)}"
    if ids.numel * hidden > output.numel:
        yield (
            "tile-bounds",
            f"{ids.numel} rows of {hidden} elements do not fit {_name(output)}",
        )


def _rope(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    head_dim, (x, positions) = params["head_dim"], inputs
    if head_dim % 2:
        yield "bad-param", f"head_dim={head_dim} of ROPE is odd"
    if x.numel % head_dim:
        yield "bad-param", f"head_dim={head_dim} does not divide the {x.numel} elements of {_name(x)}"
    elif x.numel // head_dim % positions.numel:
        yield "tile-bounds", f"{_name(x)} is not rows of heads of {head_dim} for each of {_name(positions)}"
    yield from _elementwise(params, [x], output, columns)


def _dequant(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    packed, qdtype, group = inputs[0], params["qdtype"], params["group"]
    if qdtype not in _QUANTISED:
        yield "bad-param", f"qdtype={qdtype} is not I4, I8 or U8"
        return
    numel = packed.nbytes * (2 if qdtype == DType.I4 else 1)
    if output.numel > numel:
        yield "tile-bounds", f"{_name(packed)} holds {numel} {DType(qdtype).name}, too few for {_name(output)}"
    rows = packed.numel // packed.shape[-1]
    groups = rows * -(-(numel // rows) // group)
    for scales in inputs[1:]:
        if scales.numel < groups:
            yield "tile-bounds", f"{_name(scales)} has too few elements for {groups} groups of {group} elements"


def _softmax(
    params: Mapping[str, Any], inputs: Sequence[Buffer], output: Buffer, columns: tuple[int, int] | None
) -> Iterator[Fault]:
    dim, rank = params.get("dim", -1), len(inputs[0].shape)
    if not -rank <= dim < rank:
        yield "bad-param", f"dim={dim} is not a dimension of {_name(inputs[0])}"
    yield from _elementwise(params, inputs, output, columns)


def _past(end: int, buffer: Buffer) -> str:
    return f"a tile that ends at {end} reaches past {_name(buffer)}"


def _name(buffer: Buffer) -> str:
    return f"{buffer.name} {list(buffer.shape)}"


_QUANTISED: Final = (DType.I4, DType.I8, DType.U8)

_ELEMENTWISE: Final = (
    InstructionKind.SILU_MUL,
    InstructionKind.GELU,
    InstructionKind.ADD,
    InstructionKind.MUL,
    InstructionKind.ALLREDUCE_SHARD,
    InstructionKind.SAMPLE_ARGMAX,
    InstructionKind.ATTENTION_COMBINE,
)

_CHECKS: Final[Mapping[InstructionKind, Callable[..., Iterator[Fault]]]] = {
    InstructionKind.GEMV_TILE: _matrix,
    InstructionKind.GEMM_TILE: _gemm,
    InstructionKind.ATTENTION_TILE: _attention,
    InstructionKind.KV_APPEND: _append,
    InstructionKind.COPY: _copy,
    InstructionKind.EMBED: _embed,
    InstructionKind.RMSNORM: _norm,
    InstructionKind.LAYERNORM: _norm,
    InstructionKind.ROPE: _rope,
    InstructionKind.DEQUANT: _dequant,
    InstructionKind.SOFTMAX: _softmax,
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
}
