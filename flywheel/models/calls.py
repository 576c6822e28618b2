"""A graph's operations as calls for torch: those that one product, one rotation or one append computes together."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from flywheel.ir import BufferKind, InstructionKind
from flywheel.models.graph import Block, Graph, Op, Tensor

_K = InstructionKind


class ColumnsOf(NamedTuple):
    """Columns `start` to `stop` of the value `name`, which has `width`."""

    name: str
    start: int
    stop: int
    width: int


@dataclass(frozen=True, slots=True)
class Call:
    """Operations of one kind that are computed as one. None reads what another writes."""

    kind: InstructionKind
    names: tuple[str, ...]
    params: Mapping[str, Any]
    """Those of the first operation. Rotations that are one have the same."""
    inputs: tuple[ColumnsOf, ...]
    """The activations that it reads. The inputs of a rotation that are beside each other are one."""
    weights: tuple[tuple[str, ...], ...]
    """For each operand that is a weight, its state-dict key for each operation, with `{i}` for the layer."""
    output: str
    """Name of the value that it makes: the results of all operations, beside each other."""
    done: tuple[str, ...] = ()
    """Values that no later call of the block reads."""


def calls_of(graph: Graph, block: Block, joined: Set[InstructionKind]) -> tuple[Call, ...]:
    """The calls of a block, in execution order. They read `token_id` or the residual stream `x`, and leave `x_out`, or
    `logits` and `next_token`.

    Appends in sequence are one call, and so are rotations of what is beside each other. With GEMV_TILE in `joined`,
    products with the same vector are one, of matrices that the caller stacks. With ROPE, rotations are one wherever
    their inputs are.
    """
    tensors = {**graph.prologue.tensors, "x": graph.prologue.tensors["x_out"], **block.tensors}
    places = {name: _all_of(name, tensors[name].width) for name in ("token_id", "x")}
    calls: list[Call] = []
    run: list[Op] = []
    for op in block.ops:
        if run and not _joins(run, op, places, joined):
            calls.append(_call(run, tensors, places))
            run = []
        run.append(op)
    calls.append(_call(run, tensors, places))
    return _with_ends(calls, tensors)


def cached_by(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """The calls up to the last append: what a layer computes of which nothing but the caches is read."""
    last = max(place for place, call in enumerate(calls) if call.kind is _K.KV_APPEND)
    return calls[: last + 1]


def _joins(run: list[Op], op: Op, places: Mapping[str, ColumnsOf], joined: Set[InstructionKind]) -> bool:
    """Whether an operation is computed with those before it."""
    last = run[-1]
    if op.kind is not last.kind or any(each.output in op.inputs for each in run):
        return False
    if op.kind is _K.GEMV_TILE:
        return op.kind in joined and op.inputs[0] == last.inputs[0] and len(op.inputs) == len(last.inputs)
    if op.kind is _K.ROPE:
        beside = _are_beside(places[last.inputs[0]], places[op.inputs[0]])
        return op.params == last.params and (beside or op.kind in joined)
    return op.kind is _K.KV_APPEND


def _all_of(name: str, width: int) -> ColumnsOf:
    return ColumnsOf(name, 0, width, width)


def _are_beside(one: ColumnsOf, other: ColumnsOf) -> bool:
    return one.name == other.name and one.stop == other.start


def _call(ops: list[Op], tensors: Mapping[str, Tensor], places: dict[str, ColumnsOf]) -> Call:
    """The operations as one call; `places` learns where their results are."""
    first = ops[0]
    reads = [name for op in (ops[:1] if first.kind is _K.GEMV_TILE else ops) for name in op.inputs]
    inputs: list[ColumnsOf] = []
    for own in [places[name] for name in reads if name in places]:
        if first.kind is _K.ROPE and inputs and _are_beside(inputs[-1], own):
            own = own._replace(start=inputs.pop().start)
        inputs.append(own)
    output = "+".join(op.output for op in ops)
    if first.kind is not _K.KV_APPEND:
        ends = list(accumulate((tensors[op.output].width for op in ops), initial=0))
        for op, (start, stop) in zip(ops, pairwise(ends), strict=True):
            places[op.output] = ColumnsOf(output, start, stop, ends[-1])
    held = [place for place, name in enumerate(first.inputs) if _is(tensors, name, BufferKind.WEIGHT)]
    weights = tuple([tuple([_key(tensors[op.inputs[place]]) for op in ops]) for place in held])
    return Call(first.kind, tuple([op.name for op in ops]), first.params, tuple(inputs), weights, output)


def _is(tensors: Mapping[str, Tensor], name: str, kind: BufferKind) -> bool:
    return name in tensors and tensors[name].kind is kind


def _key(tensor: Tensor) -> str:
    assert tensor.source is not None
    return tensor.source


def _with_ends(calls: list[Call], tensors: Mapping[str, Tensor]) -> tuple[Call, ...]:
    """The calls, each with the values that it is the last to read. The step's results stay."""
    last = {columns.name: place for place, call in enumerate(calls) for columns in call.inputs}
    last = {name: end for name, end in last.items() if not _is(tensors, name, BufferKind.IO_OUTPUT)}
    return tuple(
        [
            replace(call, done=tuple([name for name, end in last.items() if end == place]))
            for place, call in enumerate(calls)
        ]
    )
