"""Programs of several GPUs: the work of all GPUs in one list, with names that say whose a thing is.

`NAME@RANK` belongs to GPU RANK. In a program of one GPU, names have no such ending. Source: docs/ir.md, "Ranks".
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import Run, ScheduleConfig
from flywheel.ir.compressed import Layers
from flywheel.lowering.emit.scope import Scope, TileSet
from flywheel.lowering.placement import dealt, overridden, policy_of
from flywheel.models.graph import Graph, Tensor

FOLLOWING: Final = (".push", "_sum")
"""Endings of the names of pushes and sums."""

def graphs_of(graph: Graph, config: ScheduleConfig) -> tuple[Graph, ...]:
    """The graphs of all GPUs. Raises ConfigError."""
    asked = config.tiling.get("exchange", {})
    if asked and not graph.ranks:
        raise ConfigError("tiling.exchange: one GPU exchanges nothing")
    bits = asked.get("bits", 16)
    if bits != 16:
        why = "summands have the step's type since 2026-11-28; say 16, or leave it out"
        raise ConfigError(f"tiling.exchange.bits={bits}: {why}")
    return graph.ranks or (graph,)


@dataclass(frozen=True, slots=True)
class Names:
    """The tensors in sight of one block, on all GPUs."""

    scopes: Sequence[Scope]

    def tensor(self, name: str) -> Tensor:
        """The tensor of a name; with an ending `@RANK`, that GPU's."""
        local, _, rank = name.partition("@")
        return self.scopes[int(rank or 0)].tensor(local)

    def rank(self, name: str) -> int:
        """The rank of the GPU that a name belongs to."""
        return int(name.partition("@")[2] or 0)

    def all_of(self, name: str) -> list[str]:
        """The name on every GPU."""
        return [name] if len(self.scopes) == 1 else [f"{name}@{rank}" for rank in range(len(self.scopes))]


def joined(by_rank: Sequence[Sequence[TileSet]]) -> list[TileSet]:
    """The sets of one block of all GPUs, in topological order.

    Each GPU's sets go on until one needs data that another GPU has yet to push.
    """
    if len(by_rank) == 1:
        return list(by_rank[0])
    queues = [[_named(each, rank) for each in sets] for rank, sets in enumerate(by_rank)]
    pushes = Counter([name for sets in queues for each in sets if each.pushes for name in each.outputs])
    left, result = [list(reversed(sets)) for sets in queues], list[TileSet]()
    while any(left):
        before = len(result)
        for sets in left:
            while sets and (sets[-1].pushes or not any(pushes[name] for name in sets[-1].inputs)):
                result.append(sets.pop())
                pushes.subtract(result[-1].outputs if result[-1].pushes else ())
        assert len(result) > before, "GPUs that wait for each other's pushes"
    return result


def _named(each: TileSet, rank: int) -> TileSet:
    def name(text: str) -> str:
        return text if "@" in text else f"{text}@{rank}"

    return replace(
        each,
        stage=name(each.stage),
        inputs=tuple(map(name, each.inputs)),
        outputs=tuple(map(name, each.outputs)),
        signal=name(each.signal),
        rank=rank,
    )


def place_ranks(
    runs: Sequence[Run],
    stages: Sequence[str],
    num_sms: int,
    assignment: str | Mapping[int, int],
    layers: Layers,
    ranks: int,
) -> array[int]:
    """The SM of every task, on its GPU. Raises ConfigError as `place`.

    A task that pushes or adds a product's columns gets the SM of the product's tile.
    """
    policy = policy_of(assignment)
    start, stop, times = layers.runs.start, layers.runs.stop, layers.times
    leaders = _leaders(runs)
    hands = []
    for rank in range(ranks):
        own = [index for index, run in enumerate(runs) if run.rank == rank and leaders[index] is None]
        template = sum(index < start for index in own), sum(index < stop for index in own), times
        hands.append(
            iter(dealt([runs[index] for index in own], [stages[index] for index in own], num_sms, policy, template))
        )
    sms = array("q")
    places: dict[int, array[int]] = {}
    for index in [*range(start), *list(range(start, stop)) * times, *range(stop, len(runs))]:
        leader = leaders[index]
        if leader is None:
            places[index] = array("q", islice(hands[runs[index].rank], len(runs[index].tiles)))
        else:
            places[index] = places[leader]
        sms.extend(places[index])
    return sms if isinstance(assignment, str) else overridden(sms, assignment, num_sms)


def _leaders(runs: Sequence[Run]) -> list[int | None]:
    """For each run that pushes or adds, the run on its GPU that makes the columns in as many tiles; None for other
    runs."""

    def alike(one: Run, other: Run) -> bool:
        return len(one.tiles) == len(other.tiles)

    made: dict[tuple[int, int], int] = {}
    leaders: list[int | None] = []
    for index, run in enumerate(runs):
        leader = None
        if run.label.endswith(FOLLOWING):
            found = [made.get((number, run.rank)) for number in run.inputs]
            leader = next((each for each in found if each is not None and alike(runs[each], run)), None)
        leaders.append(leader)
        for number in run.outputs:
            made[number, run.rank] = index if leader is None else leader
    return leaders
