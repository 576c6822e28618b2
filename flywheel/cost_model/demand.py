"""What a program asks of a machine, whatever the machine's constants: read once, priced many times (queues.py)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import Buffer, BufferKind, InstructionKind, MegakernelProgram, Task
from flywheel.ir.access import appends_behind
from flywheel.plan import KernelVariant, variant_of

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
    operand. `merged` counts heads of partials.
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
class Demand:
    """The queues of a program, one after the other: entry `i` of each list is one task, `first[sm]..first[sm + 1]` are
    the entries of an SM. The other columns are those of `Queues`."""

    variant: KernelVariant
    task_ids: list[int]
    labels: list[str]
    first: list[int]
    stream_end: list[int]
    kinds: list[Kind]
    kind_of: list[int]
    signal: list[int]
    awaits: list[int]
    gate_sets: list[tuple[int, ...]]
    counter_gates: list[list[tuple[int, int]]]
    by_data: list[bool]
    """Per gate: whether those who wait look at the data instead of the counter."""


def demand_of(program: MegakernelProgram) -> Demand:
    """What `program`, a valid one, asks. Raises ConfigError where it has no target or no SM for a task."""
    variant = variant_of(program)
    assert program.target is not None
    by_sm = _by_sm(program.tasks, program.target.num_sms)
    ordered = [task for queue in by_sm for task in queue]
    kinds, kind_of = _kinds(program, by_sm)
    entries = iter(kind_of)
    ends = [end for queue in by_sm for end in accumulate([kinds[next(entries)].streamed_bytes for _ in queue])]
    signal, awaits, gate_sets, counter_gates, asked = _gates(ordered)
    return Demand(
        variant=variant,
        task_ids=[task.id for task in ordered],
        labels=[task.label for task in ordered],
        first=[0, *accumulate(map(len, by_sm))],
        stream_end=ends,
        kinds=kinds,
        kind_of=kind_of,
        signal=signal,
        awaits=awaits,
        gate_sets=gate_sets,
        counter_gates=counter_gates,
        by_data=_by_data(program, variant, ordered, signal, [gate_sets[number] for number in awaits], asked),
    )


def _by_sm(tasks: Sequence[Task], num_sms: int) -> list[list[Task]]:
    queues: list[list[Task]] = [[] for _ in range(num_sms)]
    for task in tasks:
        sm = task.sm
        if sm is None or not 0 <= sm < num_sms:
            raise ConfigError(f"task {task.id} ({task.label}): sm={sm} is not in 0..{num_sms - 1}")
        queues[sm].append(task)
    return queues


_Operand = tuple[tuple[int, ...], int, int]
"""What decides the vector that is multiplied: the activations it is made of, and norms and merges on the way."""


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


def _kinds(program: MegakernelProgram, by_sm: Sequence[Sequence[Task]]) -> tuple[list[Kind], list[int]]:
    """(the kinds that there are, the number of the kind of each task)."""
    activations = {buffer.id: buffer for buffer in program.buffers if buffer.kind not in STREAMED_KINDS}
    recipes: dict[int, _Steps] = {}
    # Tasks that were cut from one operation share their inputs and their recipe.
    known: dict[tuple[int, int, int, int, int], _Entry] = {}
    entries: list[_Entry] = []
    staged: list[bool] = []
    readers = Counter[tuple[int, ...]]()
    for queue in by_sm:
        before: _Operand | None = None
        for task in queue:
            recipe = id(task.params.get("recipe"))
            key = (recipe, task.est_bytes, task.est_flops, id(task.inputs), task.op)
            entry = known.get(key)
            if entry is None:
                steps = recipes.get(recipe) if task.op is InstructionKind.FUSED else None
                if steps is None:
                    steps = recipes[recipe] = _steps(task)
                read = tuple(buffer for buffer in task.inputs if buffer in activations)
                operand = (read, steps.norms, steps.merged) if steps.products else None
                entry = known[key] = _Entry(task, steps, read, operand)
            again = entry.operand is not None and entry.operand == before
            if not again:
                readers[entry.read] += 1
            entries.append(entry)
            staged.append(again)
            before = entry.operand
    numbers: dict[Kind, int] = {}
    named: dict[tuple[int, bool], int] = {}
    kind_of = []
    for entry, again in zip(entries, staged, strict=True):
        name = id(entry), again
        number = named.get(name)
        if number is None:
            kind = _kind(entry.task, entry.steps, activations, again, readers[entry.read])
            number = named[name] = numbers.setdefault(kind, len(numbers))
        kind_of.append(number)
    return list(numbers), kind_of


@dataclass(frozen=True, slots=True)
class _Entry:
    """Tasks that differ in nothing that is priced: one of them, what it does, and the activations that it reads."""

    task: Task
    steps: _Steps
    read: tuple[int, ...]
    operand: _Operand | None


def _kind(task: Task, steps: _Steps, activations: Mapping[int, Buffer], staged: bool, readers: int) -> Kind:
    read = 0
    for place, number in enumerate(task.inputs):
        buffer = activations.get(number)
        if buffer is not None and task.op is not InstructionKind.SAMPLE_ARGMAX:
            read += buffer.dtype.nbytes(steps.parts[place]) if place in steps.parts else buffer.nbytes
    return Kind(
        streamed_bytes=0 if steps.attentions else task.est_bytes,
        cached_bytes=task.est_bytes if steps.attentions else 0,
        read_bytes=read,
        flops=task.est_flops // (task.params.get("M_tile", 1) if steps.products else 1),
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


def _gates(
    ordered: list[Task],
) -> tuple[list[int], list[int], list[tuple[int, ...]], list[list[tuple[int, int]]], list[int]]:
    """(counter that each task signals, number of the set of gates that it awaits, these sets, per counter its gates
    ascending, counter of each gate)."""
    counters: dict[int, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    sets: dict[tuple[int, ...], int] = {}
    known: dict[int, int] = {}
    awaits = []
    for task in ordered:
        waits = task.waits
        awaited = known.get(id(waits))
        if awaited is None:
            pairs = [(counters.setdefault(w.counter, len(counters)), w.threshold) for w in waits if w.threshold > 0]
            gates = tuple(numbers.setdefault(pair, len(numbers)) for pair in pairs)
            awaited = known[id(waits)] = sets.setdefault(gates, len(sets))
        awaits.append(awaited)
    signal = [counters.setdefault(task.out_counter, len(counters)) for task in ordered]
    chains: list[list[tuple[int, int]]] = [[] for _ in counters]
    before = [0] * len(counters)
    for (counter, threshold), gate in sorted(numbers.items()):
        chains[counter].append((gate, threshold - before[counter]))
        before[counter] = threshold
    return signal, awaits, list(sets), chains, [counter for counter, _ in numbers]


def _by_data(
    program: MegakernelProgram,
    variant: KernelVariant,
    ordered: Sequence[Task],
    signal: Sequence[int],
    gates: Sequence[tuple[int, ...]],
    counters: Sequence[int],
) -> list[bool]:
    """Whether a gate's counter is one that nobody asks, in a variant that hands over by the data.

    As the packer decides for what `lower` makes: no counter at all goes where buffers share pages; else one stays where
    what is handed over is no activation, unless it is appended behind all rows that are read of a cache.
    """
    pages = program.pages.buffer_to_page if program.pages is not None else {}
    if not variant.data_hand_offs or len(set(pages.values())) < len(pages):
        return [False] * len(counters)
    kept = {buffer.id for buffer in program.buffers if buffer.kind in (BufferKind.KV_CACHE, BufferKind.IO_OUTPUT)}
    writers: dict[int, dict[int, Task]] = defaultdict(dict)
    for counter, task in zip(signal, ordered, strict=True):
        if not kept.isdisjoint(task.outputs):
            writers[counter].setdefault(id(task.outputs), task)
    by_data = [True] * len(counters)
    seen: set[tuple[int, int]] = set()
    for task, awaited in zip(ordered, gates, strict=True):
        if not awaited or (id(task.inputs), id(awaited)) in seen or kept.isdisjoint(task.inputs):
            continue
        seen.add((id(task.inputs), id(awaited)))
        for gate in awaited:
            by_data[gate] = by_data[gate] and not any(
                number in kept and number in writer.outputs and not appends_behind(writer, task, place)
                for writer in writers[counters[gate]].values()
                for place, number in enumerate(task.inputs)
            )
    return by_data
