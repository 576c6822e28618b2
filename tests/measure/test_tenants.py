from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from flywheel.measure.latency import GpuState, MeasuredLatency
from flywheel.measure.outcome import Contest, Crashed, Measured
from flywheel.measure.tenants import (
    PAUSE_LIMIT_S,
    Attendant,
    GpuPresence,
    Tenant,
    beside,
    disturbance,
    held_by,
    named,
    suspicion,
    together,
)
from flywheel.measure.verdict import judge

IDLE_S = 2.0
HOLDER, WORKER = Tenant(11, "jupyter", 5_000, 0), Tenant(12, "train", 7_000, 80)
UNKNOWN = Tenant(13, None, 9_000)


def measured(us: float = 100.0, p90_us: float | None = None, strangers: int | None = None) -> Measured:
    state = None if strangers is None else GpuState(strangers=strangers)
    latency = MeasuredLatency(us, us, p90_us or us, 30, 3, "clean", gpu_state=state)
    return Measured(latency, judge(error=0.0, where="logits", positions=[1], dtype="BF16"))


def in_turn(*rival_us: Sequence[float]) -> Contest:
    """A candidate of 100 us beside a rival with these samples, by round."""
    own_us = tuple((100.0,) * len(each) for each in rival_us)
    return Contest(measured(), (measured(),), (own_us, tuple(map(tuple, rival_us))))


def test_tenants_are_named_the_largest_first_and_few() -> None:
    assert named([HOLDER, WORKER]) == "pid 12 (train, 7,000 bytes, 80 % busy), pid 11 (jupyter, 5,000 bytes)"
    assert named([Tenant(pid) for pid in range(9)]) == "pid 0, pid 1, pid 2, and 6 more"


@pytest.mark.parametrize(
    ("presence", "words"),
    [
        (GpuPresence((HOLDER,), 0), "; others hold the rest: pid 11 (jupyter, 5,000 bytes)"),
        (GpuPresence((HOLDER,), 0, mixed=True), "; on it are pid 11 (jupyter, 5,000 bytes)"),
        (GpuPresence((), 0, total_bytes=80), ""),
        (GpuPresence(total_bytes=80), "; the driver does not tell who holds the rest"),
        (GpuPresence(), ""),
    ],
)
def test_who_holds_the_memory_is_said_as_far_as_it_is_known(presence: GpuPresence, words: str) -> None:
    assert held_by(presence) == words


@pytest.mark.parametrize("idle_s", [0.0, IDLE_S])
@pytest.mark.parametrize(
    "presence", [GpuPresence(), GpuPresence(()), GpuPresence((HOLDER,)), GpuPresence((), throttle="sw_power_cap")]
)
def test_a_gpu_on_which_nobody_computes_is_quiet(presence: GpuPresence, idle_s: float) -> None:
    assert disturbance(presence, idle_s) is None


@pytest.mark.parametrize(
    ("presence", "idle_s", "words"),
    [
        (GpuPresence((HOLDER, WORKER)), 0.0, "others compute on it: pid 12 (train"),
        (GpuPresence((UNKNOWN,), utilisation_percent=90), 0.0, "others are on it: pid 13"),
        (GpuPresence((UNKNOWN,), utilisation_percent=90), IDLE_S, "others are on it: pid 13"),
        (GpuPresence((UNKNOWN,)), IDLE_S, "others are on it: pid 13"),
        (GpuPresence(utilisation_percent=20), IDLE_S, "somebody whom the driver does not name keeps it 20 % busy"),
        (GpuPresence((), throttle="sw_power_cap,hw_thermal"), 0.0, "its clocks are held down (hw_thermal)"),
        (GpuPresence((WORKER,), mixed=True), IDLE_S, "others compute on it: pid 12"),
        (GpuPresence((WORKER, WORKER), mixed=True), 0.0, "others compute on it: pid 12"),
    ],
)
def test_what_disturbs_is_named(presence: GpuPresence, idle_s: float, words: str) -> None:
    assert (disturbance(presence, idle_s) or "").startswith(words)


@pytest.mark.parametrize(
    ("presence", "idle_s"),
    [
        (GpuPresence((WORKER,), mixed=True), 0.0),  # it may be this process
        (GpuPresence((UNKNOWN,), mixed=True, utilisation_percent=90), 0.0),
        (GpuPresence((UNKNOWN,), utilisation_percent=0), IDLE_S),
        (GpuPresence(utilisation_percent=90), 0.0),  # by this process's own work
    ],
)
def test_what_may_be_this_processs_own_work_disturbs_nobody(presence: GpuPresence, idle_s: float) -> None:
    assert disturbance(presence, idle_s) is None


def test_several_gpus_are_as_quiet_as_the_least_quiet_one() -> None:
    idle = GpuPresence((), 0, utilisation_percent=0, throttle="none")
    found = together([idle, GpuPresence((WORKER,), 1), GpuPresence()])
    assert (found.others, found.strangers, found.utilisation_percent) == ((WORKER,), 1, 0)
    assert disturbance(found, 0.0) is not None
    assert together([GpuPresence(), GpuPresence()]) == GpuPresence()


STEADY = [100.0] * 15 + [101.0] * 15


@pytest.mark.parametrize(
    ("contest", "before_us"),
    [
        (Contest(measured(strangers=0)), None), (Contest(measured(p90_us=120.0)), None), (in_turn(STEADY), None),
        (in_turn(STEADY), 104.0), (in_turn(STEADY, [102.0] * 10), None), (Contest(Crashed("x", transient=False)), None),
        (in_turn([*STEADY, 900.0]), None), (in_turn([100.0, 300.0]), 50.0),
    ],
)  # fmt: skip
def test_what_a_quiet_gpu_shows_is_trusted(contest: Contest, before_us: float | None) -> None:
    assert suspicion(contest, before_us) is None


@pytest.mark.parametrize(
    ("contest", "before_us"),
    [
        (Contest(measured(strangers=1)), None), (Contest(measured(p90_us=130.0)), None),
        (in_turn([100.0] * 20 + [200.0] * 10), None), (in_turn(STEADY), 110.0), (in_turn(STEADY, [108.0] * 10), None),
        (in_turn(STEADY, [100.0] * 20 + [200.0] * 10), None),
    ],
)  # fmt: skip
def test_what_no_quiet_gpu_shows_is_not(contest: Contest, before_us: float | None) -> None:
    assert suspicion(contest, before_us) is not None


def test_strangers_are_noted_of_every_program_of_a_contest() -> None:
    contest = Contest(measured(), (measured(strangers=3), Crashed("x", transient=False)))
    found = beside(contest, 2)
    assert isinstance(found.outcome, Measured)
    assert isinstance(found.rivals[0], Measured)
    assert found.outcome.latency.gpu_state == GpuState(strangers=2)
    assert found.rivals[0].latency.gpu_state == GpuState(strangers=3)
    assert beside(contest, 0) == contest


class Card:
    """A GPU on which somebody computes until `busy_until_s`, and the clock beside it."""

    def __init__(self, busy_until_s: float) -> None:
        self.now_s, self.until_s, self.lines = 0.0, busy_until_s, list[str]()
        self.pauses, self.ending = list[float](), False
        self.attendant = Attendant(self.read, self.lines.append, self.pause, lambda: self.now_s)

    def read(self) -> GpuPresence:
        there = (WORKER,) if self.now_s < self.until_s else ()
        return GpuPresence(there, len(there), utilisation_percent=50 * len(there))

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        self.now_s += seconds
        return self.ending

    def taking(self, seconds: float, make: Callable[[], Contest]) -> Callable[[], Contest]:
        def attempt() -> Contest:
            strangers = self.read().strangers or 0
            self.now_s += seconds
            return beside(make(), max(strangers, self.read().strangers or 0))

        return attempt


def test_a_quiet_card_costs_no_wait_and_no_line() -> None:
    card = Card(0.0)
    contest = Contest(measured(strangers=0))
    assert card.attendant.measured(lambda: contest) == contest
    assert (card.lines, card.pauses) == ([], [])


def test_a_measurement_begins_when_the_others_have_gone_and_says_who_they_were() -> None:
    card = Card(20.0)
    begun = list[float]()

    def attempt() -> Contest:
        begun.append(card.now_s)
        return Contest(measured(strangers=0))

    card.attendant.measured(attempt)
    assert len(begun) == 1
    assert 20.0 <= begun[0] <= 22.0
    assert card.lines == [
        "paused: the GPU is not quiet: others compute on it: pid 12 (train, 7,000 bytes, 80 % busy); waiting for up to "
        "300 s",
        "goes on: the GPU is quiet after 20 s",
    ]


def test_a_measurement_that_others_disturbed_is_repeated_on_the_quiet_card() -> None:
    card = Card(0.0)
    made = list[float]()

    def make() -> Contest:
        made.append(card.now_s)
        if len(made) == 1:
            card.until_s = card.now_s + 10.0  # somebody came in the middle
        return Contest(measured())

    found = card.attendant.measured(card.taking(1.0, make))
    assert len(made) == 2
    assert isinstance(found.outcome, Measured)
    assert found.outcome.latency.gpu_state is None
    assert made[1] >= card.until_s


def test_samples_that_no_quiet_card_gives_are_taken_again_after_a_look_at_the_idle_card() -> None:
    card = Card(0.0)
    contests = iter([in_turn([100.0] * 20 + [200.0] * 10), in_turn(STEADY)])
    assert card.attendant.measured(lambda: next(contests)) == in_turn(STEADY)
    assert card.pauses == [1.5]


def test_a_program_that_spreads_by_itself_is_measured_three_times_and_kept() -> None:
    card = Card(0.0)
    spread, made = Contest(measured(p90_us=200.0)), list[int]()

    def attempt() -> Contest:
        made.append(1)
        return spread

    assert card.attendant.measured(attempt) == spread
    assert len(made) == 3


def test_a_rival_is_compared_with_itself_alone() -> None:
    card, rivals = Card(0.0), (object(), object())
    for rival, us in ((rivals[0], 100.0), (rivals[1], 150.0)):
        card.attendant.measured(lambda us=us: in_turn([us] * 30), rival)  # type: ignore[misc]
    assert card.pauses == []
    card.attendant.measured(lambda: in_turn([100.0] * 30), rivals[1])
    assert card.pauses


def test_a_card_that_is_never_quiet_ends_the_waiting_once_and_rows_say_so() -> None:
    card = Card(float("inf"))
    made = [card.attendant.measured(card.taking(1.0, lambda: Contest(measured()))) for _ in range(5)]
    assert PAUSE_LIMIT_S <= card.now_s <= PAUSE_LIMIT_S + 10.0
    assert [line.partition(":")[0] for line in card.lines] == [
        "paused", "goes on beside others, which 300 s of waiting did not outlast",
    ]  # fmt: skip
    outcomes = [each.outcome for each in made]
    assert all(isinstance(each, Measured) and each.latency.gpu_state == GpuState(strangers=1) for each in outcomes)


def test_nobody_waits_while_the_process_ends() -> None:
    card = Card(float("inf"))
    card.ending = True
    card.attendant.measured(card.taking(1.0, lambda: Contest(measured())))
    assert len(card.pauses) == 1


def test_a_process_that_the_idle_card_shows_to_do_nothing_is_waited_for_once_and_is_no_stranger() -> None:
    """Where the driver does not say who computes."""
    lines: list[str] = []
    now, busy = [0.0], [0]

    def pause(seconds: float) -> bool:
        now[0] += seconds
        return False

    there = GpuPresence((UNKNOWN,), 1)
    attendant = Attendant(lambda: replace(there, utilisation_percent=busy[0]), lines.append, pause, lambda: now[0])
    for _ in range(3):
        found = attendant.measured(lambda: Contest(measured(strangers=1)))
        assert isinstance(found.outcome, Measured)
        assert found.outcome.latency.gpu_state == GpuState(strangers=0)
    assert [line.partition(":")[0] for line in lines] == ["paused", "goes on"]
    busy[0] = 90  # it begins to compute, which only samples show
    spread = Contest(measured(p90_us=200.0, strangers=1))
    found = attendant.measured(lambda: spread)
    assert found == spread
    assert lines[-1].startswith("goes on beside others, which 300 s of waiting did not outlast: others are on it: pid")
