from __future__ import annotations

from functools import partial
from itertools import pairwise
from math import inf, nan
from typing import Any

import pytest

from flywheel.errors import NonFiniteError
from flywheel.measure.dismissal import HOPELESS
from flywheel.measure.latency import GpuState
from flywheel.vm.gpu import timing
from flywheel.vm.gpu.timing import summarise, time_back_to_back, time_contestants, time_in_turn, time_launches


class Loaded:
    """Launches on the host's clock, which take the next of `times_us`, then the last one again and again."""

    def __init__(self, gpu: Any, *times_us: float) -> None:
        self.gpu = gpu
        self.parts = [self]
        self.times_us = list(times_us)
        self.launches = 0
        self.limits: list[float] = []
        self.positions: set[int | None] = set()

    def launch(self, pos: int | None) -> None:
        self.launches += 1
        self.positions.add(pos)
        self.gpu.clock_us += self.times_us[0] if len(self.times_us) == 1 else self.times_us.pop(0)

    def sync(self, limit_s: float) -> None:
        self.limits.append(limit_s)


@pytest.fixture(autouse=True)
def states(monkeypatch: pytest.MonkeyPatch) -> list[GpuState]:
    """What the GPU tells from one reading to the next."""
    told = [GpuState(1000, 2000, 300.0, 40, "none"), GpuState(1500, 2500, 400.0, 50, "none")]
    monkeypatch.setattr(timing, "read_state", lambda address: told.pop(0))
    return told


def test_warm_up_launches_do_not_count(host_gpu: Any) -> None:
    loaded: Any = Loaded(host_gpu, 9000.0, 9000.0, *range(1, 12), 2000.0)
    measured = time_launches(loaded, 7, samples=11, warmup=2, limit_s=3.0)
    assert (measured.p10_us, measured.median_us, measured.p90_us) == (2.0, 6.0, 10.0)
    assert (measured.samples, measured.warmup, measured.l2_state) == (11, 2, "clean")
    assert measured.batch_us == 2000.0
    assert loaded.positions == {7}
    assert loaded.limits == [3.0, 3.0]


@pytest.mark.parametrize(("time_us", "batch"), [(10.0, 300), (500.0, 60), (5000.0, 30)])
def test_a_batch_lasts_long_enough_to_load_the_gpu(host_gpu: Any, time_us: float, batch: int) -> None:
    loaded: Any = Loaded(host_gpu, time_us)
    time_launches(loaded, None)
    assert loaded.launches == 33 + batch


def test_each_sample_finds_the_cache_emptied_unless_it_is_to_be_warm(host_gpu: Any) -> None:
    time_launches(Loaded(host_gpu, 500.0), None)  # type: ignore[arg-type]
    head_start = 10
    assert len(host_gpu.read) == 33 + head_start
    assert min(host_gpu.read) >= 2 * host_gpu.l2_bytes


def test_a_warm_cache_is_left_alone(host_gpu: Any) -> None:
    loaded: Any = Loaded(host_gpu, 500.0)
    assert time_launches(loaded, None, l2="warm").l2_state == "warm"
    assert len(host_gpu.read) == 10


def test_the_clocks_are_those_under_load_and_throttling_counts_at_any_time(
    host_gpu: Any, states: list[GpuState]
) -> None:
    states[:] = [GpuState(1, 2, throttle="sw_thermal"), GpuState(1500, 2500, throttle="sw_power_cap,sw_thermal")]
    measured = time_launches(Loaded(host_gpu, 500.0), None)  # type: ignore[arg-type]
    assert measured.gpu_state == GpuState(1500, 2500, throttle="sw_thermal,sw_power_cap")


def test_a_stranger_counts_at_any_time(host_gpu: Any, states: list[GpuState]) -> None:
    states[:] = [GpuState(strangers=2), GpuState(strangers=0)]
    measured = time_launches(Loaded(host_gpu, 500.0), None)  # type: ignore[arg-type]
    assert measured.gpu_state == GpuState(strangers=2)


def test_programs_in_turn_get_samples_of_the_same_moments(host_gpu: Any) -> None:
    first: Any = Loaded(host_gpu, 900.0, 1.0, 3.0, 5.0)
    second: Any = Loaded(host_gpu, 900.0, 2.0, 4.0, 6.0)
    order: list[str] = []
    for name, loaded in (("first", first), ("second", second)):
        launch = loaded.launch
        loaded.launch = lambda pos, name=name, launch=launch: (order.append(name), launch(pos))
    assert time_in_turn([first, second], 7, samples=3, warmup=1, limit_s=3.0) == [[1.0, 3.0, 5.0], [2.0, 4.0, 6.0]]
    assert order == ["first", "first", "second", "second"] * 2
    assert len(host_gpu.held) == 0
    assert first.positions == second.positions == {7}


@pytest.mark.parametrize("programs", [2, 3, 5])
@pytest.mark.parametrize("samples", [1, 5, 6])
def test_sample_i_of_each_program_follows_the_same_program_or_another_one(
    host_gpu: Any, programs: int, samples: int
) -> None:
    order: list[int] = []
    loaded: list[Any] = [Loaded(host_gpu, 100.0) for _ in range(programs)]
    for place, program in enumerate(loaded):
        program.launch = lambda pos, place=place: order.append(place)
    time_in_turn(loaded, None, samples=samples, warmup=1)
    behind: list[list[bool]] = [[] for _ in loaded]  # whether a launch follows one of the same program
    for before, place in pairwise([None, *order]):
        assert place is not None
        behind[place].append(before == place)
    assert all(found == behind[0] for found in behind)
    assert behind[0][:2] == [False, True]


@pytest.mark.parametrize(("factor", "samples"), [(HOPELESS, 5), (HOPELESS * 1.01, 1)])
def test_a_hopeless_program_is_cut_after_its_first_sample(host_gpu: Any, factor: float, samples: int) -> None:
    slow: Any = Loaded(host_gpu, 100.0 * factor)
    fast: Any = Loaded(host_gpu, 100.0)
    times = time_in_turn([slow, fast], None, samples=5, warmup=2)
    assert [len(found) for found in times] == [samples, samples]
    assert slow.launches == fast.launches == 2 + samples


@pytest.mark.parametrize(
    ("slower_us", "samples"),
    [(-5.0, 30), (0.1, 30), (0.23, 20), (0.28, 16), (0.35, 12), (0.5, 8), (1.5, 5), (500.0, 1)],
)
def test_a_program_that_is_surely_slower_is_cut_at_the_stage_that_shows_it(
    host_gpu: Any, slower_us: float, samples: int
) -> None:
    slow: Any = Loaded(host_gpu, 100.0 + slower_us)
    fast: Any = Loaded(host_gpu, 100.0)
    times = time_in_turn([slow, fast], None, samples=30, warmup=3, dismissing=True)
    assert [len(found) for found in times] == [samples, samples]
    assert slow.launches == fast.launches == 3 + samples


def test_a_slower_program_of_a_final_is_sampled_to_the_end(host_gpu: Any) -> None:
    programs: Any = [Loaded(host_gpu, us) for us in (150.0, 100.0)]
    assert [len(found) for found in time_in_turn(programs, None, samples=30, warmup=3)] == [30, 30]


def test_contestants_of_any_kind_take_turns_behind_an_emptied_cache(host_gpu: Any) -> None:
    order: list[str] = []
    host_gpu.kernels["read_loads"] = lambda *_: order.append("flush")

    def launch(name: str, us: float) -> None:
        order.append(name)
        host_gpu.clock_us += us

    launches = [partial(launch, "ours", 10.0), partial(launch, "graph", 900.0), partial(launch, "other", 20.0)]
    times = time_contestants(host_gpu, launches, lambda: order.append("finish"), samples=3, warmup=1)
    assert times == [[10.0] * 3, [900.0] * 3, [20.0] * 3]  # none is hopeless
    turn = ["ours", "ours", "graph", "graph", "other", "other"]
    assert [name for name in order if name != "flush"] == [*turn, *turn, "finish"]
    head_start = 10
    assert order[head_start:-1:2] == ["flush"] * 12
    assert host_gpu.held == {}


def test_a_batch_of_any_kind_counts_one_launch(host_gpu: Any) -> None:
    finished: list[float] = []

    def launch() -> None:
        host_gpu.clock_us += 300.0

    latency = summarise([500.0] * 30, 3)
    measured = time_back_to_back(host_gpu, launch, lambda: finished.append(host_gpu.clock_us), latency)
    assert (measured.batch_us, measured.median_us) == (300.0, 500.0)
    assert finished == [60 * 300.0 + 10 * 100.0]  # behind flushes
    assert measured.gpu_state == GpuState(1500, 2500, 400.0, 50, "none")


def test_the_flushing_memory_is_given_back_when_a_launch_fails(host_gpu: Any) -> None:
    loaded: Any = Loaded(host_gpu, 500.0)

    def fail(limit_s: float) -> None:
        raise TimeoutError

    loaded.sync = fail
    with pytest.raises(TimeoutError):
        time_launches(loaded, None)
    assert host_gpu.held == {}


def test_a_program_without_a_rival_is_sampled_to_the_end(host_gpu: Any) -> None:
    alone: Any = Loaded(host_gpu, 100.0)
    assert [len(found) for found in time_in_turn([alone], None, samples=10, warmup=2)] == [10]


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_a_sample_that_is_not_finite_is_refused_even_where_percentiles_hide_it(value: float) -> None:
    with pytest.raises(NonFiniteError, match="one of 41 samples"):
        summarise([500.0] * 40 + [value], 3)
