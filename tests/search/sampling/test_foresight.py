from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flywheel.cost_model import MODEL_VERSION, STOCK, Predictor
from flywheel.errors import UsageError
from flywheel.ir import MegakernelProgram, ScheduleConfig
from flywheel.measure.environment import Environment
from flywheel.measure.latency import PredictedLatency
from flywheel.measure.outcome import Contest, Crashed, Measured, Predicted
from flywheel.measure.record import JUDGED_WITH, MEASURED_WITH, TrialRecord
from flywheel.search.campaign import CampaignResult, CampaignRun
from flywheel.search.opening import open_campaign
from flywheel.search.sampling import foresight
from flywheel.search.sampling.foresight import Prefilter
from flywheel.search.sampling.study import NOT_TRIED, CampaignStudy, Told
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec, with_name
from flywheel.search.trials import measuring
from flywheel.search.trials.evaluate import Prepared
from flywheel.search.trials.fleet import Fleet
from flywheel.search.trials.processes import ProcessHost
from flywheel.search.trials.station import Measuring, Predicting, Setup, Station
from flywheel.vm.client import Limits


@dataclass(frozen=True)
class ToyPredictor(Predictor):
    """Says `scale` times what `latency_us` says."""

    latency_us: Callable[[MegakernelProgram], float] = lambda program: 1.0
    scale: float = 1.0

    def predict(self, program: MegakernelProgram) -> PredictedLatency:
        return PredictedLatency(self.scale * self.latency_us(program), self.version)


class Here:
    """A host in this process."""

    name = "here"

    def __init__(self, setup: Setup) -> None:
        self._station = Station(setup, {})
        self.measured: list[ScheduleConfig] = []

    def start(self) -> Environment:
        return self._station.ready()

    def prepare(self, config: ScheduleConfig) -> Prepared:
        return self._station.prepare(config)

    def measure(self, config: ScheduleConfig, rivals: Sequence[ScheduleConfig], rounds: int) -> tuple[Contest, float]:
        if rounds == 1:
            self.measured.append(config)
        return self._station.measure(config, rivals, rounds)

    def end(self, now: bool) -> None:
        pass


class Site:
    """Campaigns that measure what the toy takes."""

    def __init__(self, lab: Any, toys: ModuleType) -> None:
        self.lab, self.toys = lab, toys
        self.predictor = ToyPredictor(None, "toy", toys.toy_us, 3.0)
        self.measured: list[ScheduleConfig] = []

    def run(self, predictor: Predictor | None = None, space: Any = None, **options: Any) -> CampaignResult:
        base = {"measure": "cuda", "sampler": "grid", "trials": 28, "prefilter": 1.05}
        spec = self.lab.spec(**{**base, **options})
        used = predictor or self.predictor
        with self.fleet(used if spec.prefilter is not None else None) as fleet:
            space = space or self.lab.space()
            name = open_campaign(spec, space, self.lab.store, fresh=False)
            environment = self.lab.environment
            run = CampaignRun(spec, name, space, self.lab.store, fleet, environment, used)
            return run.run(lambda _: None, lambda: False)

    @contextmanager
    def fleet(self, predictor: Predictor | None) -> Iterator[Fleet]:
        measure = Predicting(lambda program: self.toys.measured(self.toys.toy_us(program), 30))
        host = Here(Setup(self.lab.workload, measure, lambda: self.lab.environment, predictor))
        look = partial(measuring.look, self.lab.store, "few", "bf16")
        with Fleet([host], look) as fleet:
            yield fleet
        self.measured = host.measured

    def rows(self, name: str = "toy") -> list[TrialRecord]:
        rows: list[TrialRecord] = self.lab.store.trials(name)
        return rows


@pytest.fixture
def site(lab: Any, toy_measures: ModuleType) -> Site:
    return Site(lab, toy_measures)


def test_what_is_predicted_to_be_much_worse_than_the_best_is_not_measured(site: Site) -> None:
    result = site.run()
    best: TrialRecord | None = None
    for row in site.rows():
        assert row.predictor == "toy" and row.predicted_us is not None
        slow = best is not None and row.predicted_us > 1.05 * best.predicted_us  # type: ignore[operator]
        assert row.outcome == ("predicted" if slow else "measured")
        assert row.latency_us == (None if slow else pytest.approx(row.predicted_us / 3.0))
        if not slow and (best is None or row.latency_us < best.latency_us):  # type: ignore[operator]
            best = row
    assert result.outcomes["predicted"] > 5
    assert result.outcomes["predicted"] + result.outcomes["measured"] == result.trials == 28
    assert len(site.measured) == result.outcomes["measured"]


def test_what_is_kept_is_the_same_as_without(site: Site) -> None:
    filtered, whole = site.run(), site.run(name="whole", prefilter=None)
    assert filtered.best is not None and whole.best is not None
    assert filtered.best.program_id == whole.best.program_id
    assert whole.outcomes == {"measured": 28}


def test_predictions_are_never_the_best_and_nothing_is_told_of_them(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Told] = []
    tell = CampaignStudy.tell
    monkeypatch.setattr(CampaignStudy, "tell", lambda self, trial, us: (told.append(us), tell(self, trial, us))[1])
    flattering = replace(site.predictor, scale=1e-3)  # every prediction is far below every measurement
    result = site.run(flattering)
    assert result.best is not None and result.best.outcome == "measured"
    assert told == [NOT_TRIED if row.outcome == "predicted" else row.latency_us for row in site.rows()]
    assert NOT_TRIED in told
    again = site.run(flattering)
    assert (again.best, again.new_trials) == (result.best, 0)


def test_good_schedules_of_elsewhere_are_measured_whatever_is_predicted(site: Site) -> None:
    space = make_space(site.lab.workload)
    good = [space.to_config(choice) for choice in space.known_good()]
    asked: list[int] = []

    def worse_and_worse(program: MegakernelProgram) -> float:
        asked.append(1)
        return 10.0 ** len(asked)

    site.run(replace(site.predictor, latency_us=worse_and_worse), space, seeds=True, sampler="random", trials=6)
    assert [row.outcome for row in site.rows()] == ["measured"] * 3 + ["predicted"] * 3
    assert [row.config_id for row in site.rows()][:3] == [config.config_id for config in good]


def test_resuming_decides_by_the_rows_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foresight, "lower", None)  # nothing is lowered again
    for name in ("first", "second"):
        for trials in (9, 20):
            site.run(name=name, sampler="random", trials=trials)
    first, second = ([(row.config_id, row.outcome) for row in site.rows(name)][:20] for name in ("first", "second"))
    assert [config for config, _ in first] == [config for config, _ in second]
    assert {"measured", "predicted"} == {outcome for _, outcome in first}


def test_a_prediction_never_answers_a_measurement(site: Site) -> None:
    site.run()
    skipped = {row.program_id for row in site.rows() if row.outcome == "predicted"}
    site.run(name="whole", prefilter=None)
    whole = site.rows("whole")
    assert {row.outcome for row in whole} == {"measured"}
    assert {row.program_id for row in whole if row.source == "search"} == skipped


def test_a_config_that_is_proposed_again_is_judged_again(site: Site) -> None:
    site.run(sampler="random", trials=60, space=site.lab.space(threads="320"))
    assert "store" not in {row.source for row in site.rows() if row.outcome == "predicted"}


def test_the_limit_follows_the_best_and_is_none_without_one(site: Site) -> None:
    site.run(prefilter=None, trials=3)
    measured = site.rows()[0]
    limits = Prefilter(2.0, site.predictor, site.lab.workload)
    assert limits.limit_us(None) is None
    assert measured.predicted_us is None
    # A row of a time without predictions: its program is predicted now.
    assert limits.limit_us(measured) == pytest.approx(6.0 * measured.latency_us)  # type: ignore[operator]
    known = replace(measured, predicted_us=7.0, predictor="toy")
    assert limits.limit_us(known) == 14.0
    other = replace(measured, predicted_us=7.0, predictor="another")
    assert limits.limit_us(other) == limits.limit_us(measured)
    columns = ("latency_us", *MEASURED_WITH, *JUDGED_WITH, "floor_us", "floor_fraction")
    unmeasured = dict.fromkeys(columns)
    guess = replace(known, outcome="predicted", **unmeasured)  # type: ignore[arg-type]
    assert limits.limit_us(guess) is None


@pytest.mark.parametrize("factor", [0.99, 0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_below_one_is_refused(factor: float) -> None:
    with pytest.raises(UsageError, match="is not a finite factor of at least 1"):
        CampaignSpec("m", "h100", prefilter=factor)


def test_only_measurements_can_be_saved() -> None:
    with pytest.raises(UsageError, match="measure='predict' makes none"):
        CampaignSpec("m", "h100", measure="predict", prefilter=2.0)
    auto = CampaignSpec("m", "h100", prefilter=2.0)
    assert with_name(auto, "predict").prefilter is None
    assert with_name(auto, "cuda").prefilter == 2.0


def test_processes_predict_what_they_prepare_and_measure_what_is_within_the_limit(
    lab: Any, toy_measures: ModuleType, tmp_path: Path
) -> None:
    space = lab.space()
    configs = [space.to_config({**space.known_good()[0], "depth": depth}) for depth in (0, 2, 4)]  # the last one dies
    means = Measuring(partial(toy_measures.make_toy, str(tmp_path), "child"), limits=Limits(start_s=120, answer_s=120))
    host = ProcessHost("gpu", Setup(lab.workload, means, toy_measures.here, STOCK))
    with Fleet([host], lambda *_: None, ahead=1) as fleet:
        first = fleet.submit(configs[0])()
        assert isinstance(first.outcome, Measured) and first.predicted is not None
        limit_us = first.predicted.latency_us
        slow, spared, died = (
            fleet.submit(config, limit_us=limit)
            for config, limit in ((configs[1], limit_us / 2), (configs[2], limit_us / 2), (configs[2], None))
        )
        assert slow().outcome == Predicted(slow().predicted)
        assert slow().predicted.model_version == MODEL_VERSION
        assert spared().outcome == Predicted(spared().predicted)
        assert isinstance(died().outcome, Crashed)
    assert len((tmp_path / "attempts").read_text().split()) == 2
