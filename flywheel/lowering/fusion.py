"""Which operations run as one task: checks `fusion_grouping` against the patterns that the VM can fuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import ConfigError
from flywheel.models.graph import Block, Graph, Op

COMBINE: Final = "attn_combine"
"""The merge of split-KV partials. It belongs to the attention wherever the KV range is split."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A run of operations that can be fused: all of `anchors`, after any suffix of `before`, before any prefix of
    `after`. A layer may have fewer operations; the run then leaves them out."""

    before: tuple[str, ...]
    anchors: tuple[str, ...]
    after: tuple[str, ...] = ()

    def admits(self, group: frozenset[str], present: frozenset[str]) -> bool:
        """Whether `group` is such a run, in a model with the operations `present`."""
        before, anchors = ([name for name in names if name in present] for names in (self.before, self.anchors))
        heads = [frozenset(before[start:]) for start in range(len(before) + 1)]
        tails = [frozenset(self.after[:end]) for end in range(len(self.after) + 1)]
        return bool(anchors) and any(group == head.union(anchors, tail) for head in heads for tail in tails)


PATTERNS: Final = {
    "qkv": Pattern(("attn_norm",), ("q_proj", "k_proj", "v_proj")),
    "append": Pattern(("k_norm", "k_rope"), ("k_append", "v_append")),
    "attention": Pattern(("q_norm", "q_rope"), ("attention",)),
    "append+attention": Pattern(
        ("q_norm", "k_norm", "q_rope", "k_rope"), ("q_rope", "k_rope", "k_append", "v_append", "attention")
    ),
    "out": Pattern((COMBINE,), ("o_proj",), ("attn_add",)),
    "mlp_in": Pattern(("mlp_norm",), ("gate_proj", "up_proj"), ("silu_mul",)),
    "down": Pattern((), ("down_proj",), ("mlp_add",)),
    "head": Pattern(("final_norm",), ("lm_head",)),
}
"""Every run that can be fused. With several KV blocks, `append+attention` has one task for the new row and others for
the past."""


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
        own = {op.name for block in graph.blocks for op in block.ops} | {COMBINE}
        grouping = [left for names in grouping if (left := [name for name in names if name in own])]
    blocks = graph.blocks
    if graph.lanes > 1:
        grouping = [each for names in grouping for each in _apart(names)]
    present = frozenset(op.name for block in blocks for op in block.ops) | {COMBINE}
    owner: dict[str, int] = {}
    for index, names in enumerate(grouping):
        where = f"fusion_grouping[{index}]"
        for name in names:
            if name not in present:
                raise ConfigError(f"{where}: {graph.model} has no operation {name!r}")
            if name in owner:
                raise ConfigError(f"{where}: {name!r} is already in fusion_grouping[{owner[name]}]")
            owner[name] = index
        for among in (present, *[frozenset(op.name for op in block.ops) | {COMBINE} for block in blocks]):
            group = among.intersection(names)
            if len(group) > 1 and not any(pattern.admits(group, among) for pattern in PATTERNS.values()):
                raise ConfigError(f"{where}: no kernel fuses {', '.join(names)}; see docs/ir.md for the runs that fuse")
    return [_groups(block, grouping, owner) for block in blocks]


def _apart(names: Sequence[str]) -> list[list[str]]:
    """A group that appends and attends, in two: what attends to the rows of several lanes comes after all appends."""
    attends = [name for name in names if name in ("q_norm", "q_rope", "attention")]
    appends = [name for name in names if name not in attends]
    return [appends, attends] if "attention" in attends and "k_append" in appends else [list(names)]


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
