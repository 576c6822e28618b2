"""Prices a program's demand on one machine: the result is the queues of the event engine."""

from __future__ import annotations

from math import ceil
from typing import Final, NamedTuple

import numpy as np

from flywheel.cost_model.agenda import Floats
from flywheel.cost_model.demand import Demand, Kind
from flywheel.cost_model.engine import Queues
from flywheel.cost_model.machine import Machine
from flywheel.plan import KernelVariant

_KILO: Final = 1e3

_FETCHED_BYTES: Final = 2048
"""Bytes of activations that a warp loads at once."""

_ATTENDED_BYTES: Final = 4096
"""Bytes of keys and values that a warp attends to at once: 16 rows of 64 halves each."""


def priced(demand: Demand, machine: Machine) -> Queues:
    """The queues with their times on `machine`."""
    variant, ends, first, gates = demand.variant, demand.stream_end, demand.first, demand.gates
    room = variant.ring_slots // variant.copies * variant.copies * variant.chunk_bytes
    # A task that waits has its own weights read, and those of others behind it as far as the task before it allows: the
    # progress that the loader is told allows one more, but schedules of depth 1 take what they would take without it.
    entries = np.arange(len(ends))
    last = np.repeat(first[1:] - 1, np.diff(first))
    before = np.concatenate([[0], ends[:-1]])
    before[first[:-1][np.diff(first) > 0]] = 0
    early_depth = max(variant.prefetch_depth, 1) - 1
    prices = np.array([_price(kind, variant, machine)[:3] for kind in demand.kinds])[demand.kind_of].T
    return Queues(
        first=first,
        early_limit=np.minimum(before + room, ends[np.minimum(entries + early_depth, last)]).astype(np.float64),
        stream_end=ends.astype(np.float64),
        limit=np.minimum(ends + room, ends[np.minimum(entries + variant.prefetch_depth, last)]).astype(np.float64),
        ahead_us=prices[0],
        work_us=prices[1],
        tail_us=prices[2],
        signal=gates.signal,
        awaits=gates.awaits,
        gate_ends=gates.gate_ends,
        gates=gates.gates,
        link_ends=gates.link_ends,
        links=gates.links,
        visible_us=np.where(gates.by_data, machine.data_visibility_us, machine.visibility_us),
    )


def priced_work(demand: Demand, machine: Machine) -> tuple[Floats, Floats, Floats]:
    """What each entry's `work_us` is made of: the time to stage the vector that it multiplies, the time to multiply,
    and the rest."""
    prices = [_price(kind, demand.variant, machine) for kind in demand.kinds]
    parts = [(each.stage_us, each.multiply_us, each.work_us - each.stage_us - each.multiply_us) for each in prices]
    stage, multiply, rest = np.maximum(np.array(parts)[demand.kind_of], 0.0).T
    return stage, multiply, rest


class _Price(NamedTuple):
    """A task's times: work while it waits, work after that, and from the last chunk's arrival to the end. Of the work
    after the wait, `stage_us` and `multiply_us` are for the operand and the product of a task that has one."""

    ahead_us: float
    work_us: float
    tail_us: float
    stage_us: float = 0.0
    multiply_us: float = 0.0


def _price(kind: Kind, variant: KernelVariant, machine: Machine) -> _Price:
    if kind.added:
        return _Price(0.0, 0.0, 0.0)
    consumer, vector, others = machine.consumer, machine.vector, variant.vector_warps
    share = machine.restage_share if kind.staged else 1.0
    fetched = ceil(kind.read_bytes / (kind.slices * _FETCHED_BYTES * others)) * vector.fetch_us * share
    shared = kind.read_bytes * kind.readers / (machine.shared_gbs * 1e3) * share
    product = 0.0 if kind.attends else max(
        consumer.chunks_us(kind.streamed_bytes, variant, kind.codes),
        kind.flops / (consumer.flops_per_warp_us * variant.matrix_warps),
    )  # fmt: skip
    work = fetched + shared + (kind.slices - 1) * vector.slice_us + product
    ahead = 0.0 if kind.staged else vector.ahead_us
    if kind.attends:
        work += ceil(kind.cached_bytes / (_ATTENDED_BYTES * others)) * vector.attend_us
        ahead += 0.0 if kind.streamed_bytes else kind.cached_bytes / _KILO * vector.cache_us
    last = min(variant.chunk_bytes, kind.streamed_bytes)
    tail = last / _ATTENDED_BYTES * vector.attend_us if kind.attends else consumer.chunks_us(last, variant, kind.codes)
    if not kind.multiplies:
        return _Price(ahead, work, tail)
    return _Price(ahead, work, tail, fetched + shared + (kind.slices - 1) * vector.slice_us, product)
