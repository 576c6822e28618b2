"""What a program asks of a machine, whatever the machine's constants: read once, priced many times (queues.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from flywheel.ir import BufferKind, InstructionKind, Runs, Task
from flywheel.plan import KernelVariant
from flywheel.plan.program import Plan

Ints = npt.NDArray[np.int64]
Marks = npt.NDArray[np.bool_]

STREAMED_KINDS: Final = frozenset({BufferKind.WEIGHT, BufferKind.KV_CACHE, BufferKind.CONST})
"""Inputs that `est_bytes` stands for; all others are activations, read when the task starts."""

_CLASSES: Final = MappingProxyType(
    {
        InstructionKind.GEMV_TILE.name: "products",
        InstructionKind.GEMM_TILE.name: "products",
        InstructionKind.RMSNORM.name: "norms",
        InstructionKind.LAYERNORM.name: "norms",
        InstructionKind.ATTENTION_TILE.name: "attentions",
        InstructionKind.ATTENTION_COMBINE.name: "merges",
    }
)
"""Operations that have a price of their own; all others are steps like any."""

_MERGES: Final = frozenset(name for name, kind in _CLASSES.items() if kind == "merges")
_COPY: Final = InstructionKind.COPY.name


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides the price of a task: bytes of weights streamed, of caches loaded while it waits, and of activations
    read when it starts, operations, and what its steps are.

    `flops` of products are those of one row: others ride in columns of the fragment that are multiplied anyway.
    `readers` tasks read the same at about the same time. `staged`: the task before it on its SM multiplied the same
    operand. `merged` counts heads of partials. `sliced`: it multiplies an input as it is, for which the variant's
    slices are priced. The packer cuts none where there are several rows or hand-offs go by counters; the price, to
    which the constants are fitted, counts those slices too.
    """

    streamed_bytes: int
    cached_bytes: int
    read_bytes: int
    flops: int
    readers: int
    staged: bool
    steps: int
    norms: int
    merged: int
    attends: bool
    sliced: bool


@dataclass(frozen=True, slots=True)
class Gates:
    """What tasks signal and await, by numbers: a gate is a pair (counter, threshold) that some task awaits.

    `signal` is the counter of each entry, `awaits` the number of the set of gates, in `gate_sets`, that it awaits.
    """

    signal: Ints
    awaits: Ints
    gate_sets: list[tuple[int, ...]]
    counter_gates: list[list[tuple[int, int]]]
    """Per counter: (gate, further signals that it takes after the one before), ascending."""
    by_data: Marks
    """Per gate: whether those who wait look at the data instead of the counter."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The queues of a program, one after the other: entry `i` of each column is one task, `first[sm]..first[sm + 1]`
    are the entries of an SM, and `stream_end` counts bytes from the start of the SM's stream."""

    variant: KernelVariant
    task_ids: list[int]
    first: Ints
    stream_end: Ints
    kinds: list[Kind]
    kind_of: Ints
    gates: Gates


def demand_of(plan: Plan) -> Demand:
    """What a planned program asks."""
    tasks, order = plan.program.tasks, plan.order
    node_of = plan.grouping.node_of[order]
    works = _works(plan)
    nbytes, flops = plan.grouping.est_bytes[order], plan.grouping.est_flops[order]
    attends = np.array([work.steps.attentions > 0 for work in works], np.bool_)
    ends = np.concatenate(([0], np.cumsum(np.where(attends[node_of], 0, nbytes))))
    kinds, kind_of = _kinds(works, node_of, nbytes, flops, _find_staged(works, node_of, plan.first))
    return Demand(
        variant=plan.variant,
        task_ids=order.tolist() if isinstance(tasks, Runs) else [tasks[place].id for place in order.tolist()],
        first=plan.first,
        stream_end=ends[1:] - np.repeat(ends[plan.first[:-1]], np.diff(plan.first)),
        kinds=kinds,
        kind_of=kind_of,
        gates=_gates(plan, node_of),
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """What a task does, counted: `merged` heads of partials, and products, which are all that multiply.

    `parts`: elements of inputs of which only a part is read, by their place. A copy of a part is where it is read from
    then on, and no step of its own.
    """

    products: int
    norms: int
    merged: int
    attentions: int
    others: int
    parts: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class _Work:
    """What the tasks of a node do: the first of them, its steps, the activations that it reads, and their bytes."""

    task: Task
    steps: _Steps
    read: tuple[int, ...]
    read_bytes: int


def _works(plan: Plan) -> list[_Work]:
    """By node."""
    buffers = [buffer for buffer in plan.program.buffers if buffer.kind not in STREAMED_KINDS]
    dtypes, sizes = {buffer.id: buffer.dtype for buffer in buffers}, {buffer.id: buffer.nbytes for buffer in buffers}
    recipes: dict[int, _Steps] = {}
    works = []
    for task in plan.grouping.firsts:
        recipe = id(task.params.get("recipe"))
        steps = recipes.get(recipe) if task.op is InstructionKind.FUSED else None
        if steps is None:
            steps = recipes[recipe] = _steps(task)
        read = tuple([number for number in task.inputs if number in sizes])
        nbytes = sum([sizes[number] for number in read])
        for place, numel in steps.parts.items():
            number = task.inputs[place]
            nbytes += dtypes[number].nbytes(numel) - sizes[number] if number in sizes else 0
        works.append(_Work(task, steps, read, 0 if task.op is InstructionKind.SAMPLE_ARGMAX else nbytes))
    return works


def _find_staged(works: Sequence[_Work], node_of: Ints, first: Ints) -> Marks:
    """Which entries multiply what the one before them on their SM did: the same activations, normed and merged
    alike."""
    numbers: dict[tuple[tuple[int, ...], int, int], int] = {}
    operands = []
    for work in works:
        made = work.read, work.steps.norms, work.steps.merged
        operands.append(numbers.setdefault(made, len(numbers)) if work.steps.products else -1)
    operand = np.array(operands, np.int64)[node_of]
    staged = np.zeros(len(operand), np.bool_)
    staged[1:] = (operand[1:] >= 0) & (operand[1:] == operand[:-1])
    staged[first[:-1][np.diff(first) > 0]] = False
    return staged


def _kinds(
    works: Sequence[_Work], node_of: Ints, nbytes: Ints, flops: Ints, staged: Marks
) -> tuple[list[Kind], Ints]:
    """(the kinds that there are, the number of the kind of each entry)."""
    numbers: dict[tuple[int, ...], int] = {}
    read = np.array([numbers.setdefault(work.read, len(numbers)) for work in works], np.int64)
    readers = np.bincount(read[node_of[~staged]], minlength=len(numbers))
    code = node_of
    for column in (nbytes, flops, staged):
        values, places = np.unique(column, return_inverse=True)
        code = code * len(values) + places
    _, examples, alike = np.unique(code, return_index=True, return_inverse=True)
    kinds: dict[Kind, int] = {}
    kind_of = []
    for entry in examples.tolist():
        node = node_of[entry]
        kind = _kind(works[node], int(nbytes[entry]), int(flops[entry]), bool(staged[entry]), int(readers[read[node]]))
        kind_of.append(kinds.setdefault(kind, len(kinds)))
    return list(kinds), np.array(kind_of, np.int64)[alike]


def _kind(work: _Work, nbytes: int, flops: int, staged: bool, readers: int) -> Kind:
    steps = work.steps
    return Kind(
        streamed_bytes=0 if steps.attentions else nbytes,
        cached_bytes=nbytes if steps.attentions else 0,
        read_bytes=work.read_bytes,
        flops=flops // (work.task.params.get("M_tile", 1) if steps.products else 1),
        readers=readers,
        staged=staged,
        steps=steps.others,
        norms=steps.norms,
        merged=steps.merged,
        attends=steps.attentions > 0,
        sliced=steps.products == 1 and not steps.norms and not steps.merged,
    )


def _steps(task: Task) -> _Steps:
    parts: dict[int, int] = {}
    if task.op is InstructionKind.FUSED:
        steps = task.params["recipe"]["steps"]
        listed = [(step["op"], len(step["args"]), step.get("params", {})) for step in steps if step["op"] != _COPY]
        copied = {step["args"][0]["in"]: step for step in steps if step["op"] == _COPY and "in" in step["args"][0]}
        whole = {each["in"] for step in steps if step["op"] != _COPY for each in step["args"] if "in" in each}
        parts = {place: prod(step["out_shape"]) for place, step in copied.items() if place not in whole}
    else:
        listed = [] if task.op is InstructionKind.NOP else [(task.op.name, len(task.inputs), task.params)]
    tally = Counter(_CLASSES.get(name, "others") for name, _, _ in listed)
    heads = task.params.get("n_heads", 1)
    merged = sum(params.get("n_heads", heads) * operands for name, operands, params in listed if name in _MERGES)
    return _Steps(tally["products"], tally["norms"], merged, tally["attentions"], tally["others"], parts)


def _gates(plan: Plan, node_of: Ints) -> Gates:
    """Counters, gates and their sets, numbered as the queues come to them."""
    nodes, seen = np.unique(node_of, return_index=True)
    firsts = [(node, plan.grouping.firsts[node]) for node in nodes[np.argsort(seen)].tolist()]
    counters: dict[int, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    sets: dict[tuple[int, ...], int] = {}
    awaits, signal = np.zeros((2, len(plan.grouping.firsts)), np.int64)
    for node, task in firsts:
        pairs = [(counters.setdefault(w.counter, len(counters)), w.threshold) for w in task.waits if w.threshold > 0]
        gates = tuple([numbers.setdefault(pair, len(numbers)) for pair in pairs])
        awaits[node] = sets.setdefault(gates, len(sets))
    for node, task in firsts:
        signal[node] = counters.setdefault(task.out_counter, len(counters))
    chains: list[list[tuple[int, int]]] = [[] for _ in counters]
    before = [0] * len(counters)
    for (counter, threshold), gate in sorted(numbers.items()):
        chains[counter].append((gate, threshold - before[counter]))
        before[counter] = threshold
    asked = {(counters[wait.counter], wait.threshold) for waits in plan.hand_offs.waits for wait in waits}
    by_data = np.array([pair not in asked for pair in numbers], np.bool_)
    return Gates(signal[node_of], awaits[node_of], list(sets), chains, by_data)
