"""Damaged graphs against a judge that shares no code with the proof."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from effort import examples
from mpk_judge import Judge

from flywheel.interop.mpk.graph import EMPTY, FIRST_TASK, INVALID, NVSHMEM_TAG, MpkEvent, MpkGraph, place_of, rank_of
from flywheel.interop.mpk.proof import check
from flywheel.interop.mpk.repairing import repair

MUTATIONS = examples(700)

Damage = Callable[[random.Random], Sequence[MpkGraph]]


def _retargeted(graph: MpkGraph, place: int, **fields: object) -> MpkGraph:
    tasks = list(graph.tasks)
    tasks[place] = replace(tasks[place], **fields)  # type: ignore[arg-type]  # names of fields of a task
    return replace(graph, tasks=tasks)


def _moved_trigger(graph: MpkGraph, place: int, number: int) -> MpkGraph:
    """Task `place` signals another event, and both events need as many signals as they get."""
    events = list(graph.events)
    for event, change in ((graph.tasks[place].trigger, -1), (number, 1)):
        events[event] = MpkEvent(
            events[event].kind, events[event].triggers + change, events[event].first, events[event].last
        )
    return replace(_retargeted(graph, place, trigger=number), events=events)


def _mutated(graph: MpkGraph, generator: random.Random) -> MpkGraph:
    place = generator.randrange(FIRST_TASK, len(graph.tasks))
    task = graph.tasks[place]
    number = generator.randrange(2, len(graph.events))
    kind = generator.randrange(9)
    if kind == 0:
        return _retargeted(graph, place, dependent=INVALID)
    if kind == 1:
        return _retargeted(graph, place, dependent=generator.choice([number, max(2, min(number, task.dependent - 1))]))
    if kind == 2:
        return _moved_trigger(graph, place, generator.choice([number, max(2, task.trigger - 1)]))
    if kind == 3:
        event = graph.events[number]
        events = list(graph.events)
        events[number] = replace(event, triggers=event.triggers + generator.choice([-1, 1]))
        return replace(graph, events=events)
    if kind == 4:
        other = min(max(FIRST_TASK, place + generator.choice([-20, -3, -1, 1, 3, 20])), len(graph.tasks) - 1)
        tasks = list(graph.tasks)
        tasks[place], tasks[other] = tasks[other], tasks[place]
        return replace(graph, tasks=tasks)
    outputs = list(task.outputs)
    tensor = outputs[0]
    if kind == 5:
        outputs[0] = replace(tensor, offset=max(0, tensor.offset + generator.choice([-64, -2, 2, 32, 64])))
    elif kind == 6:
        outputs[0] = replace(tensor, dims=(*tensor.dims[:-1], tensor.dims[-1] + generator.choice([-1, 1, 16])))
    elif kind == 7:
        names = sorted({each.name for other in graph.tasks for each in other.outputs})
        outputs[0] = replace(tensor, name=generator.choice(names))
    else:
        tensors = [each for each in task.inputs if each.name.startswith(("mlp", "attn", "rms", "embed_out", "silu"))]
        names = ["mlp_out", "attn_out", "rmsnorm_out", "attn_in", "mlp_mid"]
        if tensors:
            changed = replace(tensors[0], name=generator.choice(names))
            return _retargeted(
                graph, place, inputs=tuple(changed if each is tensors[0] else each for each in task.inputs)
            )
    return _retargeted(graph, place, outputs=tuple(outputs))


def _judged(damage: Damage, count: int, generator: random.Random) -> int:
    """How many of so many damaged graphs are harmless, by the proof and by the judge alike."""
    judge, harmless = Judge(), 0
    for number in range(count):
        damaged = damage(generator)
        result = check(damaged)
        assert result.ok == judge.accepts(damaged), f"mutation {number}: {result.report()}"
        harmless += result.ok
    return harmless


def test_damaged_graphs_are_judged_as_by_brute_force(graph: Callable[..., MpkGraph]) -> None:
    whole = graph("micro_2layer")
    assert Judge().accepts([whole]) and check([whole]).ok

    def damage(generator: random.Random) -> Sequence[MpkGraph]:
        damaged = _mutated(whole, generator)
        for _ in range(generator.randrange(2)):
            damaged = _mutated(damaged, generator)
        return [damaged]

    assert MUTATIONS // 35 < _judged(damage, MUTATIONS, random.Random(7)) < MUTATIONS // 2


def _just_in_time(document: dict[str, Any]) -> None:
    """Each event launches what waits for it."""
    document["all_events"][1]["last_task_id"] = 3
    for event in document["all_events"][2:-1]:
        event["event_type"] = 901
    for task in document["all_tasks"]:
        task["dependent_event"] = INVALID


def _with_event(graph: MpkGraph, number: int, **fields: int) -> MpkGraph:
    events = list(graph.events)
    events[number] = replace(events[number], **fields)
    return replace(graph, events=events)


def _launched_otherwise(graph: MpkGraph, generator: random.Random) -> MpkGraph:
    """An event launches other tasks, or nothing; or a neighbour launches some of its tasks, at either end."""
    number = generator.randrange(1, len(graph.events) - 2)
    event, behind = graph.events[number], graph.events[number + 1]
    kind = generator.randrange(5)
    if kind == 0:
        return _with_event(graph, number, kind=EMPTY)
    if kind == 1:
        return _with_event(graph, number, last=event.last + generator.choice([-1, 1]))
    if kind == 2:
        return _retargeted(graph, generator.randrange(FIRST_TASK, len(graph.tasks)), dependent=number)
    border = generator.choice([-2, -1, 1, 2]) + event.last
    if event.last != behind.first or not event.first <= border <= behind.last:
        return graph if number == 1 else _with_event(graph, number, kind=902)
    return _with_event(_with_event(graph, number, last=border), number + 1, first=border)


def test_damaged_graphs_that_launch_just_in_time_are_judged_as_by_brute_force(
    graph: Callable[..., MpkGraph],
) -> None:
    whole = graph("micro_2layer", _just_in_time)
    assert Judge().accepts([whole]) and check([whole]).ok

    def damage(generator: random.Random) -> Sequence[MpkGraph]:
        damaged = whole
        for _ in range(generator.randrange(1, 3)):
            if generator.randrange(3):
                damaged = _launched_otherwise(damaged, generator)
            else:
                damaged = _mutated(damaged, generator)
        return [damaged]

    count = examples(400, 120)
    assert count // 12 < _judged(damage, count, random.Random(11)) < count // 2


def _damaged_ranks(graphs: Sequence[MpkGraph], generator: random.Random) -> list[MpkGraph]:
    """One task of one rank waits for, signals or touches something else, or an event needs another number."""
    ranks = list(graphs)
    at = generator.randrange(len(ranks))
    graph = ranks[at]
    place = generator.randrange(FIRST_TASK, len(graph.tasks))
    task, number = graph.tasks[place], generator.randrange(2, len(graph.events) - 1)
    kind = generator.randrange(6)
    if kind == 0:
        ranks[at] = _retargeted(graph, place, dependent=INVALID)
    elif kind == 1:
        near = max(2, min(len(graph.events) - 2, place_of(task.dependent) + generator.choice([-3, -1, 1, 3])))
        chosen = number if task.dependent == INVALID else generator.choice([number, near])
        ranks[at] = _retargeted(graph, place, dependent=generator.choice([0, NVSHMEM_TAG]) | graph.rank << 32 | chosen)
    elif kind == 2 and task.trigger != INVALID:
        target = next(n for n, other in enumerate(ranks) if other.rank == rank_of(task.trigger))
        old, new = place_of(task.trigger), number
        ranks[at] = _retargeted(graph, place, trigger=task.trigger - old + new)
        for event, change in ((old, -1), (new, 1)):
            triggers = ranks[target].events[event].triggers + change
            ranks[target] = _with_event(ranks[target], event, triggers=triggers)
    elif kind == 3:
        triggers = graph.events[number].triggers + generator.choice([-1, 1])
        ranks[at] = _with_event(graph, number, triggers=triggers)
    elif kind == 4:
        other = min(max(FIRST_TASK, place + generator.choice([-20, -3, -1, 1, 3, 20])), len(graph.tasks) - 1)
        tasks = list(graph.tasks)
        tasks[place], tasks[other] = tasks[other], tasks[place]
        ranks[at] = replace(graph, tasks=tasks)
    elif task.outputs:
        moved = replace(task.outputs[0], offset=max(0, task.outputs[0].offset + generator.choice([-64, -32, 32, 256])))
        ranks[at] = _retargeted(graph, place, outputs=(moved, *task.outputs[1:]))
    return ranks


def test_damaged_graphs_of_two_ranks_are_judged_as_by_brute_force(graph: Callable[..., MpkGraph]) -> None:
    racy = [graph("micro_2gpu_r0"), graph("micro_2gpu_r1")]
    whole = repair(racy, None, {}).graphs
    assert Judge().accepts(whole) and check(whole).ok
    assert not Judge().accepts(racy) and not check(racy).ok

    def damage(generator: random.Random) -> Sequence[MpkGraph]:
        damaged = _damaged_ranks(whole, generator)
        return damaged if generator.randrange(3) else _damaged_ranks(damaged, generator)

    count = examples(400, 60)
    assert count // 15 < _judged(damage, count, random.Random(13)) < count // 2
