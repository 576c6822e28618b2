"""Rope, KV append, attention over KV heads and blocks, and the merge of its partials.

A head, here, is a KV head of one row. They are counted row after row, as their columns stand in an activation. Rows of
one sequence, its lanes, share the head's caches: then appends are tasks of their own, before every attention to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from flywheel.ir import ABI_MAX_INPUTS, PARAM_FIELDS, InstructionKind, KvRows
from flywheel.ir.recipe import FINAL, Arg, Output, Recipe, RecipeBuilder
from flywheel.ir.window import rows_in_sight
from flywheel.lowering.emit.scope import PARTIAL, PARTIAL_EXTRA, Scope, TileSet, one_tile
from flywheel.lowering.fusion import COMBINE, Group
from flywheel.models.graph import Op, quantised_names

_K = InstructionKind

_NEW: Final = f"{PARTIAL}new"
"""The partial of the row that the launch appends."""


def emit_attention(scope: Scope, group: Group) -> list[TileSet]:
    """Tile sets of a group with appends, the attention, or both: one task for each head (and KV block). Functions of
    this module know the group's operations by what they make."""
    ops = {op.output: op for op in group.ops}
    appends = [op for op in group.ops if op.kind is _K.KV_APPEND]
    attention = next((op for op in group.ops if op.kind is _K.ATTENTION_TILE), None)
    if attention is None:
        return _emit_append(scope, ops, appends)
    if not appends:
        return _emit_attend(scope, ops, attention)
    past = _emit_past(scope, ops, attention) if len(_blocks(scope, attention)) > 1 else []
    # The tasks of the past come first, so that no earlier set writes the caches, and they wait for none.
    return [*past, *_append_and_attend(scope, ops, attention)]


def _appends(ops: Mapping[str, Op], attention: Op) -> list[Op]:
    """The appends to an attention's caches: of keys, then of values."""
    return [ops[name] for name in attention.inputs[1:]]


def _blocks(scope: Scope, attention: Op) -> list[tuple[int, int]]:
    """(first row, rows) of each KV block. Of a layer with a window, rows count from the first in sight."""
    return scope.tiling.kv_blocks(attention.params["kv_len"])


def _partial_names(scope: Scope, group: Group, attention: Op) -> list[str]:
    """Names of the partials that a group's attention writes: none where one block covers all that it attends to.

    A group with appends has one partial for each block's past rows, and one for the new row.
    """
    blocks = len(_blocks(scope, attention))
    if blocks == 1:
        return []
    if any(op.kind is _K.KV_APPEND for op in group.ops):
        return [*(_block_name(block) for block in range(len(_past_blocks(scope, attention)))), _NEW]
    return [_block_name(block) for block in range(blocks)]


def emit_combine(scope: Scope, group: Group, limit: int) -> tuple[list[TileSet], list[str]]:
    """A tree of merges of what a group's attention writes, and the partials that it leaves: at most `limit`, or with
    limit 1 the attention's result alone."""
    sets: list[TileSet] = []
    (attention,) = [op for op in group.ops if op.kind is _K.ATTENTION_TILE]
    names, level = _partial_names(scope, group, attention), 0
    while len(names) > limit:
        merges = max(-(-len(names) // ABI_MAX_INPUTS), min(limit, 2))
        chunks = [names[len(names) * i // merges : len(names) * (i + 1) // merges] for i in range(merges)]
        last = merges == 1
        names = [attention.output] if last else [f"{PARTIAL}l{level}.{index}" for index in range(merges)]
        for chunk, output in zip(chunks, names, strict=True):
            sets += [_emit_merge(scope, chunk, output, f"{COMBINE}.l{level}", head) for head in _heads(scope)]
        level += 1
    return sets, names


def merge_limit(scope: Scope, group: Group) -> int:
    """How many partials the product of a group can merge. Its weight's tensors, bias and residual are operands, too."""
    name, *bias = next(op.inputs[1:] for op in group.ops if op.kind is _K.GEMV_TILE)
    weight = scope.tensor(name)
    tensors = 1 if weight.format is None else len(quantised_names(name, weight.format))
    return ABI_MAX_INPUTS - tensors - len(bias) - 1


def _heads(scope: Scope) -> range:
    return range(len(scope.graph.streams))


def _emit_merge(scope: Scope, parts: Sequence[str], output: str, stage: str, head: int) -> TileSet:
    graph = scope.graph
    row = graph.group * (graph.head_dim + PARTIAL_EXTRA)
    partial = output.startswith(PARTIAL)
    width = row if partial else graph.group * graph.head_dim
    flops = 4 * row * len(parts)
    signal = output if partial else COMBINE
    if len(graph.streams) == 1:
        return TileSet(COMBINE, stage, _K.ATTENTION_COMBINE, tuple(parts), (output,), signal,
                       one_tile(scope.heads(), 0, flops))  # fmt: skip
    builder = RecipeBuilder()
    args = [builder.columns(part, head * row, row, scope.tensor(part).dtype) for part in parts]
    builder.step(_K.ATTENTION_COMBINE, args, width, scope.tensor(output).dtype, scope.heads(1), FINAL)
    params = {"N_tile": width, "n_off": head * width, "recipe": builder.build()}
    return TileSet(COMBINE, stage, _K.FUSED, tuple(builder.inputs), (output,), signal, one_tile(params, 0, flops))


def _emit_append(scope: Scope, ops: dict[str, Op], appends: Sequence[Op]) -> list[TileSet]:
    """One task for each head, with one append or with both, and with the key's norm and rope if they are fused."""
    graph = scope.graph
    name = appends[0].name if len(appends) == 1 else "kv_append"
    pos = appends[0].params["pos"]
    sets = []
    for head in _heads(scope):
        caches = tuple(_cache(scope, op, head) for op in appends)
        signal = f"{name}.{graph.streams[head]}"
        if len(appends) == 1 and len(graph.streams) == 1:
            inputs = (appends[0].inputs[0], *caches)
            sets.append(
                TileSet(name, name, _K.KV_APPEND, inputs, caches, signal, one_tile({"pos": pos}, 0, graph.head_dim))
            )
            continue
        if graph.lanes > 1:  # of all that lanes append to a head's caches, for who attends waits for all
            signal = f"{name}.{graph.cache_streams[head]}"
        builder = RecipeBuilder()
        made = _own_position(scope, builder, ops, head)
        for index, op in enumerate(appends):
            rows = _head_value(scope, builder, ops, op.inputs[0], head, graph.head_dim, made)
            _append(scope, builder, op, rows, head, Output(index))
        own = _sequence(scope, head)
        params = {**own, "pos": pos + own.get("lane", 0), "recipe": builder.build()}
        flops = 8 * graph.head_dim
        sets.append(TileSet(name, name, _K.FUSED, tuple(builder.inputs), caches, signal, one_tile(params, 0, flops)))
    return sets


def _emit_attend(scope: Scope, ops: dict[str, Op], attention: Op) -> list[TileSet]:
    """One task for each head and block, over all rows of the block up to the new one."""
    blocks = _blocks(scope, attention)
    windows = [{"kv_start": start, "kv_len": length, **_moving(scope, attention)} for start, length in blocks]
    names = [_block_name(block) for block in range(len(blocks))] if len(blocks) > 1 else [attention.output]
    return _emit_windows(scope, ops, attention, windows, names)


def _emit_past(scope: Scope, ops: dict[str, Op], attention: Op) -> list[TileSet]:
    """One task for each head and block, over the rows before the new one."""
    pos = _appends(ops, attention)[0].params["pos"]
    windows = [
        {"kv_start": start, "kv_len": length, "kv_rows": KvRows.PAST.value, "pos": pos, **_moving(scope, attention)}
        for start, length in _past_blocks(scope, attention)
    ]
    return _emit_windows(scope, ops, attention, windows, [_block_name(block) for block in range(len(windows))])


def _emit_windows(
    scope: Scope, ops: dict[str, Op], attention: Op, windows: Sequence[dict[str, int]], outputs: Sequence[str]
) -> list[TileSet]:
    """One task for each head and window. Tasks of one output share its counter."""
    graph = scope.graph
    recipes = [_attend_recipe(scope, ops, attention, head, outputs[0]) for head in _heads(scope)]
    sets = []
    for window, output in zip(windows, outputs, strict=True):
        tile_bytes, flops = _attend_cost(scope, _caches(scope, attention, 0), window["kv_len"])
        for head in _heads(scope):
            if len(graph.streams) == 1 and len(ops) == 1 and attention.params.keys() <= PARAM_FIELDS.keys():
                inputs = (attention.inputs[0], *_caches(scope, attention, head))
                params = {**attention.params, **window}
                sets.append(TileSet("attention", "attention", _K.ATTENTION_TILE, inputs, (output,), output,
                                    one_tile(params, tile_bytes, flops)))  # fmt: skip
                continue
            recipe, operands, width = recipes[head]
            own = _sequence(scope, head)
            rows = _lane_window(scope, window, own)
            params = {**rows, **own, "N_tile": width, "n_off": head * width, "recipe": recipe}
            sets.append(TileSet("attention", "attention", _K.FUSED, operands, (output,), output,
                                one_tile(params, tile_bytes, flops)))  # fmt: skip
    return sets


def _lane_window(scope: Scope, window: dict[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """The rows of a window up to that of the task's lane."""
    if "lane" not in own:
        return window
    pos = scope.graph.context - scope.graph.lanes + own["lane"]
    seen = rows_in_sight(window, pos)
    moving = {"pos": pos} if "window" in window else {}
    return {**window, **moving, "kv_len": min(window["kv_len"], max(0, seen - window["kv_start"]))}


def _moving(scope: Scope, attention: Op) -> dict[str, int]:
    """The params of a task whose rows move with the position; none where the layer attends to all."""
    params = attention.params
    return {"window": params["window"], "pos": scope.graph.context - 1} if "window" in params else {}


def _block_name(block: int) -> str:
    return f"{PARTIAL}b{block}"


def _past_blocks(scope: Scope, attention: Op) -> list[tuple[int, int]]:
    """The KV blocks without the last row, the new one. A block of that row alone is left out."""
    last = attention.params["kv_len"] - 1
    return [(start, min(length, last - start)) for start, length in _blocks(scope, attention) if start < last]


def _attend_recipe(
    scope: Scope, ops: dict[str, Op], attention: Op, head: int, output: str
) -> tuple[Recipe, tuple[str, ...], int]:
    """The recipe of one head's tiles, its operands and its columns. The tiles differ in their windows alone."""
    builder = RecipeBuilder()
    width = _attend(scope, builder, ops, attention, head, output, _own_position(scope, builder, ops, head))
    return builder.build(), tuple(builder.inputs), width


def _append_and_attend(scope: Scope, ops: dict[str, Op], attention: Op) -> Iterator[TileSet]:
    """Each head's appends and attention: over the new row alone if there are several blocks, else over all rows."""
    graph, appends = scope.graph, _appends(ops, attention)
    pos = appends[0].params["pos"]
    whole = len(_blocks(scope, attention)) == 1
    output = attention.output if whole else _NEW
    window = {"kv_start": 0, "kv_len": attention.params["kv_len"], **_moving(scope, attention)}
    if not whole:
        window = {"kv_start": pos, "kv_len": 1, "kv_rows": KvRows.NEW.value}
    tile_bytes, flops = _attend_cost(scope, _caches(scope, attention, 0), window["kv_len"])
    sources = (appends[1].inputs[0], 1), (attention.inputs[0], graph.group)
    normed = [(_normed(ops, name), heads * graph.head_dim) for name, heads in sources]
    for head in _heads(scope):
        builder = RecipeBuilder()
        made = _own_position(scope, builder, ops, head)
        for name, columns in normed:
            if name in ops:
                # First, so that only steps of the new row stand between the key's rope and the attention.
                made[name] = _head_value(scope, builder, ops, name, head, columns, made)
        for index, op in enumerate(appends):
            rows = _head_value(scope, builder, ops, op.inputs[0], head, graph.head_dim, made)
            _append(scope, builder, op, rows, head, Output(index + 1))
        width = _attend(scope, builder, ops, attention, head, output, made)
        own = {**_sequence(scope, head), "pos": pos}
        params = {**window, **own, "N_tile": width, "n_off": head * width, "recipe": builder.build()}
        outputs = (output, *_caches(scope, attention, head))
        yield TileSet("attention", "attention", _K.FUSED, tuple(builder.inputs), outputs, output,
                      one_tile(params, tile_bytes, flops))  # fmt: skip


def _normed(ops: Mapping[str, Op], name: str) -> str:
    """Where the group norms what becomes `name`: the norm's result; else the group's operand."""
    while name in ops and ops[name].kind is not _K.RMSNORM:
        name = ops[name].inputs[0]
    return name


def _append(scope: Scope, builder: RecipeBuilder, op: Op, rows: Arg, head: int, out: Output) -> None:
    cache = _cache(scope, op, head)
    width = scope.graph.context * scope.graph.head_dim
    builder.step(_K.KV_APPEND, [rows, builder.operand(cache)], width, scope.tensor(cache).dtype, {}, out)


def _attend(
    scope: Scope,
    builder: RecipeBuilder,
    ops: dict[str, Op],
    attention: Op,
    head: int,
    output: str,
    made: Mapping[str, Arg] = MappingProxyType({}),
) -> int:
    """Append one head's attention step to the recipe. The result is the columns of `output` that it writes, which may
    be a partial.

    `made` are the head's values that the recipe already has.
    """
    graph = scope.graph
    query = _head_value(scope, builder, ops, attention.inputs[0], head, graph.group * graph.head_dim, made)
    caches = [builder.operand(name) for name in _caches(scope, attention, head)]
    extra = 0 if output == attention.output else PARTIAL_EXTRA
    width = graph.group * (graph.head_dim + extra)
    own: dict[str, Any] = {
        **scope.heads(1), **{name: attention.params[name] for name in ("scale", "cap") if name in attention.params}
    }  # fmt: skip
    builder.step(_K.ATTENTION_TILE, [query, *caches], width, scope.tensor(output).dtype, own, FINAL)
    return width


def _head_value(
    scope: Scope,
    builder: RecipeBuilder,
    ops: dict[str, Op],
    name: str,
    head: int,
    width: int,
    made: Mapping[str, Arg] = MappingProxyType({}),
) -> Arg:
    """The arg with one head's `width` columns of `name`. If a fused operation makes `name`, the recipe computes it."""
    if name in made:
        return made[name]
    maker = ops.get(name)
    if maker is None:
        return builder.columns(name, head * width, width, scope.tensor(name).dtype)
    value = _head_value(scope, builder, ops, maker.inputs[0], head, width, made)
    operands = [value, *(made.get(operand) or builder.operand(operand) for operand in maker.inputs[1:])]
    return builder.step(maker.kind, operands, width, scope.tensor(name).dtype, maker.params)


def _own_position(scope: Scope, builder: RecipeBuilder, ops: Mapping[str, Op], head: int) -> dict[str, Arg]:
    """The position of a head's sequence, for the recipe's ROPEs. Empty where there is none, or a single sequence."""
    turning = [op.inputs[1] for op in ops.values() if op.kind is _K.ROPE]
    if scope.graph.batch == 1 or not turning:
        return {}
    name = turning[0]
    return {name: builder.columns(name, _row(scope, head), 1, scope.tensor(name).dtype)}


def _sequence(scope: Scope, head: int) -> dict[str, int]:
    """The params that say whose position a head's task moves to, and how far behind it the row is; there is no need for
    them where there is one row."""
    if scope.graph.lanes > 1:
        sequence, lane = divmod(_row(scope, head), scope.graph.lanes)
        return {"sequence": sequence, "lane": lane}
    return {} if scope.graph.batch == 1 else {"sequence": _row(scope, head)}


def _row(scope: Scope, head: int) -> int:
    return head // scope.graph.n_kv_heads


def _cache(scope: Scope, op: Op, head: int) -> str:
    """Cache of one KV head that an append writes."""
    return f"{op.output}.{scope.graph.cache_streams[head]}"


def _caches(scope: Scope, attention: Op, head: int) -> tuple[str, ...]:
    return tuple(f"{name}.{scope.graph.cache_streams[head]}" for name in attention.inputs[1:])


def _attend_cost(scope: Scope, caches: Sequence[str], length: int) -> tuple[int, int]:
    """(bytes of K and V that a tile streams, its floating-point operations)."""
    graph = scope.graph
    nbytes = sum(scope.tensor(name).dtype.nbytes(length * graph.head_dim) for name in caches)
    return nbytes, 4 * graph.group * graph.head_dim * length
