from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from flywheel.errors import NoGpuError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig, validate
from flywheel.judge.bench import judge_latency
from flywheel.lowering.lower import lower
from flywheel.measure.dismissal import is_dismissed
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Crashed, Implausible, Incorrect, Measured, NoMemory, Rejected, TimedOut
from flywheel.measure.verdict import judge
from flywheel.models.decoder import decode_step
from flywheel.vm.client import Client, Limits

Faulty = Callable[..., MegakernelProgram]


@pytest.fixture(scope="module")
def benches() -> Iterator[ModuleType]:
    """The module of the bench that goes wrong; spawned workers inherit the path to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield importlib.import_module("faulty_bench")


@pytest.fixture
def faulty(benches: ModuleType) -> Faulty:
    """`faulty(fault, **config)`: a program for six SMs of this GPU's architecture, else of an H100's."""
    from flywheel.vm.gpu.driver import open_gpu

    try:
        arch = open_gpu().sm_arch
    except NoGpuError:
        arch = 90
    alike = next(target for target in TARGETS.values() if target.sm_arch == arch)

    def build(fault: str | None = None, sms: int = 6, **config: object) -> MegakernelProgram:
        target = replace(alike, name="few", num_sms=sms)
        step = decode_step(benches.SPEC, benches.CONTEXT, DType.BF16)
        program = lower(step, ScheduleConfig(**config), target)  # type: ignore[arg-type]
        return program if fault is None else replace(program, meta={**program.meta, "fault": fault})

    return build


@pytest.fixture(scope="module")
def client(benches: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A worker with the bench that goes wrong; skips without a GPU."""
    mark = tmp_path_factory.mktemp("worker") / "killed"
    with Client(partial(benches.make_faulty, str(mark)), Limits(start_s=300, answer_s=120)) as client:
        try:
            client.ready()
        except NoGpuError as error:
            pytest.skip(str(error))
        yield client


@pytest.fixture
def measured(client: Client, faulty: Faulty) -> Iterator[None]:
    """Whatever a test does to the worker, the next good program is measured."""
    yield
    outcome = client.measure(faulty())
    assert isinstance(outcome, Measured), outcome
    assert (outcome.latency.samples, outcome.latency.l2_state) == (30, "clean")
    assert outcome.verdict.positions == (0, 32, 62, 63)


def test_a_latency_below_the_floor_is_implausible(faulty: Faulty) -> None:
    program = faulty()
    assert program.target is not None
    floor = floor_us(weight_bytes_read(program), program.target)
    verdict = judge(error=0.0, where="logits", positions=[1], dtype="BF16")

    def latency(us: float) -> MeasuredLatency:
        return MeasuredLatency(us, us, us, 30, 3, "flushed")

    assert judge_latency(program, latency(0.9 * floor), verdict) == Implausible(0.9 * floor, floor)
    assert judge_latency(program, latency(floor), verdict) == Measured(latency(floor), verdict)


def test_the_planted_wait_is_what_the_proof_rules_out(benches: ModuleType, faulty: Faulty) -> None:
    assert validate(faulty(), strict=True).ok
    assert not validate(benches.never_signalled(faulty()), strict=True).ok


@pytest.mark.gpu
@pytest.mark.usefixtures("measured")
class TestFaultsOnTheGpu:
    """Each has an outcome of its own, and costs the next program nothing."""

    def test_a_nan_among_the_weights_is_incorrect_and_the_verdict_shows_it(
        self, client: Client, faulty: Faulty
    ) -> None:
        outcome = client.measure(faulty("nan"))
        assert isinstance(outcome, Incorrect)
        assert outcome.reason.endswith("L1.mlp_out: holds NaN or infinity, or not what it must be exactly")
        assert outcome.verdict.passed is False

    def test_a_counter_that_nobody_signals_times_out_and_is_named(self, client: Client, faulty: Faulty) -> None:
        before = client.pid
        program = faulty("never signalled")
        outcome = client.measure(program)
        assert isinstance(outcome, TimedOut)
        assert outcome.limit_s == 1.0
        assert f"task {program.tasks[-1].id} " in outcome.reason
        assert client.pid == before, "the launch was stopped, so the worker goes on"

    def test_reading_out_of_bounds_is_a_crash_of_the_programs_own(self, client: Client, faulty: Faulty) -> None:
        before = client.pid
        outcome = client.measure(faulty("out of bounds"))
        assert isinstance(outcome, Crashed)
        assert not outcome.transient
        assert "ILLEGAL" in outcome.reason.upper()
        client.ready()
        assert client.pid != before

    def test_memory_that_is_not_there_says_nothing_of_the_program(self, client: Client, faulty: Faulty) -> None:
        assert isinstance(client.measure(faulty("memory")), NoMemory)

    def test_a_grid_that_does_not_fit_is_rejected_with_the_numbers(self, client: Client, faulty: Faulty) -> None:
        outcome = client.measure(faulty(sms=1000))
        assert isinstance(outcome, Rejected)
        assert outcome.codes == ("load",)
        assert "1000 blocks" in outcome.reason

    def test_a_worker_killed_during_a_launch_is_replaced_and_the_program_measured(
        self, client: Client, faulty: Faulty
    ) -> None:
        before = client.pid
        assert isinstance(client.measure(faulty("kill")), Measured)
        assert client.pid != before

    def test_a_worker_killed_between_programs_is_replaced(self, client: Client, faulty: Faulty) -> None:
        client.ready()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        assert isinstance(client.measure(faulty(sm_assignment="round_robin")), Measured)


@pytest.mark.gpu
@pytest.mark.usefixtures("measured")
class TestContestsOnTheGpu:
    """Programs launched in turn."""

    def test_a_program_and_its_rival_are_timed_in_turn_again_and_again(self, client: Client, faulty: Faulty) -> None:
        rivals = (faulty(),)
        before = client.pid
        for assignment in ("round_robin", "load_balance", "round_robin"):
            contest = client.attempt(faulty(sm_assignment=assignment), rivals)
            assert isinstance(contest.outcome, Measured), contest.outcome
            assert isinstance(contest.rivals[0], Measured), contest.rivals
            (ours,), (its,) = contest.times_us
            assert len(ours) == len(its) == contest.outcome.latency.samples
            assert is_dismissed(ours, its) if len(ours) < 30 else len(ours) == 30
            as_fast = len(ours) == 30 and np.median(ours) <= np.median(its)
            assert (contest.outcome.latency.batch_us is not None) == as_fast
            assert contest.outcome.latency.median_us == pytest.approx(float(np.median(contest.times_us[0][0])))
        assert client.pid == before

    def test_in_a_final_every_round_loads_all_anew_and_every_program_is_checked(
        self, client: Client, faulty: Faulty
    ) -> None:
        programs = [faulty(), faulty(sm_assignment="round_robin"), faulty(pipelining_depth=4)]
        contest = client.attempt(programs[0], tuple(programs[1:]), rounds=3)
        outcomes = (contest.outcome, *contest.rivals)
        assert all(isinstance(outcome, Measured) for outcome in outcomes), outcomes
        assert [outcome.latency.samples for outcome in outcomes if isinstance(outcome, Measured)] == [30] * 3
        assert [[len(samples) for samples in rounds] for rounds in contest.times_us] == [[10] * 3] * 3
        assert len({outcome.latency.gpu_state for outcome in outcomes if isinstance(outcome, Measured)}) == 1

    def test_a_candidate_that_is_refused_costs_its_rival_nothing(self, client: Client, faulty: Faulty) -> None:
        rivals = (faulty(),)
        refused = client.attempt(faulty(sms=1000), rivals)
        assert isinstance(refused.outcome, Rejected)
        assert refused.times_us == ()
        assert isinstance(client.attempt(faulty(sm_assignment="round_robin"), rivals).outcome, Measured)
