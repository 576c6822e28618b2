"""Who else is on a GPU, and whether the GPU is quiet: a shared GPU gives latencies that mean nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from threading import Event, Thread
from typing import Final

from flywheel.measure.latency import GpuState
from flywheel.measure.outcome import Contest, Measured, TrialOutcome

PAUSE_LIMIT_S: Final = 300.0
"""Wall seconds that a process waits in all for a GPU to become quiet. After that it measures beside others."""

SPREAD: Final = 0.25
"""The most that a program's 10th and 90th percentile differ on a quiet GPU, as a fraction of its median: of 22,679
recorded rows, 0.1 % are beyond it."""

SHIFT: Final = 0.05
"""The most that the median of a program that stays loaded differs from one measurement to the next, as a fraction: of
20,923 recorded rivals, 0.5 % are beyond it."""

_POLL_S: Final = 1.0
_IDLE_S: Final = 1.5
"""Wall seconds after which a GPU's utilisation says nothing any more of this process's own work."""

_WATCH_S: Final = 0.25
_LEAST: Final = 10
"""Samples of a program that tell how much it spreads."""
_AGAIN: Final = 2
"""How often a measurement that is not to be trusted is repeated."""

_SPREAD_WORDS: Final = "the samples of one program differ as on no quiet GPU"
_SHIFT_WORDS: Final = "a program takes another time than it just did"

_SHOWN: Final = 3
_HOT: Final = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
"""Reasons for lowered clocks that pass: heat, and a power supply in trouble. A power cap stays, and slows all alike."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Another process on a GPU; None for what the driver does not tell. `busy_percent` is the share of the last
    second's time in which its kernels ran."""

    pid: int
    name: str | None = None
    nbytes: int | None = None
    busy_percent: int | None = None

    def __str__(self) -> str:
        facts = [] if self.name is None else [self.name]
        facts += [] if self.nbytes is None else [f"{self.nbytes:,} bytes"]
        facts += [f"{self.busy_percent} % busy"] if self.busy_percent else []
        return f"pid {self.pid} ({', '.join(facts)})" if facts else f"pid {self.pid}"


@dataclass(frozen=True, slots=True)
class GpuPresence:
    """What the driver tells about a GPU at a moment; None for what it does not tell.

    `others` are the processes beside this one's family that may compute there, and `strangers` how many of them do. In
    a container the driver may list fewer processes, or number them as the host does: then they are `mixed`, and one of
    the others may be of this family.
    """

    others: tuple[Tenant, ...] | None = None
    strangers: int | None = None
    mixed: bool = False
    utilisation_percent: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    throttle: str | None = None


def named(tenants: Sequence[Tenant]) -> str:
    """The tenants that hold most, in a few words."""
    largest = sorted(tenants, key=lambda tenant: (-(tenant.nbytes or 0), tenant.pid))
    more = [f"and {len(tenants) - _SHOWN} more"] if len(tenants) > _SHOWN else []
    return ", ".join([*map(str, largest[:_SHOWN]), *more])


def held_by(presence: GpuPresence) -> str:
    """Who holds a GPU's memory beside this process, for the end of a line; empty if nobody does."""
    if presence.others:
        return f"; {'on it are' if presence.mixed else 'others hold the rest:'} {named(presence.others)}"
    if presence.others is None and presence.total_bytes is not None:
        return "; the driver does not tell who holds the rest"
    return ""


def disturbance(presence: GpuPresence, idle_s: float) -> str | None:
    """What keeps a GPU from being quiet, if this process has left it idle for `idle_s`; None if nothing is known to.

    Processes that hold memory and compute nothing disturb nobody. Where the driver does not say which compute, the
    GPU's utilisation decides, once it can only be theirs.
    """
    others = presence.others or ()
    busy = [tenant for tenant in others if tenant.busy_percent]
    unknown = any(tenant.busy_percent is None for tenant in others)
    idle = idle_s >= _IDLE_S
    if len(busy) > (1 if presence.mixed and not idle else 0):
        return f"others compute on it: {named(busy)}"
    may_be_theirs = not idle or presence.utilisation_percent is None or presence.utilisation_percent > 0
    if unknown and may_be_theirs and len(others) > (1 if presence.mixed else 0):
        return f"others are on it: {named(others)}"
    if idle and presence.utilisation_percent:
        return f"somebody whom the driver does not name keeps it {presence.utilisation_percent} % busy"
    hot = [reason for reason in (presence.throttle or "").split(",") if reason in _HOT]
    return f"its clocks are held down ({', '.join(hot)})" if hot else None


def is_spread(p10_us: float, median_us: float, p90_us: float) -> bool:
    """Whether samples of one program differ by more than they do on a quiet GPU."""
    return p90_us - p10_us > SPREAD * median_us


def is_shifted(median_us: float, before_us: float) -> bool:
    """Whether a program that stayed loaded takes another time than before, by more than on a quiet GPU."""
    return abs(median_us - before_us) > SHIFT * before_us


def together(presences: Sequence[GpuPresence]) -> GpuPresence:
    """The presence on several GPUs that work together: whoever is on any of them."""
    first, *more = presences
    for each in more:
        first = replace(
            first,
            others=None if first.others is None and each.others is None else (first.others or ()) + (each.others or ()),
            strangers=max((n for n in (first.strangers, each.strangers) if n is not None), default=None),
            mixed=first.mixed or each.mixed,
            utilisation_percent=max(
                (n for n in (first.utilisation_percent, each.utilisation_percent) if n is not None), default=None
            ),
            throttle=",".join(filter(None, (first.throttle, each.throttle))) or None,
        )
    return first


def suspicion(contest: Contest, before_us: float | None) -> str | None:
    """Why a measurement is not to be trusted: others computed meanwhile, or one program's own samples differ by more
    than they do on a quiet GPU. None if nothing is known against it.

    Of programs that took turns, the first rival's samples tell, since it is the same for many candidates; `before_us`
    is its median of the last measurement that was trusted. A program alone is judged by its own.
    """
    outcome = contest.outcome
    if not isinstance(outcome, Measured):
        return None
    state = outcome.latency.gpu_state
    if state is not None and state.strangers:
        return f"processes of others computed on it during a measurement: {state.strangers}"
    latency = outcome.latency
    if len(contest.times_us) < 2:
        return _SPREAD_WORDS if is_spread(latency.p10_us, latency.median_us, latency.p90_us) else None
    rounds = [samples for samples in contest.times_us[1] if len(samples) >= _LEAST]
    medians = [median(samples) for samples in rounds]
    for samples, middle in zip(rounds, medians, strict=True):
        ordered = sorted(samples)
        tenth = len(ordered) // 10
        if is_spread(ordered[tenth], middle, ordered[-1 - tenth]):
            return _SPREAD_WORDS
    if not medians:
        return None
    return _SHIFT_WORDS if any(is_shifted(each, before_us or medians[0]) for each in medians) else None


def beside(contest: Contest, strangers: int, harmless: int = 0) -> Contest:
    """A contest whose measured outcomes say that at least `strangers` processes of others computed meanwhile; of those
    that they count themselves, so many are `harmless`."""
    if not strangers and not harmless:
        return contest
    rivals = tuple(_beside(outcome, strangers, harmless) for outcome in contest.rivals)
    return replace(contest, outcome=_beside(contest.outcome, strangers, harmless), rivals=rivals)


def _beside(outcome: TrialOutcome, strangers: int, harmless: int) -> TrialOutcome:
    if not isinstance(outcome, Measured):
        return outcome
    state = outcome.latency.gpu_state or GpuState()
    if state.strangers is None and not strangers:
        return outcome
    state = replace(state, strangers=max(strangers, (state.strangers or 0) - harmless))
    return replace(outcome, latency=replace(outcome.latency, gpu_state=state))


class Attendant:
    """Waits for a GPU to be quiet, PAUSE_LIMIT_S in all, and says so.

    `read` tells who is there, `say` takes lines, `pause` sleeps for seconds and returns True if nobody wants to wait
    any more, and `clock` counts seconds.
    """

    def __init__(
        self,
        read: Callable[[], GpuPresence],
        say: Callable[[str], None],
        pause: Callable[[float], bool],
        clock: Callable[[], float],
    ) -> None:
        self._read, self._say, self._pause, self._clock = read, say, pause, clock
        self._left_s = PAUSE_LIMIT_S
        self._idle: frozenset[int] = frozenset()  # who was on the idle GPU, where the driver does not say who computes
        self._steady: tuple[object, float] | None = None  # the rivals of the last trusted measurement, its median in us

    def measured(self, attempt: Callable[[], Contest], rivals: object = None) -> Contest:
        """The contest of `attempt`, begun when the GPU is quiet, and repeated if it is not to be trusted, as long as
        there is time to wait. Its outcomes count the strangers that were there at any time.

        `rivals` are what it is measured with: the same object means that their medians compare with those before.
        """
        self.attend()
        for turn in range(1 + _AGAIN):
            contest = self._watched(attempt)
            before_us = self._steady[1] if self._steady is not None and self._steady[0] is rivals else None
            why = suspicion(contest, before_us)
            if why is None or not self._left_s or turn == _AGAIN:
                break
            self.attend(why)
        if len(contest.times_us) > 1 and len(contest.times_us[1][0]) >= _LEAST:
            self._steady = rivals, median(us for samples in contest.times_us[1] for us in samples)
        return contest

    def _watched(self, attempt: Callable[[], Contest]) -> Contest:
        over, seen = Event(), [0]

        def watch() -> None:
            while not over.wait(_WATCH_S):
                seen.append(self._look().strangers or 0)

        watching = Thread(target=watch, daemon=True)
        watching.start()
        try:
            contest = attempt()
        finally:
            over.set()
            watching.join()
        return beside(contest, max(*seen, self._look().strangers or 0), len(self._idle))

    def _look(self) -> GpuPresence:
        """Who is there, without those of whom the idle GPU has shown that they compute nothing."""
        presence = self._read()
        others = presence.others or ()
        kept = tuple(each for each in others if each.busy_percent is not None or each.pid not in self._idle)
        if len(kept) == len(others):
            return presence
        gone = len(others) - len(kept)
        return replace(presence, others=kept, strangers=max(0, (presence.strangers or 0) - gone))

    def attend(self, suspicion: str | None = None) -> None:
        """Wait until the GPU is quiet, or until no time is left. Without a `suspicion` a quiet GPU costs no wait; with
        one, the GPU is left idle first, so that its utilisation tells of others."""
        begun = self._clock()
        if suspicion is not None:
            self._idle = frozenset()
        why = suspicion or disturbance(self._look(), 0.0)
        if why is None or not self._left_s:
            return
        self._say(f"paused: the GPU is not quiet: {why}; waiting for up to {self._left_s:.0f} s")
        while why is not None and (waited_s := self._clock() - begun) < self._left_s:
            if self._pause(min(_POLL_S if waited_s else _IDLE_S, self._left_s - waited_s)):
                self._left_s = 0.0
                return
            presence = self._look()
            why = disturbance(presence, self._clock() - begun)
        waited_s = self._clock() - begun
        self._left_s = max(0.0, self._left_s - waited_s)
        if why is None:
            self._idle |= {each.pid for each in presence.others or () if each.busy_percent is None}
            self._say(f"goes on: the GPU is quiet after {waited_s:.0f} s")
        else:
            self._left_s = 0.0
            self._say(f"goes on beside others, which {PAUSE_LIMIT_S:.0f} s of waiting did not outlast: {why}")
