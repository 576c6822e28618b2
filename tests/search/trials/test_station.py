from __future__ import annotations

from dataclasses import replace
from typing import Any

from flywheel.ir import MegakernelProgram
from flywheel.measure.outcome import TrialOutcome
from flywheel.search.trials.evaluate import evaluate
from flywheel.search.trials.station import Predicting, Setup, Station


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
