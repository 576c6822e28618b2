"""The memory that a decode step takes on a GPU, and whether the GPU has it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from flywheel.errors import TooLargeError
from flywheel.ir import BufferKind, DType, GpuTarget
from flywheel.models.families import layer_weight_shapes
from flywheel.models.formats import HEAD, PLAIN, WeightFormats
from flywheel.models.graph import Block, Graph
from flywheel.models.spec import DecoderSpec, model_weight_shapes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of a decode step: weights, packed once; KV caches of every sequence; and the largest workspace, with memory
    of its own for each operation's result.

    It leaves out memory beside the program: CUDA's context, and torch's copy of the weights, which is whole where there
    is room for it, and otherwise one matrix at a time.
    """

    weight_bytes: int
    cache_bytes: int
    workspace_bytes: int

    @property
    def nbytes(self) -> int:
        """The sum of the three."""
        return self.weight_bytes + self.cache_bytes + self.workspace_bytes


def footprint(graph: Graph) -> Footprint:
    """The footprint of a graph's step, for any schedule. A tensor that several operations share counts once."""
    sizes = dict.fromkeys(BufferKind, 0)
    sources: set[str] = set()
    layers = [(block, graph.order.count(number), set[str]()) for number, block in enumerate(graph.kinds)]
    for block, times, known in ((graph.prologue, 1, sources), *layers, (graph.epilogue, 1, sources)):
        for kind, nbytes in _tensors(block, known):
            sizes[kind] += times * nbytes
    weights, caches = sizes[BufferKind.WEIGHT] + sizes[BufferKind.CONST], sizes[BufferKind.KV_CACHE]
    return Footprint(weights, caches, sum(sizes.values()) - weights - caches)


def check_fits(graph: Graph, target: GpuTarget) -> None:
    """Raises TooLargeError, with the numbers, where a step of the graph exceeds the target's memory."""
    needed = footprint(graph)
    if needed.nbytes > target.hbm_bytes:
        parts = (needed.weight_bytes, needed.cache_bytes, needed.workspace_bytes)
        weights, caches, workspace = (f"{nbytes / 1e9:,.2f}" for nbytes in parts)
        raise TooLargeError(
            f"{graph.model} on {target.name}: {weights} GB of weights, {caches} of caches and {workspace} of workspace "
            f"exceed its {target.hbm_bytes / 1e9:,.2f} GB of memory"
        )


def bytes_per_token(spec: DecoderSpec, dtype: DType, formats: WeightFormats = PLAIN) -> int:
    """Bytes of weights, scales included, that one token reads.

    A token reads all weights, but only one row of an embedding that is not also the head.
    """

    def nbytes(role: str, shape: tuple[int, ...]) -> int:
        own = formats.of(role)
        return dtype.nbytes(prod(shape)) if own is None else own.nbytes(shape, dtype)

    once = {**model_weight_shapes(spec), "embed": (1, spec.hidden), HEAD: (spec.vocab, spec.hidden)}
    layers = sum(
        count * nbytes(role, shape)
        for own, count in spec.layer_kinds.items()
        for role, shape in layer_weight_shapes(own).items()
    )
    gathered = spec.tied_head and formats.of(HEAD) is None  # the head is the embedding
    whole = sum(nbytes(role, shape) for role, shape in once.items() if role != "embed" or not gathered)
    return whole + layers


def _tensors(block: Block, sources: set[str]) -> list[tuple[BufferKind, int]]:
    found = []
    for tensor in block.tensors.values():
        if tensor.source is None or tensor.source not in sources:
            found.append((tensor.kind, tensor.dtype.nbytes(tensor.numel)))
        if tensor.source is not None:
            sources.add(tensor.source)
    return found
