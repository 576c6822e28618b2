"""The events of the engine, compiled by numba: one step of llama3-8b has 40,000 of them.

All state is in arrays of records, which `EventState` lists. Sums are computed in a fixed order, so that a prediction
has the same bits everywhere.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from flywheel.compiled import bare
from flywheel.cost_model.agenda import NEVER, Agenda, Floats, Ints, arrive_at, arrives, set_timer, take_timer

HALF_BYTE: Final = 0.5
"""Stream positions are floats that stand for whole bytes; half a byte is their tolerance."""

NOBODY: Final = -1
"""Stands for no SM or gate."""

Records = Any
"""An array of records, or one of them; numba infers the fields."""

CONSTANTS: Final = ("total", "poll_us", "restart_us", "crowd_us")
"""Fields of `Rates` that a run reads."""

TASK = np.dtype(
    [(name, "f8") for name in ("early", "stream_end", "limit", "ahead", "work", "tail", "start", "end")]
    + [(name, "i8") for name in ("signal", "first_gate", "last_gate")]
)
"""A queue entry: its columns of `Queues`, the range of `EventState.awaited` that it awaits, and when it ran."""

SM = np.dtype(
    [(name, "f8") for name in ("base", "have", "limit", "done", "due", "since", "finish")]
    + [(name, "i8") for name in ("head", "stop", "next")]
    + [(name, "?") for name in ("active", "waiting")]
)
"""An SM. Its loader is at `volume + base` of its stream while `active`, else at `have`. `due`: the volume of its next
arrival. `since`: when it began to wait; `next`: the SM that waits after it at its gate."""

GATE = np.dtype([("visible", "f8"), ("first", "i8"), ("last", "i8"), ("open", "?")])
"""A gate, and the first and last SM that wait there."""

COUNTER = np.dtype([("latest", "f8"), ("left", "i8"), ("link", "i8"), ("end", "i8")])
"""A counter: its last signal, the signals that its next gate still needs, and the remaining range of
`EventState.links`."""

LINK = np.dtype([("gate", "i8"), ("needs", "i8")])

STATE = np.dtype(
    [(name, "f8") for name in ("now", "volume", "rate", "slowest_us", *CONSTANTS)]
    + [("n_active", "i8")]
)
"""The clock, the memory and the constants."""


class EventState(NamedTuple):
    """All data that a run reads and changes.

    A timer stands for one of two events: an SM's number: its task ends; ~gate: the gate opens. There is at most one
    timer for each SM and each gate. An SM arrives at the volume at which its loader reaches the end of the running
    task's bytes, or its limit. `due` has room for all that are due at once.
    """

    state: Records
    tasks: Records
    sms: Records
    gates: Records
    counters: Records
    links: Records
    awaited: Ints
    rate_of: Floats
    """Bytes per us of each loader, by the number of active loaders."""
    agenda: Agenda
    due: Ints


@bare
def _activate(engine: EventState, sm: Records, have: float) -> None:
    """Restart the loader of `sm`, which has stopped at `have` bytes."""
    state = engine.state[0]
    sm.active = True
    state.n_active += 1
    state.rate = engine.rate_of[state.n_active]
    late = state.restart_us * state.rate if have else 0.0
    sm.base = have - state.volume - late


@bare
def _next_arrival(sm: Records, at: float) -> float:
    """Set the stream position of the next arrival of an SM's loader. Returns the volume at that time, for the caller to
    queue."""
    sm.due = at - sm.base
    return float(sm.due)


@bare
def _start(engine: EventState, number: int, time: float) -> float:
    """Start the next task of an SM at `time`. Returns its loader's next arrival, or NEVER."""
    state, sm = engine.state[0], engine.sms[number]
    task = engine.tasks[sm.head]
    have = sm.have + HALF_BYTE
    sm.limit = task.limit
    done = time + task.work
    task.start = time
    streaming = sm.active
    if not streaming:
        if task.limit <= have:
            set_timer(engine.agenda, done, number)
            return NEVER
        _activate(engine, sm, have - HALF_BYTE)
    missing = task.stream_end - sm.base - state.volume
    # Where even the slowest memory brings the bytes before the work is done, there is no need to look again.
    in_time = state.now + missing * state.slowest_us + task.tail <= done
    if missing < HALF_BYTE or task.stream_end < have or in_time:
        set_timer(engine.agenda, done, number)
        return NEVER if streaming else _next_arrival(sm, task.limit)
    sm.waiting = True
    sm.done = done
    return _next_arrival(sm, task.stream_end)


@bare
def _allow(engine: EventState, sm: Records, limit: float) -> float:
    """Let the loader of `sm`, whose next task waits, continue to `limit` if that is beyond its last limit."""
    if limit <= sm.limit:
        return NEVER
    sm.limit = limit
    if not sm.active:
        if limit <= sm.have + HALF_BYTE:
            return NEVER
        _activate(engine, sm, sm.have)
    return _next_arrival(sm, limit)


@bare
def _closed_gate(engine: EventState, task: Records) -> int:
    """The first closed gate of a task, or NOBODY."""
    for place in range(task.first_gate, task.last_gate):
        if not engine.gates[engine.awaited[place]].open:
            return int(engine.awaited[place])
    return NOBODY


@bare
def _wait(engine: EventState, number: int, gate: Records) -> None:
    """Put an SM into a gate's queue, after the SMs that already wait."""
    if gate.first == NOBODY:
        gate.first = number
    else:
        engine.sms[gate.last].next = number
    gate.last = number
    engine.sms[number].next = NOBODY


@bare
def _reach(engine: EventState, number: int, time: float) -> float:
    """An SM reaches its next task: start it, or wait at the first closed gate."""
    sm = engine.sms[number]
    task = engine.tasks[sm.head]
    if task.first_gate == task.last_gate:
        return _start(engine, number, time)
    closed = _closed_gate(engine, task)
    if closed == NOBODY:
        return _start(engine, number, time + max(task.ahead, engine.state[0].poll_us))
    _wait(engine, number, engine.gates[closed])
    sm.since = time
    return _allow(engine, sm, task.early)


@bare
def _finish(engine: EventState, number: int, time: float) -> float:
    """The running task of an SM ends at `time`: signal, then go to the next task."""
    state, sm = engine.state[0], engine.sms[number]
    task = engine.tasks[sm.head]
    task.end = time
    counter = engine.counters[task.signal]
    counter.latest = max(counter.latest, time)
    counter.left -= 1
    if counter.left == 0:
        gate = engine.links[counter.link].gate
        crowd = state.crowd_us * state.rate * state.n_active / state.total
        set_timer(engine.agenda, counter.latest + engine.gates[gate].visible + crowd, ~gate)
        counter.link += 1
        if counter.link < counter.end:
            counter.left = engine.links[counter.link].needs
    sm.head += 1
    if sm.head == sm.stop:
        sm.finish = time
        return NEVER
    return _reach(engine, number, time)


@bare
def _arrive(engine: EventState, number: int) -> float:
    """The loader of an SM has reached the end of the running task's bytes, or its limit."""
    state, sm = engine.state[0], engine.sms[number]
    if sm.waiting:
        sm.waiting = False
        ready = state.now + engine.tasks[sm.head].tail
        if ready >= sm.done:
            again = _finish(engine, number, ready)
            if again != NEVER:
                return again
        else:
            set_timer(engine.agenda, sm.done, number)
    if sm.limit > state.volume + sm.base + HALF_BYTE:
        return _next_arrival(sm, sm.limit)
    sm.active = False
    sm.have = sm.limit
    sm.due = NEVER
    state.n_active -= 1
    state.rate = engine.rate_of[state.n_active]
    return NEVER


@bare
def _wake(engine: EventState, number: int, time: float) -> None:
    """A waiting SM continues: to its task, or to the next closed gate."""
    state, sm = engine.state[0], engine.sms[number]
    task = engine.tasks[sm.head]
    closed = _closed_gate(engine, task)
    if closed != NOBODY:
        _wait(engine, number, engine.gates[closed])
        return
    blocked = time - sm.since
    if blocked > 0.0:
        again = _start(engine, number, sm.since + max(blocked, task.ahead))
    else:  # its turn comes after `time`: the last chunk before is still being consumed
        again = _start(engine, number, sm.since + max(task.ahead, state.poll_us))
    if again != NEVER:
        arrive_at(engine.agenda, number, again)


@bare
def _release(engine: EventState, gate: Records, time: float) -> None:
    """A gate opens: all SMs that wait there continue."""
    gate.open = True
    number = gate.first
    while number != NOBODY:
        behind = engine.sms[number].next
        _wake(engine, number, time)
        number = behind


@bare
def _begin(engine: EventState) -> None:
    """Start all loaders, and all tasks without waits."""
    for number in range(len(engine.sms)):
        sm = engine.sms[number]
        if sm.head == sm.stop:
            continue
        limit = engine.tasks[sm.head].early
        if limit:
            sm.limit = limit
            sm.due = limit
            _activate(engine, sm, 0.0)
            arrive_at(engine.agenda, number, limit)
        again = _reach(engine, number, 0.0)
        if again != NEVER:
            arrive_at(engine.agenda, number, again)


@bare
def _due(engine: EventState, who: int, time: float) -> None:
    """Handle the event that a timer was set for."""
    if who < 0:
        _release(engine, engine.gates[~who], time)
        return
    again = _finish(engine, who, time)
    if again != NEVER:
        arrive_at(engine.agenda, who, again)


@bare
def run(engine: EventState) -> None:
    """Process events until none is left."""
    clock, agenda = engine.state[0], engine.agenda
    _begin(engine)
    while True:
        if arrives(agenda):
            number = agenda.firsts[1]
            volume = agenda.volumes[1]
            now = clock.now + (volume - clock.volume) / clock.rate
            if not agenda.sizes[0] or now <= agenda.times[0]:
                clock.now = now
                clock.volume = volume
                arrive_at(agenda, number, _arrive(engine, number))
                continue
        elif not agenda.sizes[0]:
            return
        now = agenda.times[0]
        clock.volume += (now - clock.now) * clock.rate
        clock.now = now
        count = 0
        while agenda.sizes[0] and agenda.times[0] == now:
            engine.due[count] = take_timer(agenda)
            count += 1
        for place in range(count):
            _due(engine, engine.due[place], now)
