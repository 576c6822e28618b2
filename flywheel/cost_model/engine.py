"""Discrete events over the SM queues and one shared HBM.

Time moves from one event to the next, and nothing is sampled. Two things go on at once:

- *Loaders.* Each SM has one, which streams the bytes of the SM's queue in order. All active loaders share the memory
  equally. So a single running total, `volume` (bytes that each active loader has moved), describes them all: a loader
  reaches a position of its stream when `volume` reaches a known value. A loader stops at the limit of its look-ahead.
  It goes on when its SM comes to a task, as far as that allows, and when the task starts; its next bytes land
  `restart_us` later. The look-ahead counts from the end of the running task, as if that task's slots were freed when
  its bytes arrive. This is exact at every start of a task, and early in between if the consumer is the slower one.
- *Consumers.* Each SM has one, which runs the SM's queue. A task ends when its work is done and its last chunk has
  arrived and been consumed. It then adds 1 to its counter. When the counter completes, its waiters see it the gate's
  `visible_us` later, and up to `crowd_us` more, by the share of the memory's bandwidth in use. A task does `ahead_us`
  of its work before it starts, while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flywheel.cost_model.agenda import Floats, Ints, empty_agenda
from flywheel.cost_model.events import (
    CONSTANTS,
    COUNTER,
    GATE,
    LINK,
    NOBODY,
    SM,
    STATE,
    TASK,
    EventState,
    Records,
    run,
)


@dataclass(frozen=True, slots=True)
class Queues:
    """All SM queues, one after the other, as columns. Entry `i` of each column is one task.

    `first[sm]..first[sm + 1]` are the entries of an SM. `stream_end` counts bytes from the start of the SM's stream.
    `limit` is how far its loader may be once the task has started, and `early_limit` once its SM has come to the task.
    A gate is a pair (counter, threshold) that some task awaits.
    """

    first: Ints
    early_limit: Floats
    stream_end: Floats
    limit: Floats
    ahead_us: Floats
    work_us: Floats
    tail_us: Floats
    signal: Ints
    awaits: Ints
    """Number of the set of gates that a task awaits: set s is `gates[gate_ends[s] : gate_ends[s + 1]]`."""
    gate_ends: Ints
    gates: Ints
    link_ends: Ints
    """For each counter, and one more: the place in `links` where the counter's links begin."""
    links: Ints
    """[link, 2] a gate, and the number of signals that it needs after the gate before it."""
    visible_us: Floats
    """For each gate: the time from the last signal until its waiters go on."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine's numbers that the engine uses."""

    total: float
    """Bytes per us of all loaders together."""
    loader: float
    """Largest bytes per us of one loader."""
    poll_us: float
    restart_us: float = 0.0
    crowd_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Trace:
    """The result of a run: `finish_us` by SM, `start_us` and `end_us` by queue entry."""

    finish_us: list[float]
    stuck: int | None
    """The first queue entry that can never start; None where all tasks ended."""
    start_us: Floats
    end_us: Floats


def simulate(queues: Queues, rates: Rates) -> Trace:
    """Run every queue to its end."""
    tasks, sms = _tasks(queues), np.zeros(len(queues.first) - 1, SM)
    sms["head"], sms["stop"] = queues.first[:-1], queues.first[1:]
    gates = np.zeros(len(queues.visible_us), GATE)
    gates["visible"], gates["first"] = queues.visible_us, NOBODY
    links = np.zeros(len(queues.links), LINK)
    links["gate"], links["needs"] = np.reshape(queues.links, (-1, 2)).T
    rate_of = np.concatenate([[0.0], np.minimum(rates.loader, rates.total / np.arange(1, len(sms) + 1))])
    state = np.zeros(1, STATE)
    for name in CONSTANTS:
        state[name] = getattr(rates, name)
    state["slowest_us"] = 1 / rate_of[-1]
    n_timers = len(sms) + len(gates)
    run(EventState(state, tasks, sms, gates, _counters(queues), links, np.asarray(queues.gates, np.int64), rate_of,
               empty_agenda(len(sms), n_timers), np.zeros(n_timers, np.int64)))  # fmt: skip
    stuck = sms["head"][sms["head"] < sms["stop"]]
    return Trace(
        sms["finish"].tolist(), int(stuck.min()) if len(stuck) else None,
        tasks["start"], tasks["end"],
    )  # fmt: skip


def _tasks(queues: Queues) -> Records:
    tasks = np.zeros(len(queues.signal), TASK)
    tasks["early"], tasks["stream_end"], tasks["limit"] = queues.early_limit, queues.stream_end, queues.limit
    tasks["ahead"], tasks["work"], tasks["tail"] = queues.ahead_us, queues.work_us, queues.tail_us
    tasks["signal"] = queues.signal
    ends = np.asarray(queues.gate_ends)
    tasks["first_gate"], tasks["last_gate"] = ends[queues.awaits], ends[np.add(queues.awaits, 1)]
    return tasks


def _counters(queues: Queues) -> Records:
    ends, links = np.asarray(queues.link_ends), np.reshape(queues.links, (-1, 2))
    counters = np.zeros(len(ends) - 1, COUNTER)
    counters["link"], counters["end"] = ends[:-1], ends[1:]
    awaited = ends[1:] > ends[:-1]
    counters["left"][awaited] = links[ends[:-1][awaited], 1]
    return counters
