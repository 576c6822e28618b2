from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from flywheel.ir import MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.measure.floor import floor_us, weight_bytes_read
from flywheel.measure.outcome import Contest, Predicted, Rejected, TrialOutcome
from flywheel.plan import program_id
from flywheel.search.trials import evaluate as module
from flywheel.search.trials.evaluate import evaluate
from flywheel.vm.pack import AnyPacked, pack_any
from flywheel.vm.worker import answer


def never(program: MegakernelProgram) -> TrialOutcome:
    raise AssertionError("measured")


def test_a_proved_program_is_measured(lab: Any, toy_measures: ModuleType) -> None:
    work, config = lab.workload, ScheduleConfig()
    evaluation = evaluate(config, work, lambda _: None, toy_measures.smooth)
    program = lower(work.graph, config, work.target)
    assert isinstance(evaluation.outcome, Predicted)
    assert evaluation.program_id == program_id(program)
    assert evaluation.tasks == len(program.tasks)
    assert evaluation.weight_bytes == weight_bytes_read(program)
    assert evaluation.floor_us == floor_us(weight_bytes_read(program), work.target)
    seconds = (evaluation.lower_s, evaluation.validate_s, evaluation.measure_s)
    assert all(phase is not None and phase > 0 for phase in seconds)


class Packer:
    """A bench that packs what it is given, as a GPU's bench does first."""

    def measure(self, program: MegakernelProgram | AnyPacked) -> TrialOutcome:
        assert isinstance(program, MegakernelProgram)
        pack_any(program)
        raise AssertionError("packed")

    def compare(self, program: object, rivals: object, rounds: int) -> Contest:
        raise AssertionError("compared")


@pytest.mark.parametrize(
    ("change", "context", "fact"),
    [({"head_dim": 528}, 64, "head_dim=528 is above 512"), ({"head_dim": 6}, 33, "396 bytes, no multiple of 16")],
)
def test_what_no_kernels_run_is_refused_unmeasured_as_the_worker_of_a_gpu_refuses_it(
    lab: Any, change: dict[str, int], context: int, fact: str
) -> None:
    work = replace(lab.workload, spec=replace(lab.workload.spec, **change), context=context)
    config = ScheduleConfig()
    evaluation = evaluate(config, work, lambda _: None, never)
    assert evaluation.outcome == answer(Packer(), lower(work.graph, config, work.target)).contest.outcome
    assert isinstance(evaluation.outcome, Rejected)
    assert evaluation.outcome.codes == ("load",)
    assert evaluation.outcome.reason.endswith(fact)


def test_what_lowering_refuses_is_an_outcome(lab: Any) -> None:
    evaluation = evaluate(ScheduleConfig(threads_per_block=100), lab.workload, lambda _: None, never)
    assert isinstance(evaluation.outcome, Rejected)
    assert evaluation.outcome.codes == ("config",)
    assert "threads_per_block=100" in evaluation.outcome.reason
    assert (evaluation.program_id, evaluation.tasks, evaluation.floor_us, evaluation.measure_s) == (None,) * 4


def test_what_is_not_proved_is_never_measured(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def racing(*arguments: Any) -> MegakernelProgram:
        program = lower(*arguments)
        return replace(program, tasks=tuple(replace(task, waits=()) for task in program.tasks))

    monkeypatch.setattr(module, "lower", racing)
    evaluation = evaluate(ScheduleConfig(), lab.workload, lambda _: None, never)
    assert isinstance(evaluation.outcome, Rejected)
    assert "race-read" in evaluation.outcome.codes
    assert "\n" not in evaluation.outcome.reason


def test_a_program_seen_before_is_not_measured_again(lab: Any) -> None:
    lab.run(lab.spec(trials=1))
    (record,) = lab.store.trials("toy")
    asked = []

    def seen(identity: str) -> Any:
        asked.append(identity)
        return record

    evaluation = evaluate(ScheduleConfig(), lab.workload, seen, never)
    assert evaluation.outcome is record
    assert asked == [evaluation.program_id]
