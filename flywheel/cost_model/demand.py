"""What a program asks of a machine, whatever the machine's constants: read once, priced many times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from types import MappingProxyType
from typing import Final

from flywheel.cost_model.engine import Queues
from flywheel.cost_model.machine import Machine
from flywheel.errors import ConfigError
from flywheel.ir import BufferKind, InstructionKind, KernelVariant, MegakernelProgram, Task, variant_of
from flywheel.ir.access import appends_behind

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
_KILO: Final = 1e3


@dataclass(frozen=True, slots=True)
class Kind:
    """What decides the price of a task: bytes streamed and read when it starts, operations, and what its steps are.

    `flops` of products are those of one row: others ride in columns of the fragment that are multiplied anyway.
    `staged`: the task before it on its SM multiplied the same operand. `merged` counts heads of partials.
    """

    streamed_bytes: int
    read_bytes: int
    flops: int
    staged: bool
    steps: int
    norms: int
    merged: int
    attends: bool


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
    gates: list[tuple[int, ...]]
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
    ends = [end for queue in by_sm for end in accumulate([task.est_bytes for task in queue])]
    signal, gates, counter_gates, asked = _gates(ordered)
    return Demand(
        variant=variant,
        task_ids=[task.id for task in ordered],
        labels=[task.label for task in ordered],
        first=[0, *accumulate(map(len, by_sm))],
        stream_end=ends,
        kinds=kinds,
        kind_of=kind_of,
        signal=signal,
        gates=gates,
        counter_gates=counter_gates,
        by_data=_by_data(program, variant, ordered, signal, gates, asked),
    )


def priced(demand: Demand, machine: Machine) -> Queues:
    """The queues with the times that they take on `machine`."""
    variant, ends = demand.variant, demand.stream_end
    depth = variant.prefetch_depth
    ahead = max(variant.ring_bytes - machine.in_flight_bytes, variant.chunk_bytes)
    prices = [_price(kind, variant, machine) for kind in demand.kinds]
    work_us = [prices[kind][0] for kind in demand.kind_of]
    tail_us = [prices[kind][1] for kind in demand.kind_of]
    early: list[float] = []
    limits: list[float] = []
    for begin, end in zip(demand.first, demand.first[1:], strict=False):
        stops = ends[begin:end]
        reach = stops[depth:] + stops[-1:] * min(depth, len(stops))
        allowed = [min(ahead, stops[min(depth, len(stops)) - 1]) if depth and stops else 0.0]
        allowed += [stop + ahead if stop + ahead < most else most for stop, most in zip(stops, reach, strict=True)]
        for index, (before, stop) in enumerate(zip([0, *stops], stops, strict=False)):
            if allowed[index] <= before < stop:  # nothing of it may come early: its first byte takes the whole latency
                tail_us[begin + index] += machine.latency_us
        early.append(allowed[0])
        limits += allowed[1:]
    return Queues(
        demand.first, early, ends, limits, work_us, tail_us, demand.signal, demand.gates, demand.counter_gates,
        [machine.data_visibility_us if by_data else machine.visibility_us for by_data in demand.by_data],
    )  # fmt: skip


def _price(kind: Kind, variant: KernelVariant, machine: Machine) -> tuple[float, float]:
    """(work, time from the last chunk's arrival to the end) of a task."""
    consumer, vector, warps, chunk = machine.consumer, machine.vector, variant.matrix_warps, variant.chunk_bytes
    share = machine.restage_share if kind.staged else 1.0
    byte_us, streamed = 1 / consumer.rate(warps), kind.streamed_bytes
    flop_us, activation_us = 1 / (consumer.flops_per_warp_us * warps), 1 / (machine.activation_gbs * 1e3)
    work = consumer.task_us(warps, share) + kind.read_bytes * activation_us * share
    work += max(streamed * byte_us, kind.flops * flop_us)
    work += ceil(streamed / chunk) * consumer.chunk_us
    work += vector.task_us + kind.steps * vector.step_us
    work += share * (kind.norms * vector.norm_us + kind.merged * vector.merge_us / variant.vector_warps)
    if kind.attends:
        work += kind.flops / _KILO * vector.attend_us / variant.vector_warps
    tail = consumer.chunk_us + min(chunk, streamed) * byte_us if streamed else 0.0
    return work, tail


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
    """What a task does, counted: `merged` heads of partials, and products, which are all that multiply."""

    products: int
    norms: int
    merged: int
    attentions: int
    others: int


def _kinds(program: MegakernelProgram, by_sm: Sequence[Sequence[Task]]) -> tuple[list[Kind], list[int]]:
    """(the kinds that there are, the number of the kind of each task)."""
    sizes = {buffer.id: buffer.nbytes for buffer in program.buffers if buffer.kind not in STREAMED_KINDS}
    numbers: dict[Kind, int] = {}
    recipes: dict[int, _Steps] = {}
    # Tasks that were cut from one operation share their inputs and their recipe.
    known: dict[tuple[int, int, int, int, int], tuple[int, int, _Operand | None]] = {}
    kind_of = []
    for queue in by_sm:
        before: _Operand | None = None
        for task in queue:
            recipe = id(task.params.get("recipe"))
            key = (recipe, task.est_bytes, task.est_flops, id(task.inputs), task.op)
            found = known.get(key)
            if found is None:
                steps = recipes.get(recipe) if task.op is InstructionKind.FUSED else None
                if steps is None:
                    steps = recipes[recipe] = _steps(task)
                fresh, again = (_kind(task, steps, sizes, staged) for staged in (False, True))
                number = numbers.setdefault(fresh, len(numbers))
                if steps.products:
                    operand = tuple(buffer for buffer in task.inputs if buffer in sizes), steps.norms, steps.merged
                    found = number, numbers.setdefault(again, len(numbers)), operand
                else:
                    found = number, number, None
                known[key] = found
            kind_of.append(found[1] if found[2] is not None and found[2] == before else found[0])
            before = found[2]
    return list(numbers), kind_of


def _kind(task: Task, steps: _Steps, sizes: Mapping[int, int], staged: bool) -> Kind:
    return Kind(
        streamed_bytes=task.est_bytes,
        read_bytes=sum(sizes.get(buffer, 0) for buffer in task.inputs),
        flops=task.est_flops // (task.params.get("M_tile", 1) if steps.products else 1),
        staged=staged,
        steps=steps.others,
        norms=steps.norms,
        merged=steps.merged,
        attends=steps.attentions > 0,
    )


def _steps(task: Task) -> _Steps:
    if task.op is InstructionKind.FUSED:
        listed = [(step["op"], len(step["args"]), step.get("params", {})) for step in task.params["recipe"]["steps"]]
    else:
        listed = [] if task.op is InstructionKind.NOP else [(task.op.name, len(task.inputs), task.params)]
    tally = Counter(_CLASSES.get(name, "others") for name, _, _ in listed)
    heads = task.params.get("n_heads", 1)
    merged = sum(params.get("n_heads", heads) * operands for name, operands, params in listed if name in _MERGES)
    return _Steps(tally["products"], tally["norms"], merged, tally["attentions"], tally["others"])


def _gates(ordered: list[Task]) -> tuple[list[int], list[tuple[int, ...]], list[list[tuple[int, int]]], list[int]]:
    """(counter that each task signals, gates that it awaits, per counter its gates ascending, counter of each gate)."""
    counters: dict[int, int] = {}
    numbers: dict[tuple[int, int], int] = {}
    known: dict[int, tuple[int, ...]] = {}
    gates = []
    for task in ordered:
        waits = task.waits
        awaited = known.get(id(waits))
        if awaited is None:
            pairs = [(counters.setdefault(w.counter, len(counters)), w.threshold) for w in waits if w.threshold > 0]
            awaited = known[id(waits)] = tuple(numbers.setdefault(pair, len(numbers)) for pair in pairs)
        gates.append(awaited)
    signal = [counters.setdefault(task.out_counter, len(counters)) for task in ordered]
    chains: list[list[tuple[int, int]]] = [[] for _ in counters]
    before = [0] * len(counters)
    for (counter, threshold), gate in sorted(numbers.items()):
        chains[counter].append((gate, threshold - before[counter]))
        before[counter] = threshold
    return signal, gates, chains, [counter for counter, _ in numbers]


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
