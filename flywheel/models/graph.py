"""A decode step as a graph of named operations, before any decision about how to run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any, Final

from flywheel.ir import BufferKind, DType, InstructionKind
from flywheel.models.formats import WeightFormat

_ATTENTION: Final = InstructionKind.ATTENTION_TILE


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named value. Activations are `[batch, width]`. `source` is the state-dict key of a weight.

    A quantised matrix has a `format`. The tensor then has its codes. Its scales and zero points are tensors of their
    own, named by `scales_of` and `zeros_of`.
    """

    name: str
    kind: BufferKind
    dtype: DType
    shape: tuple[int, ...]
    source: str | None = None
    format: WeightFormat | None = None
    part: tuple[int, int] | None = None
    """(axis, first) of a GPU's part of a shared weight; None for all of it."""

    @property
    def width(self) -> int:
        """Length of the last dimension."""
        return self.shape[-1]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def scales_of(name: str) -> str:
    """Name, or state-dict key, of the scales of a quantised matrix."""
    return f"{name}.scales"


def zeros_of(name: str) -> str:
    """Name, or state-dict key, of the zero points of a quantised matrix."""
    return f"{name}.zeros"


def codes_of(key: str) -> str:
    """State-dict key of the codes of a quantised matrix."""
    return f"{key}.codes"


def quantised_names(name: str, format: WeightFormat) -> tuple[str, ...]:
    """Names of a quantised matrix's tensors, in the order of DEQUANT's operands."""
    return (name, scales_of(name), *([zeros_of(name)] if format.zeros else []))


@dataclass(frozen=True, slots=True)
class Op:
    """One operation over whole tensors, by name."""

    name: str
    kind: InstructionKind
    inputs: tuple[str, ...]
    output: str
    params: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[int, int] | None = None
    """(first, end) rows of its matrix that a GPU multiplies; None for all."""


@dataclass(frozen=True, slots=True)
class Block:
    """Operations in execution order, and the tensors that they name, except those of an enclosing block."""

    tensors: Mapping[str, Tensor]
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """Embedding, layers, head.

    Layer `i` is the block `kinds[order[i]]`. Layers read the residual stream as tensor `x` and write `x_out`, which is
    `x` to whatever follows. `{i}` in a layer's `source` stands for its index. The `batch` rows of every activation are
    tokens: of a sequence each, at a position of its own, or with `lanes` so many consecutive tokens of each sequence,
    row after row. The cache operands `k_cache` and `v_cache` stand for one tensor a KV head of each sequence.
    """

    model: str
    dtype: DType
    context: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    """As in most layers; `of` has a layer's own heads."""
    prologue: Block
    kinds: tuple[Block, ...]
    """The kinds of layers."""
    order: tuple[int, ...]
    """The kind of each layer."""
    epilogue: Block
    batch: int = 1
    lanes: int = 1
    weights: str | None = None
    """The user's name for the format of its matrices; None where nothing is quantised."""
    first_kv_head: int = 0
    """The number of its first KV head in the model. On one GPU of several it may be above 0."""
    ranks: tuple[Graph, ...] = ()
    """The graph of each GPU, where several share the step."""

    def of(self, block: Block) -> Graph:
        """The graph with the heads of one of its layers; itself for a block without attention."""
        params: Mapping[str, Any] = next((op.params for op in block.ops if op.kind is _ATTENTION), {})
        n_kv_heads, head_dim = params.get("n_kv_heads", self.n_kv_heads), params.get("head_dim", self.head_dim)
        alike = (self.n_kv_heads, self.head_dim) == (n_kv_heads, head_dim)
        return self if alike else replace(self, n_kv_heads=n_kv_heads, head_dim=head_dim)

    @property
    def n_layers(self) -> int:
        """Number of layers."""
        return len(self.order)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Prologue, each kind of layer, and epilogue."""
        return self.prologue, *self.kinds, self.epilogue

    @property
    def named_blocks(self) -> tuple[tuple[str, Block], ...]:
        """The block of the prologue, of each layer and of the epilogue, after the start of its tensors' names."""
        layers = [(f"L{index}.", self.kinds[kind]) for index, kind in enumerate(self.order)]
        return ("", self.prologue), *layers, ("", self.epilogue)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def most_attended(self) -> int:
        """The most positions to which a layer attends."""
        ops = [op for block in self.kinds for op in block.ops]
        return max(int(op.params["kv_len"]) for op in ops if op.kind is _ATTENTION)

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the units that attend independently: the KV heads of each row."""
        return stream_names(self.n_kv_heads, self.batch, self.first_kv_head)

    @property
    def cache_streams(self) -> tuple[str, ...]:
        """The name of each stream's cache: rows of one sequence share them."""
        if self.lanes == 1:
            return self.streams
        names, heads = stream_names(self.n_kv_heads, self.batch // self.lanes, self.first_kv_head), self.n_kv_heads
        rows = [names[row // self.lanes * heads :][:heads] for row in range(self.batch)]
        return tuple([name for row in rows for name in row])


def cycle_of(order: Sequence[int]) -> tuple[int, int]:
    """(lead, period): behind the first `lead` kinds, each equals the one `period` places before. Of all such pairs, the
    one with the least sum.

    `order` must not be empty.
    """
    best = 0, len(order)
    for period in range(1, len(order)):
        if period >= sum(best):
            break
        unlike = [place for place in range(len(order) - period) if order[place] != order[place + period]]
        best = min(best, (unlike[-1] + 1 if unlike else 0, period), key=sum)
    return best


@lru_cache(maxsize=64)
def stream_names(n_kv_heads: int, batch: int, first: int = 0) -> tuple[str, ...]:
    """`h0`, `h1`.. for one sequence, `r0.h0`, `r0.h1`.. for several, from KV head `first` on."""
    heads = [f"h{head}" for head in range(first, first + n_kv_heads)]
    return tuple(heads if batch == 1 else [f"r{row}.{head}" for row in range(batch) for head in heads])
