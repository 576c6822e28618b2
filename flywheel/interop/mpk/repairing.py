"""Missing dependencies of a racy graph, added as relays: tasks that only wait for one event and signal another.

A task waits for one event and signals one event, so every further dependency needs a further task. A relay within a GPU
has the type BEGIN_TASK_GRAPH, for which MPK's workers do nothing. A relay to another GPU is a PUT into the slot of that
GPU's buffer that nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Final

from flywheel.interop.mpk.graph import (
    EMPTY,
    END,
    INVALID,
    MpkGraph,
    event_id,
    graph_of,
    is_remote,
    place_of,
    rank_of,
)
from flywheel.interop.mpk.joint import JointTask, counter_of, nodes_of
from flywheel.interop.mpk.kinds import BEGIN, PUTS
from flywheel.interop.mpk.proof import Races, check, races_of
from flywheel.ir.firing import fire
from flywheel.ir.validate.findings import ValidationResult
from flywheel.ir.validate.sweep import Clash

MAX_ROUNDS: Final = 16
"""Most kinds of races that `repair` mends, one after the other."""

_RACES: Final = frozenset(("race-read", "race-write"))


@dataclass(frozen=True, slots=True)
class Repair:
    """The graphs with the added dependencies, the number of added tasks, and the proof's verdict on the new graphs."""

    graphs: Sequence[MpkGraph]
    relays: int
    result: ValidationResult


@dataclass(frozen=True, slots=True)
class _Relay:
    """An edge: when the event `source` of a rank is met, or where that is None the task `after` done, signal `target`.

    To another rank it puts a piece of `tensor`, which the first of the two tasks read: it is not written before the
    second is done. Without a `target`, the task `waiter`, which waited for nothing, waits for the source itself.
    """

    rank: int
    source: int | None
    after: int | None
    target_rank: int
    target: int | None
    tensor: str = ""
    waiter: int | None = None


def repair(graphs: Sequence[MpkGraph], workers: int | None, aliases: Mapping[str, str]) -> Repair:
    """Order the races of the graphs of all ranks, one kind after the other, each with as few added tasks as possible.

    Other faults stay, and so do races that no relay can order; the verdict lists them.
    """
    graphs = sorted(graphs, key=lambda graph: graph.rank)
    relays = 0
    for _ in range(MAX_ROUNDS):
        result = check(graphs, workers, aliases)
        if result.ok or not {error.code for error in result.errors} <= _RACES:
            return Repair(graphs, relays, result)
        plan = _plan(graphs, races_of(graphs, workers, aliases))
        if not plan:
            return Repair(graphs, relays, result)
        graphs, added = _with_relays(graphs, plan)
        relays += added
    return Repair(graphs, relays, check(graphs, workers, aliases))


def _plan(graphs: Sequence[MpkGraph], races: Races) -> list[_Relay]:
    """The relays that order all clashes of the first kind."""
    nodes, late = races.joint.nodes, frozenset(index for index, _ in races.late)
    search = _Search({graph.rank: graph for graph in graphs}, races, _signalling(graphs))
    kinds: dict[tuple[str, str, bool, int], dict[tuple[int, ...], tuple[int, int]]] = {}
    for clash in races.clashes:
        first, second = _ordered(clash, late)
        alike = nodes[first].out_counter, races.before.wait_class[first], races.before.wait_class[second]
        kinds.setdefault(_kind_of(nodes, clash), {}).setdefault((*alike, nodes[second].rank), (first, second))
    for pairs in kinds.values():
        options = [search.options(first, second) for first, second in pairs.values()]
        if all(options):
            depths = range(max(map(len, options)))
            plans = [list(dict.fromkeys(option[min(depth, len(option) - 1)] for option in options)) for depth in depths]
            return min(plans, key=len)
    return []


def _kind_of(nodes: Sequence[JointTask], clash: Clash) -> tuple[str, str, bool, int]:
    first, second = nodes[clash.first], nodes[clash.second]
    return first.label, second.label, first.rank == second.rank, second.turn - first.turn


def _ordered(clash: Clash, late: frozenset[int]) -> tuple[int, int]:
    """The nodes of a clash in the list's order; but a write comes before a read that no other write precedes."""
    turned = clash.first in late and not clash.first_writes and clash.second_writes
    return (clash.second, clash.first) if turned else (clash.first, clash.second)


def _signalling(graphs: Sequence[MpkGraph]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Rank and dependent event of the tasks that signal each event, by rank and position."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for graph in graphs:
        for task in graph.tasks:
            if task.trigger != INVALID:
                event = rank_of(task.trigger), place_of(task.trigger)
                found.setdefault(event, []).append((graph.rank, task.dependent))
    return found


@dataclass(frozen=True, slots=True)
class _Search:
    graphs: Mapping[int, MpkGraph]
    races: Races
    signalling: Mapping[tuple[int, int], Sequence[tuple[int, int]]]

    def options(self, before: int, behind: int) -> list[_Relay]:
        """Relays that order one node behind another; the relay that signals nearest to that node comes first."""
        first, second = self.races.joint.nodes[before], self.races.joint.nodes[behind]
        graph, target = self.graphs[first.rank], self.graphs[second.rank]
        task = graph.tasks[first.place]
        if task.trigger != INVALID and is_remote(task.trigger):
            return []
        source = None if task.trigger == INVALID else place_of(task.trigger)
        if source is not None and graph.events[source].kind != EMPTY:
            source = None
        far = first.rank != second.rank
        if far and not _puts(graph, second.rank, task.inputs[0].name if task.inputs else ""):
            return []
        if not far and first.turn == second.turn and target.tasks[second.place].dependent == INVALID:
            after = None if source is not None else first.place
            return [_Relay(first.rank, source, after, second.rank, None, waiter=second.place)]
        group, found = self.races.before.wait_class[before], []
        for event in self._targets(first, second):
            counter = counter_of(second.rank, event, first.turn)
            if target.events[event].kind != EMPTY or self.races.before.reached((counter,), group):
                break
            name = task.inputs[0].name if far and task.inputs else ""
            after = None if source is not None else first.place
            found.append(_Relay(first.rank, source, after, second.rank, event, name))
        return found

    def _targets(self, first: JointTask, second: JointTask) -> list[int]:
        """The events that `second` comes after, nearest first. Of the iteration before, they are those that its end
        awaits."""
        target = self.graphs[second.rank]
        if second.turn > first.turn:
            end = next(place for place, event in enumerate(target.events) if event.kind == END)
            return self._ahead(second.rank, end)[1:]
        dependent = target.tasks[second.place].dependent
        return [] if dependent == INVALID else self._ahead(second.rank, place_of(dependent))

    def _ahead(self, rank: int, event: int) -> list[int]:
        """An event and, on one rank, the events that all of its signallers wait for, one after the other."""
        chain = [event]
        while True:
            signalling = self.signalling.get((rank, chain[-1]), ())
            awaited = {dependent for _, dependent in signalling}
            if {whose for whose, _ in signalling} != {rank} or len(awaited) != 1 or INVALID in awaited:
                return chain
            chain.append(place_of(awaited.pop()))


def _with_relays(graphs: Sequence[MpkGraph], plan: Sequence[_Relay]) -> tuple[list[MpkGraph], int]:
    documents = {graph.rank: deepcopy(dict(graph.document)) for graph in graphs}
    by_rank = {graph.rank: graph for graph in graphs}
    added: dict[int, list[tuple[int, dict[str, Any]]]] = {graph.rank: [] for graph in graphs}
    sources: dict[tuple[int, int], int] = {}
    for relay in plan:
        document, graph = documents[relay.rank], by_rank[relay.rank]
        source = relay.source
        if source is None:
            assert relay.after is not None
            key = relay.rank, relay.after
            if key not in sources:
                sources[key] = _new_event(document, relay, added[relay.rank])
            source = sources[key]
        if relay.target is None:
            assert relay.waiter is not None
            document["all_tasks"][relay.waiter]["dependent_event"] = event_id(relay.rank, source)
            continue
        documents[relay.target_rank]["all_events"][relay.target]["num_triggers"] += 1
        target = by_rank[relay.target_rank]
        remote = relay.rank != relay.target_rank
        made = _put(graph, relay) if remote else dict(document["all_tasks"][1])
        made["task_type"] = made["task_type"] if remote else BEGIN
        made["dependent_event"] = event_id(relay.rank, source)
        made["trigger_event"] = event_id(relay.target_rank, relay.target, remote)
        place = _last(graph, source) + 1 if remote else _first_waiter(target, relay.target)
        added[relay.rank].append((place, made))
    for graph in graphs:
        _insert(documents[graph.rank], added[graph.rank])
    made_graphs = [graph_of(documents[graph.rank], graph.layout) for graph in graphs]
    return _in_order(made_graphs), sum(map(len, added.values()))


def _new_event(document: dict[str, Any], relay: _Relay, added: list[tuple[int, dict[str, Any]]]) -> int:
    """An event that the task signals in place of its own, which a relay signals then. The last event stays the last."""
    assert relay.after is not None
    tasks, events = document["all_tasks"], document["all_events"]
    number = len(events) - 1
    events.insert(number, dict.fromkeys(events[0], 0) | {"event_type": EMPTY, "num_triggers": 1})
    for task in [*tasks, *(made for _, made in added)]:
        if task["trigger_event"] == event_id(relay.rank, number):
            task["trigger_event"] = event_id(relay.rank, number + 1)
    task = tasks[relay.after]
    if task["trigger_event"] != INVALID:
        passing = dict(tasks[1])
        passing["dependent_event"], passing["trigger_event"] = event_id(relay.rank, number), task["trigger_event"]
        added.append((relay.after + 1, passing))
    task["trigger_event"] = event_id(relay.rank, number)
    return number


def _put(graph: MpkGraph, relay: _Relay) -> dict[str, Any]:
    """A PUT of a tile that is this rank's own, into the slot there that nobody reads."""
    places = _puts(graph, relay.target_rank, relay.tensor)
    made: dict[str, Any] = deepcopy(graph.document["all_tasks"][places[graph.rank % len(places)]])
    output, tensor = made["outputs"][0], graph.tasks[places[0]].outputs[0]
    output["offset"] += (relay.target_rank - graph.rank) * tensor.strides[0] * tensor.item_bytes
    return made


def _puts(graph: MpkGraph, target: int, tensor: str) -> list[int]:
    """The PUTs of a tensor to a rank whose buffer has a slot for each rank."""
    return [
        place
        for place, task in enumerate(graph.tasks)
        if task.kind in PUTS
        and rank_of(task.trigger) == target
        and task.inputs[0].name == tensor
        and len(task.outputs[0].dims) == 3
    ]


def _last(graph: MpkGraph, event: int) -> int:
    return max(
        (place for place, task in enumerate(graph.tasks) if task.trigger == event_id(graph.rank, event)), default=1
    )


def _first_waiter(graph: MpkGraph, event: int) -> int:
    return next(
        place
        for place, task in enumerate(graph.tasks)
        if task.dependent != INVALID and place_of(task.dependent) == event
    )


def _insert(document: dict[str, Any], added: Sequence[tuple[int, dict[str, Any]]]) -> None:
    """Insert tasks in front of the positions that they name, and renumber every position behind them."""
    tasks = document["all_tasks"]
    places = [place for place, _ in added]
    ranked = sorted(
        [(place, 1, number, task) for number, (place, task) in enumerate([(p, t) for p, t in enumerate(tasks)])]
        + [(place, 0, number, task) for number, (place, task) in enumerate(added)],
        key=lambda item: item[:3],
    )
    document["all_tasks"] = [task for *_, task in ranked]
    document["first_tasks"] = [first + sum(place <= first for place in places) for first in document["first_tasks"]]
    for event in document["all_events"]:
        if event["last_task_id"]:
            event["first_task_id"] += sum(place < event["first_task_id"] for place in places)
            event["last_task_id"] += sum(place < event["last_task_id"] for place in places)
    begin = document["all_events"][place_of(document["all_tasks"][1]["trigger_event"])]
    begin["first_task_id"], begin["last_task_id"] = 2, len(document["all_tasks"])


def _in_order(graphs: Sequence[MpkGraph]) -> list[MpkGraph]:
    """The graphs with their lists in an order that any number of workers can run. A list that is in such an order, or
    that has none, stays as it is."""
    nodes = [node for graph in graphs for node in nodes_of(graph, 1)]
    if len(fire(nodes, serial=True)) == len(nodes):
        return list(graphs)
    order = fire(nodes, keys=[node.place for node in nodes])
    if len(order) < len(nodes):
        return list(graphs)
    made = []
    for graph in graphs:
        places = [nodes[index].place for index in order if nodes[index].rank == graph.rank]
        document = dict(graph.document)
        tasks = document["all_tasks"]
        document["all_tasks"] = [*tasks[:2], *(tasks[place] for place in places)]
        moved = {place: number + 2 for number, place in enumerate(places)}
        document["first_tasks"] = [moved.get(place, place) for place in document["first_tasks"]]
        made.append(graph_of(document, graph.layout))
    return made
