"""Damaged graphs against a judge that shares no code with the proof: closure over tasks, and bytes one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from flywheel.interop.mpk.graph import BEGIN_TASK, END, FIRST_TASK, INVALID, MpkEvent, MpkGraph, MpkTask, Tensor
from flywheel.interop.mpk.proof import check

ATTENTION = 153
BYTES = {941: 2, 965: 8}
MUTATIONS = 700


def addresses(tensor: Tensor) -> int:
    """The bytes of a piece, each a bit."""
    starts = [tensor.offset]
    for size, step in zip(tensor.dims, tensor.strides, strict=True):
        starts = [start + place * step * BYTES[tensor.data_type] for start in starts for place in range(size)]
    mask = 0
    for start in starts:
        mask |= ((1 << BYTES[tensor.data_type]) - 1) << start
    return mask


class Judge:
    """Says whether two iterations of a graph of one rank, prelaunched, end and are free of races."""

    def __init__(self) -> None:
        self._masks: dict[Tensor, int] = {}

    def accepts(self, graph: MpkGraph) -> bool:
        tasks = graph.tasks[FIRST_TASK:]
        triggered = [
            [place for place, task in enumerate(tasks) if task.trigger == number] for number in range(len(graph.events))
        ]
        end = next(number for number, event in enumerate(graph.events) if event.kind == END)
        wanted = {task.dependent for task in tasks if task.dependent != INVALID} | {end}
        if any(number >= len(graph.events) for number in wanted):
            return False
        for number in wanted:
            count = len(triggered[number]) + (graph.tasks[BEGIN_TASK].trigger == number)
            if count != graph.events[number].triggers:
                return False
        earlier = self._earlier(tasks, triggered, end)
        return earlier is not None and not self._races(tasks, earlier)

    def _earlier(self, tasks: Sequence[MpkTask], triggered: Sequence[Sequence[int]], end: int) -> list[int] | None:
        """All that is done before each task of two iterations, as bits; None where the list itself would block."""
        n, found = len(tasks), [0] * (2 * len(tasks))
        for turn in range(2):
            for place, task in enumerate(tasks):
                ahead = [turn * n + other for other in triggered[task.dependent]] if task.dependent != INVALID else []
                if any(other >= turn * n + place for other in ahead):
                    return None
                ahead += list(triggered[end]) if turn else []
                for other in ahead:
                    found[turn * n + place] |= found[other] | 1 << other
        return found

    def _races(self, tasks: Sequence[MpkTask], earlier: Sequence[int]) -> bool:
        touched: dict[str, list[tuple[int, int, bool, int | None]]] = {}
        for place, task in enumerate((*tasks, *tasks)):
            for number, tensor in enumerate(task.inputs):
                hidden = task.kind == ATTENTION and number in (1, 2)
                part = task.metadata[0] if hidden else None
                touched.setdefault(tensor.name, []).append((place, self._mask(tensor), hidden, part))
            for tensor in task.outputs:
                part = task.metadata[0] if task.kind == ATTENTION else None
                touched.setdefault(tensor.name, []).append((place, self._mask(tensor), True, part))
        return any(
            first[0] < second[0]
            and not earlier[second[0]] >> first[0] & 1
            and first[1] & second[1] != 0
            and (first[3] is None or second[3] is None or first[3] == second[3])
            for uses in touched.values()
            for first in uses
            for second in uses
            if first[2] or second[2]
        )

    def _mask(self, tensor: Tensor) -> int:
        if tensor not in self._masks:
            self._masks[tensor] = addresses(tensor)
        return self._masks[tensor]


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


def test_seven_hundred_damaged_graphs_are_judged_as_by_brute_force(graph: Callable[..., MpkGraph]) -> None:
    whole = graph("micro_2layer")
    judge, generator = Judge(), random.Random(7)
    assert judge.accepts(whole) and check([whole]).ok
    harmless = 0
    for number in range(MUTATIONS):
        damaged = _mutated(whole, generator)
        for _ in range(generator.randrange(2)):
            damaged = _mutated(damaged, generator)
        result = check([damaged])
        assert result.ok == judge.accepts(damaged), f"mutation {number}: {result.report()}"
        harmless += result.ok
    assert 20 < harmless < MUTATIONS // 2
