from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import pytest

from flywheel.cost_model import MACHINES, STOCK, Predictor
from flywheel.ir import ScheduleConfig
from flywheel.search.knobs import Choice
from flywheel.search.run import _foresee
from flywheel.search.sampling.foreseen import _PAIRS, ForeseenSampler
from flywheel.search.sampling.foresight import Foreseen, Foresight, is_calibrated, predict_config
from flywheel.search.sampling.local import LocalSampler
from flywheel.search.sampling.samplers import Steering, make_sampler
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Dimension, Space
from flywheel.search.workload import make_workload

BEST = {f"k{knob}": (3 * knob + 1) % (2 + knob % 5) for knob in range(8)}


class Table(Space):
    """A space whose configs are its choices, in a knob of their own that no lowerer reads."""

    def to_config(self, choice: Choice) -> ScheduleConfig:
        """The choice as a tiling."""
        return ScheduleConfig(tiling={"table": {name: int(value) for name, value in choice.items()}})

    def known_good(self) -> list[dict[str, Any]]:
        """Two poor starts."""
        return [dict.fromkeys(BEST, 0), dict.fromkeys(BEST, 1)]


class Oracle:
    """Predictions of a table, and a list of how many were asked for at once."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.unexpected: list[int] = []
        self.expected: set[str] = set()
        self.ids: set[str] = set()

    def expect(self, configs: Sequence[ScheduleConfig]) -> None:
        """What will be asked for."""
        self.expected.update(config.config_id for config in configs)

    def predict(self, configs: Sequence[ScheduleConfig]) -> list[float | None]:
        """Of all, in order."""
        self.asked.append(len(configs))
        self.ids |= {config.config_id for config in configs}
        self.unexpected.append(sum(config.config_id not in self.expected for config in configs))
        return [predicted(config.tiling["table"]) for config in configs]


@pytest.fixture
def table(lab: Any) -> Table:
    """Eight knobs of two to six values: 21,600 configurations."""
    dimensions = [Dimension(name, tuple(range(2 + knob % 5)), knob % 3 != 0) for knob, name in enumerate(BEST)]
    return Table(lab.workload, tuple(dimensions))


def predicted(choice: Choice) -> float | None:
    """100 us at BEST, 4 more for each knob that is elsewhere; part of the space has no program."""
    if choice["k5"] == 0 and choice["k2"] == 2:
        return None
    return 100.0 + 4.0 * sum(choice[name] != best for name, best in BEST.items())


def measured(choice: Choice) -> float | None:
    """What was predicted, but for two knobs, of which the prediction is 6 % off, the wrong way round."""
    foreseen = predicted(choice)
    wrong = 0.06 * ((choice["k4"] == BEST["k4"]) + (choice["k7"] == BEST["k7"]))
    return None if foreseen is None else foreseen * (1.0 + wrong)


def apart(one: Choice, other: Choice) -> int:
    """Knobs in which they differ."""
    return sum(one[name] != other[name] for name in one)


def drive(study: CampaignStudy, trials: int) -> list[tuple[dict[str, Any], float | None]]:
    told = []
    for _ in range(trials):
        trial, choice = study.ask()
        study.tell(trial, measured(choice))
        told.append((choice, measured(choice)))
    return told


def begin(space: Space, oracle: Any, seed: int = 0, known: Sequence[Any] = ()) -> CampaignStudy:
    study = CampaignStudy(space, "descent", seed, known, measured=True, foresight=oracle)
    for start in space.known_good() if not known else ():
        study.enqueue(start)
    return study


def test_after_the_starts_each_trial_is_one_or_two_knobs_away_from_one_of_the_best(table: Table) -> None:
    told = drive(begin(table, Oracle()), 40)
    for count in range(2, 40):
        assert min(apart(told[count][0], choice) for choice, _ in told[:count]) <= 2


def test_the_starts_of_which_most_is_expected_are_measured_first(table: Table) -> None:
    study = CampaignStudy(table, "descent", 0, [], measured=True, foresight=Oracle())  # type: ignore[arg-type]
    told = drive(study, 2)
    starts = sorted(table.known_good(), key=lambda choice: predicted(choice) or 1e9)
    assert [choice for choice, _ in told] == starts


def test_measurements_find_what_predictions_are_wrong_about(table: Table) -> None:
    every = [measured({**BEST, "k4": k4, "k7": k7}) or 1e9 for k4 in range(6) for k7 in range(4)]
    for seed in range(3):
        told = drive(begin(table, Oracle(), seed), 40)
        assert min(value for _, value in told if value is not None) == min(every)


def test_nothing_is_proposed_twice_and_nothing_that_has_no_program(table: Table) -> None:
    told = drive(begin(table, Oracle()), 60)
    assert len({tuple(choice.values()) for choice, _ in told}) == 60
    assert all(value is not None for _, value in told)


def test_the_same_seed_and_measurements_propose_the_same_also_after_a_stop(table: Table) -> None:
    whole = drive(begin(table, Oracle(), seed=1), 40)
    assert drive(begin(table, Oracle(), seed=1), 40) == whole
    assert drive(begin(table, Oracle(), seed=1, known=whole[:25]), 15) == whole[25:]


def test_what_a_trial_may_ask_for_is_expected_while_the_one_before_is_measured(table: Table) -> None:
    oracle = Oracle()
    for choice, _ in drive(begin(table, oracle), 30)[2:]:
        near = [{**choice, each.name: value} for each in table.dimensions for value in each.values]
        wanted = {table.to_config(each).config_id for each in near}
        assert wanted - {table.to_config(choice).config_id} <= oracle.expected | oracle.ids


def test_what_is_predicted_while_the_gpu_gets_ready_is_what_the_first_proposal_asks_for_but_for_pairs(
    lab: Any, table: Table
) -> None:
    meanwhile, needed = Oracle(), Oracle()
    _foresee(lab.spec(sampler="descent", seed=3), table, meanwhile)  # type: ignore[arg-type]
    drive(begin(table, needed, seed=3), 3)
    assert len(needed.ids - meanwhile.ids - meanwhile.expected) <= _PAIRS


def test_what_is_under_way_is_not_proposed_again(table: Table) -> None:
    study = begin(table, Oracle())
    drive(study, 20)
    pending = [tuple(study.ask()[1].values()) for _ in range(10)]
    assert len(set(pending)) == 10


def test_a_small_space_is_measured_to_its_end(lab: Any) -> None:
    names = sorted(BEST)
    small = Table(lab.workload, tuple(Dimension(name, (0, 1) if name in names[:3] else (0,), True) for name in BEST))
    told = drive(begin(small, Oracle()), 8)
    assert len({tuple(choice.values()) for choice, _ in told}) == 8


def test_without_predictions_to_trust_measurements_lead_as_with_local(table: Table) -> None:
    assert isinstance(make_sampler("descent", 0, 0, Steering()), LocalSampler)
    alone = CampaignStudy(table, "descent", 5, [], measured=True)
    assert drive(alone, 12) == drive(CampaignStudy(table, "local", 5, [], measured=True), 12)
    foreseeing = make_sampler("descent", 0, 0, Steering(lambda asked: [1.0] * len(asked)))
    assert isinstance(foreseeing, ForeseenSampler)


def test_constants_that_were_scaled_from_another_gpu_are_no_calibration() -> None:
    here, there = (make_workload("smollm2-135m", gpu, "bf16", 128) for gpu in ("h200", "l4"))
    assert is_calibrated(STOCK, here)
    assert not is_calibrated(STOCK, there)
    assert is_calibrated(Predictor(MACHINES["h200"]), there)


def test_several_processes_predict_what_one_does(lab: Any) -> None:
    space = lab.space()
    chosen = [space.known_good()[0], *({**space.known_good()[0], "depth": depth} for depth in (0, 2, 4))]
    configs = [*map(space.to_config, chosen), ScheduleConfig(tiling={"gemv": {"N_tile": 7}})]
    with Foresight(lab.workload, STOCK, jobs=1) as one, Foresight(lab.workload, STOCK, jobs=2) as two:
        said = one.predict(configs)
        assert said == two.predict(configs) == [predict_config(each, lab.workload, STOCK) for each in configs]
        assert one.predict([]) == two.predict([]) == []
    assert said[-1] is None
    assert all(value is not None and log(value) > 0 for value in said[:-1])
    assert (one.said.count, one.said.least_us) == (5, min(value for value in said if value is not None))
    assert Foreseen() == Foresight(lab.workload, STOCK, jobs=1).said
