"""A decode step shared by several GPUs: the work of each, and their exchanges. Source: docs/ir.md, "Ranks"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import MAX_RANKS, BufferKind, DType, InstructionKind
from flywheel.models.decoder import decode_step
from flywheel.models.formats import HEAD, PLAIN, WeightFormats
from flywheel.models.graph import Block, Graph, Op, Tensor, scales_of, zeros_of
from flywheel.models.spec import DecoderSpec

_K = InstructionKind

ROW_QUANTUM: Final = 16
"""Rows of the head's matrix on one GPU are a multiple of it, except on the last GPU."""

SHARE: Final = "logits_share"
"""The operation by which each GPU sends the others its logits."""


def shared_step(
    spec: DecoderSpec, context: int, dtype: DType, batch: int, formats: WeightFormats = PLAIN, ranks: int = 1
) -> Graph:
    """The graph of `decode_step` and, for several `ranks`, the graph of each GPU.

    Each GPU has a part of the heads of q, k and v, of the rows of gate and up, and of the vocabulary. It has the
    columns of o and down that multiply its own results. The results of o and down are summands. All GPUs add all
    summands in the order of ranks, and the first summand includes the residual. Norms and the embedding are on every
    GPU. If there are fewer KV heads than GPUs, several GPUs have the same one. Raises ConfigError as `decode_step`, and
    where the heads, the rows or a format's blocks cannot be divided.
    """
    whole = decode_step(spec, context, dtype, batch, formats)
    if ranks == 1:
        return whole
    part = decode_step(local_spec(spec, ranks), context, dtype, batch, formats)
    return replace(whole, ranks=tuple(_of_rank(spec, whole, part, formats, rank, ranks) for rank in range(ranks)))


def local_spec(spec: DecoderSpec, ranks: int) -> DecoderSpec:
    """The heads and rows that each of `ranks` GPUs has of a model. Raises ConfigError where these cannot be shared."""
    check_ranks(spec, ranks)
    return replace(
        spec,
        n_heads=spec.n_heads // ranks,
        n_kv_heads=max(1, spec.n_kv_heads // ranks),
        intermediate=spec.intermediate // ranks,
    )


def kv_heads_of(spec: DecoderSpec, rank: int, ranks: int) -> range:
    """The KV heads of the model that GPU `rank` has. Raises as `local_spec` does."""
    first = rank * spec.n_kv_heads // ranks
    return range(first, first + local_spec(spec, ranks).n_kv_heads)


def check_ranks(spec: DecoderSpec, ranks: int) -> None:
    """Raises ConfigError, with the numbers, where so many GPUs cannot share a model."""
    if not 1 <= ranks <= MAX_RANKS:
        raise ConfigError(f"{spec.name}: ranks {ranks} is not in 1..{MAX_RANKS}")
    if ranks > 1 and len(spec.layer_kinds) > 1:
        raise ConfigError(f"{spec.name}: its heads differ from layer to layer, which {ranks} ranks cannot share yet")
    for name, count in (("n_heads", spec.n_heads), ("intermediate", spec.intermediate)):
        if count % ranks:
            raise ConfigError(f"{spec.name}: {name}={count} is not a multiple of {ranks} ranks")
    if spec.n_kv_heads % ranks and ranks % spec.n_kv_heads:
        raise ConfigError(f"{spec.name}: n_kv_heads={spec.n_kv_heads} and {ranks} ranks: neither divides the other")


def _of_rank(
    spec: DecoderSpec, whole: Graph, part: Graph, formats: WeightFormats, rank: int, ranks: int
) -> Graph:
    head = kv_heads_of(spec, rank, ranks).start
    named = replace(part, first_kv_head=head)
    streams = dict(zip(part.streams, named.streams, strict=True))
    kinds = []
    for own, all_of_it in zip(part.kinds, whole.kinds, strict=True):
        layer = {name: _part(spec, name, own, all_of_it, rank, ranks, head) for name in own.tensors}
        for cache in [name for name, tensor in layer.items() if tensor.kind is BufferKind.KV_CACHE]:
            side, _, stream = cache.partition(".")
            name = f"{side}.{streams[stream]}"
            layer[f"{name}."] = replace(layer.pop(cache), name=name)
        layer = {name.removesuffix("."): tensor for name, tensor in layer.items()}
        _check_norms(spec, own, all_of_it)
        kinds.append(Block(layer, tuple(_summed(own.ops, layer, rank, ranks))))
    return replace(named, kinds=tuple(kinds), epilogue=_vocabulary(spec, part.epilogue, formats, rank, ranks))


def _check_norms(spec: DecoderSpec, part: Block, whole: Block) -> None:
    """Raises ConfigError for a norm of what several GPUs have a part of."""
    for own, all_of_it in zip(part.ops, whole.ops, strict=True):
        if own.kind is _K.RMSNORM and own.params != all_of_it.params:
            raise ConfigError(f"{spec.name}: {own.name} is a norm of all heads, which several GPUs cannot share")


def _summed(ops: Sequence[Op], tensors: dict[str, Tensor], rank: int, ranks: int) -> list[Op]:
    """The operations of a layer on a GPU, and the sums of what each GPU makes of some columns of a matrix.

    Where an addition alone reads the result, the sum takes its place, and the first GPU's summand includes the
    residual. It alone has the bias.
    """
    found = []
    if rank > 0:
        ops = [_unbiased(op, tensors) for op in ops]
    products = [op.output for op in ops if op.kind is _K.GEMV_TILE and _has_columns(tensors[op.inputs[1]])]
    readers = {name: [op for op in ops if name in op.inputs] for name in products}
    adds = [(_K.ADD, 2)]
    added = {name: its[0] for name, its in readers.items() if [(op.kind, len(op.inputs)) for op in its] == adds}
    for op in ops:
        product = next((name for name in products if op.output == name or op is added.get(name)), None)
        if product is None:
            found.append(op)
            continue
        summands = tuple([summand(product, each) for each in range(ranks)])
        total = Op(f"{product.removesuffix('_out')}_sum", _K.ALLREDUCE_SHARD, summands, op.output)
        if op.output == product:
            tensors |= {name: replace(tensors[product], name=name) for name in summands}
            residual = product in added
            if residual:
                tensors[product] = replace(tensors[product], dtype=DType.F32)
            found.append(op if residual and rank == 0 else replace(op, output=summands[rank]))
            found += [] if residual else [total]
        else:
            found += [replace(op, output=summands[0]), total] if rank == 0 else [total]
    return found


def _unbiased(op: Op, tensors: dict[str, Tensor]) -> Op:
    """A product of some columns of a matrix without its bias, which leaves `tensors`; other operations as they are."""
    if op.kind is not _K.GEMV_TILE or len(op.inputs) < 3 or not _has_columns(tensors[op.inputs[1]]):
        return op
    del tensors[op.inputs[2]]
    return replace(op, inputs=op.inputs[:2])


def _has_columns(matrix: Tensor) -> bool:
    """Whether a GPU has some columns of a matrix."""
    return matrix.part is not None and matrix.part[0] == 1


def summand(product: str, rank: int) -> str:
    """Name of a GPU's summand of a product."""
    return f"{product}.p{rank}"


def _vocabulary(spec: DecoderSpec, block: Block, formats: WeightFormats, rank: int, ranks: int) -> Block:
    """The head with a part of the vocabulary. Its logits go to all GPUs, and each chooses from all logits."""
    grains = -(-spec.vocab // ROW_QUANTUM)
    shared = formats.of(HEAD)
    grain = 1 if shared is None else -(-min(shared.rows_per_scale((spec.vocab, 1)), spec.vocab) // ROW_QUANTUM)
    first, stop = (
        min(spec.vocab, grains * number // ranks // grain * grain * ROW_QUANTUM) if number < ranks else spec.vocab
        for number in (rank, rank + 1)
    )
    if first >= stop:
        raise ConfigError(f"{spec.name}: vocab={spec.vocab} has no rows for rank {rank} of {ranks}")
    ops = [replace(op, rows=(first, stop)) if op.output == "logits" else op for op in block.ops]
    place = next(index for index, op in enumerate(ops) if op.output == "logits")
    share = Op(SHARE, _K.COPY, ("logits",), "logits", rows=(first, stop))
    return Block(block.tensors, (*ops[: place + 1], share, *ops[place + 1 :]))


def _part(spec: DecoderSpec, name: str, part: Block, whole: Block, rank: int, ranks: int, head: int) -> Tensor:
    """A layer's tensor, as a part of the whole model's tensor if it is smaller."""
    tensor, source = part.tensors[name], whole.tensors.get(name)
    if tensor.kind is not BufferKind.WEIGHT or source is None or source.shape == tensor.shape:
        return tensor
    axis = 0 if source.shape[0] != tensor.shape[0] else 1
    matrix = name.removesuffix(zeros_of("")).removesuffix(scales_of(""))
    size, shape = part.tensors[matrix].shape[axis], whole.tensors[matrix].shape
    first = rank * size if ranks * size == shape[axis] else head * spec.head_dim  # GPUs may share a KV head
    format = whole.tensors[matrix].format
    unit = 1
    if name != matrix and format is not None:
        unit = format.rows_per_scale(shape) if axis == 0 else format.group_of(shape)
    if first % unit or size % unit:
        what = "rows" if axis == 0 else "columns"
        raise ConfigError(f"{spec.name}: {matrix}: {size} {what} a rank are no multiple of the {unit} of a scale")
    return replace(tensor, part=(axis, first // unit))
