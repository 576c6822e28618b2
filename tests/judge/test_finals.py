"""Finals on a GPU that is made up: which programs are loaded, judged and timed, and when it is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from flywheel.decode.session import Step
from flywheel.ir import DType
from flywheel.judge import bench
from flywheel.judge.bench import CudaBench
from flywheel.measure.latency import GpuState, MeasuredLatency
from flywheel.measure.outcome import Incorrect, Measured
from flywheel.measure.verdict import Verdict
from flywheel.vm.pack import PackedProgram

LOGITS = torch.tensor([[1.0, 2.0, 3.0]])
RIGHT = Verdict(True, 0.0, 1.0, "nowhere", (1,), "BF16")
STATE = GpuState(throttle="none", strangers=0)


class MadeUpSession:
    """What a program that takes `us` does; its logits are `wrong` from the load of that number on."""

    dtype = DType.BF16

    def __init__(self, gpu: MadeUpGpu, us: float, wrong_from: int) -> None:
        self.us, self._gpu, self._wrong = us, gpu, gpu.loads[us] >= wrong_from

    def __enter__(self) -> MadeUpSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._gpu.closed += 1

    def read_rows(self) -> list[Step]:
        return [Step(LOGITS[0] * (-1.0 if self._wrong else 1.0), 2)]

    def time_batch(self, position: int, latency: MeasuredLatency) -> MeasuredLatency:
        return replace(latency, batch_us=7.0, gpu_state=STATE)


class MadeUpGpu:
    """A model, its judge and the clock of one."""

    def __init__(self, wrong_from: dict[float, int]) -> None:
        self.loads: dict[float, int] = {}
        self.closed = 0
        self.judged: list[float] = []
        self.filled = 0
        self.positions = (1,)
        self._wrong_from = wrong_from

    def load_packed(self, packed: Any) -> MadeUpSession:
        us = packed.program.us
        self.loads[us] = self.loads.get(us, -1) + 1
        return MadeUpSession(self, us, self._wrong_from.get(us, 1000))

    def examine(self, session: MadeUpSession) -> Any:
        self.judged.append(session.us)
        return SimpleNamespace(verdict=RIGHT, logits=LOGITS)

    def prepare(self, session: MadeUpSession, position: int) -> list[int]:
        self.filled += 1
        return [0]

    def time(self, sessions: Sequence[MadeUpSession], *_: object, samples: int, warmup: int) -> list[list[float]]:
        return [[session.us] * samples for session in sessions]


def contest(monkeypatch: pytest.MonkeyPatch, gpu: MadeUpGpu, *latencies_us: float) -> Any:
    """The final of programs that take so long."""
    made = object.__new__(CudaBench)
    vars(made).update(_name="made up", _model=gpu, _judge=gpu, _last=([0], 1), _rivals=(), _rival_programs=[], _kept=[])
    monkeypatch.setattr(bench, "time_sessions", gpu.time)
    monkeypatch.setattr(bench, "_packed", lambda program: program)
    monkeypatch.setattr(bench, "judge_latency", lambda program, latency, verdict: Measured(latency, verdict))
    programs = [cast("PackedProgram", SimpleNamespace(program=SimpleNamespace(us=us))) for us in latencies_us]
    return made.compare(programs[0], programs[1:], rounds=12)


def test_a_final_ends_when_one_program_is_surely_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    found = contest(monkeypatch, MadeUpGpu({}), 1000.0, 1010.0, 1020.0)
    assert [len(rounds) for rounds in found.times_us] == [4, 4, 4]
    assert [outcome.latency.samples for outcome in (found.outcome, *found.rivals)] == [40, 40, 40]
    assert (found.outcome.latency.batch_us, found.rivals[0].latency.batch_us) == (7.0, None)
    assert {outcome.latency.gpu_state for outcome in (found.outcome, *found.rivals)} == {STATE}


def test_a_final_of_twins_takes_all_rounds_and_judges_each_program_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = MadeUpGpu({})
    found = contest(monkeypatch, gpu, 1000.0, 1000.5)
    assert [len(rounds) for rounds in found.times_us] == [12, 12]
    assert (gpu.loads, gpu.closed, gpu.filled) == ({1000.0: 11, 1000.5: 11}, 24, 12)
    assert sorted(gpu.judged) == [1000.0, 1000.5]


def test_a_program_that_computes_something_else_in_a_later_round_ends_the_final(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = contest(monkeypatch, MadeUpGpu({1000.5: 2}), 1000.0, 1000.5)
    assert [len(rounds) for rounds in found.times_us] == [3, 3]
    assert isinstance(found.outcome, Measured)
    assert isinstance(found.rivals[0], Incorrect)
    assert found.rivals[0].reason.startswith("while timed: ")
