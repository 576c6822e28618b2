from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flywheel.ir import MegakernelProgram
from flywheel.measure.outcome import Measured, TrialOutcome
from flywheel.search.trials.evaluate import evaluate
from flywheel.search.trials.station import Measuring, Predicting, Setup, Station


def test_what_is_asked_at_once_is_answered_with_what_is_said_of_the_program(lab: Any) -> None:
    asked: list[MegakernelProgram] = []

    def measure(program: MegakernelProgram) -> TrialOutcome:
        asked.append(program)
        return lab.measure(program)

    space = lab.space()
    config = space.to_config(space.known_good()[0])
    inline = evaluate(config, lab.workload, lambda _: None, lab.measure)
    later = Station(Setup(lab.workload, Predicting(measure)), {}).prepare(config)
    assert (later.program_id, later.answer, len(asked)) == (inline.program_id, None, 0)
    at_once = Station(Setup(lab.workload, Predicting(measure, at_once=True)), {}).prepare(config)
    assert (at_once.program_id, at_once.answer, len(asked)) == (inline.program_id, inline.outcome, 1)
    assert at_once.program is None


def test_nobody_is_asked_of_a_refused_config(lab: Any) -> None:
    def measure(program: MegakernelProgram) -> TrialOutcome:
        raise AssertionError("a refused config has no program")

    space = lab.space()
    config = replace(space.to_config(space.known_good()[0]), threads_per_block=33)
    prepared = Station(Setup(lab.workload, Predicting(measure, at_once=True)), {}).prepare(config)
    assert prepared.refused is not None
    assert (prepared.answer, prepared.answer_s) == (None, None)


def test_a_measurement_waits_for_a_quiet_gpu_and_says_so(
    lab: Any, toy_measures: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    means = Measuring(partial(toy_measures.make_toy, str(tmp_path)), attend=toy_measures.attend)
    station = Station(Setup(lab.workload, means, toy_measures.here), {})
    space = lab.space()
    try:
        found = [station.measure(space.to_config(choice), (), 1)[0].outcome for choice in space.known_good()[:2]]
    finally:
        station.close()
    assert all(isinstance(outcome, Measured) for outcome in found)
    assert [line.partition(";")[0] for line in capsys.readouterr().err.splitlines()] == [
        "flywheel: paused: the GPU is not quiet: others compute on it: pid 4711 (train, 7 bytes, 90 % busy)",
        "flywheel: goes on: the GPU is quiet after 5 s",
    ]
