"""Discrete events over the SM queues and one shared HBM.

Time moves from one event to the next; nothing is sampled. Three things go on at once:

- *Loaders.* One an SM, streaming the bytes of its queue in order. All that are active share the memory equally, so a
  single running total, `volume` (bytes that each active loader has moved), describes them all: a loader reaches a
  position of its stream when `volume` reaches a known value. A loader stops at the limit of its look-ahead and goes
  on when its SM comes to a task, as far as that allows, and when the task starts; what it then reads lands `restart_us`
  later. The look-ahead counts from the end of the running task, whose own slots are taken to be freed
  as its bytes arrive: exact at every start of a task, early in between where the consumer is the slower one.
- *Consumers.* One an SM, walking its queue. A task ends when its work is done and its last chunk has arrived and been
  consumed; it adds 1 to its counter, and when that completes, those who wait see it the gate's `visible_us` later, and
  up to `crowd_us` more, by the share of the memory's bandwidth that is in use. `ahead_us` of a task is done before it
  starts, while it waits.
- *The host*, whom an SM that has polled a counter for `patience_us` asks again and again whether the launch is aborted.
  It answers one after the other, each in `ask_us`, and an SM sees nothing else until it has its answer. An SM polls for
  its next task from the start of the one before. Where a hundred SMs wait, all come hundreds of microseconds late, and
  so does everybody who waits for them.

A blocking wait also costs `bubble_us` worth of the SM's weight stream. Measured: a kernel whose consumers do nothing
and whose ring holds 5 us of stream still loses 2.2 us a hand-off, the same for short and long operations and at 3, 4
and 5 of them a layer; one round trip less (data words that carry their own flag) gains only 0.05-0.2 us of it. With
consumers that are slower than the memory, the same hand-off costs 0.9-1.3 us. So a part is latency that delays the
consumer, and a part is lost stream that a consumer-bound kernel does not notice. Why the stream is lost is not known;
here the loader owes those bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace

HALF_BYTE = 0.5
"""Positions in a stream are floats that stand for whole bytes."""

ASKS_AGAIN = 0.2
"""Of the time until a wait asks the host for the first time, how long it waits between two questions: 64 polls, 320."""


@dataclass(frozen=True, slots=True)
class Queues:
    """All SM queues, one after the other, as columns: entry `i` of each list is one task.

    `first[sm]..first[sm + 1]` are the entries of an SM. `stream_end` counts bytes from the start of the SM's stream,
    and `limit` is how far its loader may be once the task has started, `early_limit` once its SM has come to it. A gate
    is a pair (counter, threshold) that some task awaits.
    """

    first: list[int]
    early_limit: list[float]
    stream_end: list[int]
    limit: list[float]
    ahead_us: list[float]
    work_us: list[float]
    tail_us: list[float]
    signal: list[int]
    gates: list[tuple[int, ...]]
    counter_gates: list[list[tuple[int, int]]]
    """Per counter: (gate, further signals that it takes after the one before), ascending."""
    visible_us: list[float]
    """Per gate: from the last signal until those who wait go on."""
    polled: list[bool]
    """Per gate: whether it is a counter that those who wait ask."""


@dataclass(frozen=True, slots=True)
class Rates:
    """The machine as the engine needs it."""

    total: float
    """Bytes per us of all loaders together."""
    loader: float
    """Most bytes per us of one loader."""
    bubble_bytes: float
    poll_us: float
    restart_us: float = 0.0
    crowd_us: float = 0.0
    patience_us: float = 0.0
    ask_us: float = 0.0
    """Zero: nobody asks."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What happened, `blocked_us` and `finish_us` by SM; `start_us` and `end_us`, where recorded, by queue entry."""

    finish_us: list[float]
    blocked_us: list[float]
    stuck: int | None
    """First queue entry that can never start, None where all tasks ended."""
    start_us: list[float] = field(default_factory=list)
    end_us: list[float] = field(default_factory=list)


def simulate(queues: Queues, rates: Rates, record: bool = False) -> Trace:
    """Run every queue to its end."""
    engine = _Engine(queues, rates, record)
    engine.run()
    stuck = [head for head, stop in zip(engine.head, engine.stop, strict=True) if head < stop]
    return Trace(engine.finish, engine.blocked, min(stuck, default=None), engine.starts, engine.ends)


class _Engine:
    """State of one run; lists are by SM, but for the columns of `Queues` and what is kept by counter or gate.

    `arrivals` holds (volume, SM) at which a loader reaches the end of the running task's bytes, or its limit; an
    entry counts only while `due[sm]` equals it. `ending[time]` names who is due at a time of `timers`: an SM whose
    task ends, the number of SMs and an SM that has its answer, ~gate, or ~ the number of gates to ask the host. `began`
    is when the SM's last task started, `busy` when it has the host's answer and `host` when that has given all.
    A method that sets a loader's next arrival returns its volume for the caller to queue, None
    where it sets none.
    """

    __slots__ = (
        "active", "ahead", "arrivals", "asleep", "base", "began", "blocked", "busy", "chains", "done", "due", "early",
        "ending", "ends", "finish", "gates", "have", "head", "host", "latest", "left", "limit", "limits", "n_active",
        "now", "open", "owed", "queues", "rate", "rate_of", "rates", "record", "signal", "since", "slowest_us",
        "starts", "stop", "stream_end", "tail", "timers", "visible_us", "volume", "waiters", "waiting", "work",
    )  # fmt: skip

    def __init__(self, queues: Queues, rates: Rates, record: bool) -> None:
        sms = len(queues.first) - 1
        self.queues, self.rates, self.record = queues, rates, record
        self.stream_end, self.limits, self.early = queues.stream_end, queues.limit, queues.early_limit
        self.ahead, self.work, self.tail = queues.ahead_us, queues.work_us, queues.tail_us
        self.signal, self.gates = queues.signal, queues.gates
        self.rate_of = [0.0, *(min(rates.loader, rates.total / n) for n in range(1, sms + 1))]
        self.slowest_us = 1 / self.rate_of[-1]
        self.now = self.volume = self.rate = 0.0
        self.n_active = 0
        self.timers: list[float] = []
        self.ending: dict[float, list[int]] = {}
        self.arrivals: list[tuple[float, int]] = []
        self.head, self.stop = queues.first[:-1], queues.first[1:]
        self.active, self.waiting = [False] * sms, [False] * sms
        self.base, self.have, self.owed, self.limit, self.done = ([0.0] * sms for _ in range(5))
        self.due, self.since, self.blocked, self.finish, self.began, self.busy = ([0.0] * sms for _ in range(6))
        self.asleep, self.host = [False] * sms, 0.0
        self.chains = [chain[::-1] for chain in queues.counter_gates]
        self.left = [chain[-1][1] if chain else 0 for chain in self.chains]
        self.latest = [0.0] * len(self.left)
        self.open = [False] * len(queues.visible_us)
        self.visible_us = queues.visible_us
        self.waiters: list[list[int]] = [[] for _ in queues.visible_us]
        tasks = len(queues.signal) if record else 0
        self.starts, self.ends = [0.0] * tasks, [0.0] * tasks

    def run(self) -> None:
        self._begin()
        timers, arrivals, due, sms = self.timers, self.arrivals, self.due, len(self.due)
        while True:
            while arrivals and arrivals[0][0] != due[arrivals[0][1]]:
                heappop(arrivals)
            if arrivals:
                volume, sm = arrivals[0]
                now = self.now + (volume - self.volume) / self.rate
                if not timers or now <= timers[0]:
                    self.now, self.volume = now, volume
                    again = self._arrive(sm)
                    if again is None:
                        heappop(arrivals)
                    else:
                        heapreplace(arrivals, (again, sm))
                    continue
            elif not timers:
                return
            now = heappop(timers)
            self.volume += (now - self.now) * self.rate
            self.now = now
            for who in self.ending.pop(now):
                if 0 <= who < sms:
                    again = self._finish(who, now)
                    if again is not None:
                        heappush(arrivals, (again, who))
                else:
                    self._notice(who, now)

    def _notice(self, who: int, time: float) -> None:
        """What no task's end is of what is due."""
        if who >= 0:
            self._wake(who - len(self.busy), time)
        elif ~who < len(self.open):
            self._release(~who, time)
        else:
            self._ask(time)

    def _begin(self) -> None:
        """Loaders start at once, and so do the tasks that await nothing."""
        if self.rates.ask_us:
            self._at(self.rates.patience_us, ~len(self.open))
        for sm, head in enumerate(self.queues.first[:-1]):
            if head == self.stop[sm]:
                continue
            limit = self.early[head]
            if limit:
                self.limit[sm] = self.due[sm] = limit
                self._activate(sm, 0.0)
                heappush(self.arrivals, (limit, sm))
            again = self._reach(sm, 0.0)
            if again is not None:
                heappush(self.arrivals, (again, sm))

    def _at(self, time: float, who: int) -> None:
        bucket = self.ending.get(time)
        if bucket is None:
            self.ending[time] = [who]
            heappush(self.timers, time)
        else:
            bucket.append(who)

    def _arrive(self, sm: int) -> float | None:
        """The loader of `sm` is at the end of the running task's bytes, or at what was its limit."""
        if self.waiting[sm]:
            self.waiting[sm] = False
            ready, done = self.now + self.tail[self.head[sm]], self.done[sm]
            if ready >= done:
                again = self._finish(sm, ready)
                if again is not None:
                    return again
            else:
                self._at(done, sm)
        limit, base = self.limit[sm], self.base[sm]
        if limit > self.volume + base + HALF_BYTE:
            self.due[sm] = due = limit - base
            return due
        self.active[sm] = False
        self.have[sm] = limit
        self.due[sm] = -1.0
        self.n_active = active = self.n_active - 1
        self.rate = self.rate_of[active]
        return None

    def _finish(self, sm: int, time: float) -> float | None:
        """The running task of `sm` ends at `time`: signal, then go to the next."""
        head = self.head[sm]
        if self.record:
            self.ends[head] = time
        counter = self.signal[head]
        if time > self.latest[counter]:
            self.latest[counter] = time
        self.left[counter] = left = self.left[counter] - 1
        if not left:
            chain = self.chains[counter]
            gate, _ = chain.pop()
            crowd = self.rates.crowd_us * self.rate * self.n_active / self.rates.total
            self._at(self.latest[counter] + self.visible_us[gate] + crowd, ~gate)
            if chain:
                self.left[counter] = chain[-1][1]
        self.head[sm] = head = head + 1
        if head == self.stop[sm]:
            self.finish[sm] = time
            return None
        return self._reach(sm, time)

    def _reach(self, sm: int, time: float) -> float | None:
        """`sm` comes to its next task: start it, or fall asleep at the first gate that is not open."""
        head = self.head[sm]
        gates = self.gates[head]
        if not gates:
            return self._start(sm, time)
        for gate in gates:
            if not self.open[gate]:
                self.waiters[gate].append(sm)
                self.since[sm], self.asleep[sm] = time, True
                return self._allow(sm, self.early[head])
        if self.busy[sm] > time:
            self._at(self.busy[sm], len(self.busy) + sm)
            self.since[sm], self.asleep[sm] = time, True
            return self._allow(sm, self.early[head])
        ahead, poll = self.ahead[head], self.rates.poll_us
        return self._start(sm, time + (ahead if ahead > poll else poll))

    def _allow(self, sm: int, limit: float) -> float | None:
        """The loader of `sm`, whose next task waits, may go on to `limit` if that is further than before."""
        if limit <= self.limit[sm]:
            return None
        self.limit[sm] = limit
        if self.active[sm]:
            base = self.base[sm]
        elif limit > self.have[sm] + HALF_BYTE:
            base = self._activate(sm, self.have[sm])
        else:
            return None
        self.due[sm] = due = limit - base
        return due

    def _release(self, gate: int, time: float) -> None:
        """A gate opens: everybody who sleeps there goes on, who has asked the host when that has answered."""
        self.open[gate] = True
        busy = self.busy
        for sm in self.waiters[gate]:
            if busy[sm] > time:
                self._at(busy[sm], len(busy) + sm)
            else:
                self._wake(sm, time)

    def _ask(self, time: float) -> None:
        """Whoever has polled a counter for long asks the host."""
        late, gates, polled, opened = time - self.rates.patience_us, self.gates, self.queues.polled, self.open
        for sm, began in enumerate(self.began):
            entry = self.head[sm] + (not self.asleep[sm])
            if began > late or self.busy[sm] > time or entry >= self.stop[sm]:
                continue
            if any(polled[gate] and not opened[gate] for gate in gates[entry]):
                self.host = max(self.host, time) + self.rates.ask_us
                self.busy[sm] = self.host
        if self.timers or self.arrivals:
            self._at(time + self.rates.patience_us * ASKS_AGAIN, ~len(opened))

    def _wake(self, sm: int, time: float) -> None:
        """`sm`, which sleeps, sees what is open: it goes on, or to the next closed gate."""
        head = self.head[sm]
        gates = self.gates[head]
        for other in gates:
            if not self.open[other]:
                self.waiters[other].append(sm)
                return
        blocked, ahead = time - self.since[sm], self.ahead[head]
        if blocked > 0.0:
            visible = max(self.visible_us[gate] for gate in gates)
            if ahead > blocked:
                blocked = ahead
            self.blocked[sm] += blocked
            self._lose(sm, blocked / visible if blocked < visible else 1.0)
            again = self._start(sm, self.since[sm] + blocked)
        else:  # its turn comes after `time`: the last chunk before is still being consumed
            poll = self.rates.poll_us
            again = self._start(sm, self.since[sm] + (ahead if ahead > poll else poll))
        if again is not None:
            heappush(self.arrivals, (again, sm))

    def _lose(self, sm: int, share: float) -> None:
        """`share` of the bubble of a wait; one for a signal that is already on its way costs less than all of it."""
        lost = self.rates.bubble_bytes * share
        if self.active[sm]:
            arrived = self.volume + self.base[sm]
            if arrived > self.have[sm]:
                self.have[sm] = arrived
            self.base[sm] -= lost
        elif lost > self.owed[sm]:
            self.owed[sm] = lost

    def _start(self, sm: int, time: float) -> float | None:
        """The next task of `sm` starts at `time`."""
        head, have = self.head[sm], self.have[sm] + HALF_BYTE
        self.limit[sm] = limit = self.limits[head]
        end = self.stream_end[head]
        done = time + self.work[head]
        self.began[sm] = time
        self.asleep[sm] = False
        if self.record:
            self.starts[head] = time
        streaming = self.active[sm]
        if streaming:
            base = self.base[sm]
        elif limit > have:
            base = self._activate(sm, have - HALF_BYTE)
        else:
            self._at(done, sm)
            return None
        missing = end - base - self.volume
        # Where even the slowest memory brings the bytes before the work is done, there is no need to look again.
        if missing < HALF_BYTE or end < have or self.now + missing * self.slowest_us + self.tail[head] <= done:
            self._at(done, sm)
            if streaming:
                return None
            self.due[sm] = due = limit - base
            return due
        self.waiting[sm] = True
        self.done[sm] = done
        self.due[sm] = due = end - base
        return due

    def _activate(self, sm: int, have: float) -> float:
        """The loader of `sm`, stopped at `have` bytes, goes on; the new `base`."""
        self.active[sm] = True
        self.n_active = active = self.n_active + 1
        self.rate = rate = self.rate_of[active]
        late = self.rates.restart_us * rate if have else 0.0
        self.base[sm] = base = have - self.volume - self.owed[sm] - late
        self.owed[sm] = 0.0
        return base
