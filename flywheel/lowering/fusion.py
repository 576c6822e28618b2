"""Which operations run as one task: checks `fusion_grouping` against the patterns that the VM can fuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import InstructionKind
from flywheel.ir.operations import GATES
from flywheel.models.graph import Block, Graph, Op

_K = InstructionKind

COMBINE: Final = "attn_combine"
"""The merge of split-KV partials. It belongs to the attention wherever the KV range is split."""

_AFTER: Final = {1: frozenset({_K.ADD, _K.GELU_MUL}), 2: GATES}
"""Number of products of one vector -> the operations on their results that they fuse with."""

_NORMS: Final = (_K.RMSNORM, _K.LAYERNORM)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A run of operations that can be fused: all of `anchors`, after any suffix of `before`, before any prefix of
    `after`."""

    before: tuple[str, ...]
    anchors: tuple[str, ...]
    after: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All operations that it may have."""
        return (*self.before, *self.anchors, *self.after)

    def admits(self, group: frozenset[str]) -> bool:
        """Whether `group` is such a run."""
        heads = [frozenset(self.before[start:]) for start in range(len(self.before) + 1)]
        tails = [frozenset(self.after[:end]) for end in range(len(self.after) + 1)]
        return any(group == head.union(self.anchors, tail) for head in heads for tail in tails)


def patterns_of(graph: Graph, block: Block) -> tuple[Pattern, ...]:
    """Every run of a block's operations that can be fused.

    They are products of one vector, with the norm that makes it or the merge of partials, and with SwiGLU or the
    residual; and appends, the attention, or both, with what makes each head's rows. With several KV blocks, a run that
    appends and attends has one task for the new row and others for the past.
    """
    graph = graph.of(block)
    makers = {op.output: op for op in block.ops if op.kind is not _K.KV_APPEND}
    readers: dict[str, list[Op]] = {name: [] for name in makers}
    products: dict[str, list[Op]] = {}
    for op in block.ops:
        for name in dict.fromkeys(op.inputs):
            if name in readers:
                readers[name].append(op)
        if op.kind is _K.GEMV_TILE:
            products.setdefault(op.inputs[0], []).append(op)
    found = []
    for source, run in products.items():
        maker, before, after = makers.get(source), list[str](), list[str]()
        if maker is not None and maker.kind is _K.ATTENTION_TILE:
            before = [COMBINE]
        elif maker is not None and maker.kind in _NORMS and readers[source] == run:
            before = [maker.name]
        joins = [readers[op.output] for op in run]
        alike = len(joins[0]) == 1 and all(each == joins[0] for each in joins)
        if alike and joins[0][0].kind in _AFTER.get(len(run), ()) and len(joins[0][0].inputs) < 3:
            after = [joins[0][0].name]
        found.append(Pattern(tuple(before), tuple([op.name for op in run]), tuple(after)))
    for attention in [op for op in block.ops if op.kind is _K.ATTENTION_TILE]:
        found += _attending(graph, block, attention, makers)
    return tuple(found)


def _attending(graph: Graph, block: Block, attention: Op, makers: Mapping[str, Op]) -> list[Pattern]:
    """The runs with an attention, the appends to its caches, or both."""
    appends = [op for op in block.ops if op.kind is _K.KV_APPEND and op.output in attention.inputs]
    query = [op.name for op in headwise(graph, makers, attention.inputs[0])]
    rows = [op.name for append in appends for op in headwise(graph, makers, append.inputs[0])]
    names = [op.name for op in block.ops if op.name in query or op.name in rows]
    norms = [op.name for op in block.ops if op.kind is _K.RMSNORM and op.name in names]
    appending = tuple([op.name for op in appends])
    return [
        Pattern(tuple(rows), appending),
        Pattern(tuple(query), (attention.name,)),
        Pattern(tuple(norms), (*[name for name in names if name not in norms], *appending, attention.name)),
    ]


def headwise(graph: Graph, makers: Mapping[str, Op], name: str) -> list[Op]:
    """The operations that make `name` head by head, first to last: norms of single heads, and RoPE."""
    op = makers.get(name)
    if op is None or not (op.kind is _K.ROPE or (op.kind is _K.RMSNORM and op.params["hidden"] == graph.head_dim)):
        return []
    return [*headwise(graph, makers, op.inputs[0]), op]


@dataclass(frozen=True, slots=True)
class Group:
    """Operations that become one kind of task, in execution order. `merges` says whether split-KV partials merge in
    them."""

    ops: tuple[Op, ...]
    merges: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The operations' names."""
        return tuple(op.name for op in self.ops)


def plan_fusion(
    graph: Graph, grouping: Sequence[Sequence[str]], first: Graph | None = None
) -> list[list[Group]]:
    """The groups of each of the graph's blocks, in execution order. An operation without a group
    stands alone.

    `first` is the graph of the first GPU, which alone adds the residual. On another GPU, groups leave out operations
    that it does not have. Raises ConfigError for unknown or repeated names, and for runs that match no pattern.
    """
    if first is not None and graph is not first:
        there = {op.name for block in graph.blocks for op in block.ops} | {COMBINE}
        grouping = [left for names in grouping if (left := [name for name in names if name in there])]
    blocks = graph.blocks
    if graph.lanes > 1:
        grouping = [each for names in grouping for each in _apart(graph, names)]
    own = [frozenset([op.name for op in block.ops]) | {COMBINE} for block in blocks]
    patterns = [patterns_of(graph, block) for block in blocks]
    owner: dict[str, int] = {}
    for index, names in enumerate(grouping):
        where = f"fusion_grouping[{index}]"
        for name in names:
            if not any(name in each for each in own):
                raise ConfigError(f"{where}: {graph.model} has no operation {name!r}")
            if name in owner:
                raise ConfigError(f"{where}: {name!r} is already in fusion_grouping[{owner[name]}]")
            owner[name] = index
        parts = [each.intersection(names) for each in own]
        fits = all(len(part) < 2 or any(pattern.admits(part) for pattern in its)
                   for part, its in zip(parts, patterns, strict=True))  # fmt: skip
        if not (fits and len(set(names)) == max(map(len, parts))):
            raise ConfigError(f"{where}: no kernel fuses {', '.join(names)}; see docs/ir.md for the runs that fuse")
    return [_groups(block, grouping, owner) for block in blocks]


def _apart(graph: Graph, names: Sequence[str]) -> list[list[str]]:
    """A group that appends and attends, in two: what attends to the rows of several lanes comes after all appends."""
    kinds = {op.name: op.kind for block in graph.kinds for op in block.ops}
    if not {_K.KV_APPEND, _K.ATTENTION_TILE} <= {kinds.get(name) for name in names}:
        return [list(names)]
    query = {name for block in graph.kinds for name in _query_of(graph.of(block), block)}
    return [[name for name in names if name not in query], [name for name in names if name in query]]


def _query_of(graph: Graph, block: Block) -> list[str]:
    """The names of a block's attentions, and of what makes their queries head by head."""
    makers = {op.output: op for op in block.ops}
    attentions = [op for op in block.ops if op.kind is _K.ATTENTION_TILE]
    return [each.name for op in attentions for each in (op, *headwise(graph, makers, op.inputs[0]))]


def _groups(block: Block, grouping: Sequence[Sequence[str]], owner: dict[str, int]) -> list[Group]:
    """The groups, each at the place of its last operation. A group leaves out operations that the block does not
    have."""
    own = {op.name for op in block.ops}
    left = {index: len(own.intersection(names)) for index, names in enumerate(grouping)}
    members: dict[int, list[Op]] = {}
    groups = []
    for op in block.ops:
        index = owner.get(op.name)
        if index is None:
            groups.append(Group((op,)))
            continue
        members.setdefault(index, []).append(op)
        if len(members[index]) == left[index]:
            groups.append(Group(tuple(members[index]), COMBINE in grouping[index]))
    return groups
