from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from flywheel.cost_model import MODEL_VERSION
from flywheel.errors import NoGpuError
from flywheel.ir import MegakernelProgram, ScheduleConfig
from flywheel.measure.outcome import Contest, Crashed, Measured, Predicted, Rejected
from flywheel.search.appraise import ROUNDS, appraise, changes, in_turn
from flywheel.search.knowledge.importing import import_trials
from flywheel.search.trials.engine import InlineEngine


def test_a_config_is_compared_with_the_best_of_the_same_work(lab: Any) -> None:
    result = lab.run(lab.spec(trials=5))
    config = lab.space().to_config(lab.space().known_good()[0])
    found = appraise(config, lab.workload, "predict", lab.store)
    assert isinstance(found.outcome, Predicted)
    assert found.incumbent == result.best
    other = replace(lab.workload, context=65)
    assert appraise(config, other, "predict", lab.store).incumbent is None
    assert appraise(config, lab.workload, "predict", None).incumbent is None


def test_predictions_of_another_cost_model_do_not_compete(lab: Any) -> None:
    lab.run(lab.spec(trials=2))
    import_trials(lab.store, "old", [replace(row, predictor="0") for row in lab.store.trials("toy")])
    config = lab.space().to_config(lab.space().known_good()[0])
    incumbent = appraise(config, lab.workload, "predict", lab.store).incumbent
    assert incumbent is not None
    assert (incumbent.predictor, incumbent.campaign) == (MODEL_VERSION, "toy")


def test_the_incumbent_s_knobs_stand_before_the_config_s(lab: Any) -> None:
    space = lab.space()
    good = space.known_good()[0]
    before = space.to_config({**good, "depth": 1})
    after = space.to_config({**good, "depth": 3, "threads": 192})
    assert changes(space, before, after) == {"depth": (1, 3), "threads": (good["threads"], 192)}
    assert changes(space, after, after) == {}


def test_outside_the_space_the_config_s_own_parameters_differ(lab: Any) -> None:
    space = lab.space()
    before = space.to_config(space.known_good()[0])
    found = changes(space, before, ScheduleConfig(pipelining_depth=5))
    assert found["pipelining_depth"] == (before.pipelining_depth, 5)
    assert found["tiling.gemv.lm_head.N_tile"] == (64, 0)


def test_a_config_that_lowering_refuses_has_codes_and_no_latency(lab: Any) -> None:
    found = appraise(ScheduleConfig(threads_per_block=33), lab.workload, "predict", lab.store)
    assert isinstance(found.outcome, Rejected)
    assert found.outcome.codes == ("config",)
    assert found.evaluation.program_id is None


def test_measuring_needs_the_gpu(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.search.appraise.settle_measure", _refuse)
    with pytest.raises(NoGpuError):
        appraise(ScheduleConfig(), lab.workload, "cuda", None)


def test_measuring_is_in_turn_with_the_incumbent(
    lab: Any, toy_measures: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(program: Any) -> Any:
        return toy_measures.measured(2 * toy_measures.toy_us(program), 30)  # in an hour with low clocks

    lab.run(lab.spec(measure="cuda", trials=2), InlineEngine(lab.bench(measure)))
    monkeypatch.setattr("flywheel.search.appraise.settle_measure", lambda *_: "cuda")
    monkeypatch.setattr("flywheel.search.trials.measuring.make_bench", toy_measures.make_plain)
    space = lab.space()
    config = space.to_config({**space.known_good()[0], "depth": 8, "threads": 512})
    found = appraise(config, lab.workload, "cuda", lab.store)
    assert isinstance(found.outcome, Measured)
    assert found.incumbent is not None
    assert found.gained is not None
    assert found.gained.rival_us == pytest.approx(found.incumbent.latency_us / 2)
    assert found.gained.low_us == pytest.approx(found.gained.rival_us - found.outcome.latency.median_us)
    assert appraise(config, lab.workload, "cuda", None).gained is None


def test_a_rival_that_does_not_run_today_is_not_the_config_s_fault() -> None:
    alone = Contest(Crashed("its own", transient=False))
    asked = []

    class Broken:
        def compare(self, program: Any, rivals: tuple[Any, ...] = (), rounds: int = 1) -> Contest:
            asked.append((rivals, rounds))
            return Contest(Rejected(("load",), "the rival's")) if rivals else alone

    program = MegakernelProgram()
    assert in_turn(Broken(), (program,), program) is alone  # type: ignore[arg-type]
    assert in_turn(Broken(), (), program) is alone  # type: ignore[arg-type]
    assert asked == [((program,), ROUNDS), ((), 1), ((), 1)]


def _refuse(*_: object) -> str:
    raise NoGpuError("none here")
