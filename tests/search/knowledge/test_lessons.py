from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from flywheel.cost_model import STOCK
from flywheel.ir import TARGETS
from flywheel.measure.standing import trials_of
from flywheel.search.campaign import CampaignRun
from flywheel.search.knobs import Choice
from flywheel.search.knowledge.lessons import Taught, axes_of, lessons_for, likeness
from flywheel.search.opening import open_campaign
from flywheel.search.sampling.study import CampaignStudy
from flywheel.search.space import Space, make_space
from flywheel.search.trials.engine import InlineEngine
from flywheel.search.workload import Workload, make_workload


@pytest.fixture(scope="module")
def works() -> tuple[Workload, Workload]:
    """Two models of other sizes on one GPU."""
    return make_workload("llama3.2-1b", "h200", "bf16", 512), make_workload("qwen3-0.6b", "h200", "bf16", 512)


def took(space: Space, choice: Choice) -> float:
    """A latency in us that is least with two tiles of the down projection an SM, depth 2 and 448 threads."""
    axes = {name: axis.values for name, axis in axes_of(space).items()}
    at = {each.name: axes[each.name][each.values.index(choice[each.name])] for each in space.dimensions}
    lost = 0.02 * abs(at["rows.down"] - 1.0) + 0.01 * abs(at["depth"] - np.log2(3)) + 0.03 * (choice["threads"] != 448)
    return float(space.workload.spec.hidden * np.exp(lost))


def near(space: Space) -> list[Choice]:
    """A known good choice and all that differ from it in one knob."""
    good = space.known_good()[0]
    return [good, *({**good, each.name: value} for each in space.dimensions for value in each.values)]


class Predictions:
    """The same prediction for all."""

    def expect(self, configs: Any) -> None:
        """Of no use."""

    def predict(self, configs: Any) -> list[float]:
        """A thousand us each."""
        return [1000.0 for _ in configs]


def test_a_value_that_means_the_same_for_two_works_has_the_same_coordinate(works: tuple[Workload, Workload]) -> None:
    one, other = (axes_of(make_space(work)) for work in works)
    for name in ("threads", "depth", "placement", "hand_off", "copies", "smem"):
        assert one[name] == other[name]
    assert min(abs(value) for value in one["rows.down"].values) < 0.5  # about one tile an SM
    assert min(abs(value) for value in other["rows.gate_up"].values) < 0.5


@pytest.mark.parametrize("gpu", TARGETS)
def test_every_value_of_every_gpu_has_a_coordinate_of_its_own(gpu: str) -> None:
    space = make_space(make_workload("smollm2-135m", gpu, "bf16", 128, batch=2))
    for each in space.dimensions:
        values = axes_of(space)[each.name].values
        assert len(set(values)) == len(each.values)
        assert np.isfinite(values).all()


def test_what_is_best_elsewhere_is_tried_early_and_carried_by_its_tiles(works: tuple[Workload, Workload]) -> None:
    source, here = map(make_space, works)
    lessons = lessons_for(here, [Taught(source.workload, [(each, took(source, each)) for each in near(source)])])
    assert lessons is not None
    study = CampaignStudy(here, "descent", 0, [], True, Predictions(), lessons)  # type: ignore[arg-type]
    taught, alone = [], CampaignStudy(here, "descent", 0, [], True, Predictions())  # type: ignore[arg-type]
    blind = []
    for asked, told in ((study, taught), (alone, blind)):
        for _ in range(10):
            trial, choice = asked.ask()
            told.append(took(here, choice))
            asked.tell(trial, told[-1])
    best = min(took(here, choice) for choice in near(here))
    assert min(taught) < best * 1.01
    assert min(taught[:4]) < min(blind[:4])


def test_nothing_teaches_nothing(works: tuple[Workload, Workload]) -> None:
    space = make_space(works[0])
    assert lessons_for(space, []) is None
    assert lessons_for(space, [Taught(works[1], [(make_space(works[1]).known_good()[0], 700.0)])]) is None


def test_works_are_the_more_alike_the_nearer_they_are(works: tuple[Workload, Workload]) -> None:
    one, other = works
    assert likeness(one, one) == 1.0
    assert 0.0 < likeness(one, other) == likeness(other, one) < likeness(one, replace(one, context=640)) < 1.0


def test_a_campaign_with_lessons_measures_the_starts_of_which_most_is_expected_as_seeds(
    lab: Any, toy_measures: ModuleType
) -> None:
    space, spec = make_space(lab.workload), lab.spec(measure="cuda", sampler="descent", seeds=True, trials=6)
    source = make_space(replace(lab.workload, context=48))
    lessons = lessons_for(space, [Taught(source.workload, [(each, took(source, each)) for each in near(source)])])
    assert lessons is not None
    bench = lab.bench(lambda program: toy_measures.measured(toy_measures.toy_us(program), 30))
    name = open_campaign(spec, space, lab.store, fresh=False)
    run = CampaignRun(
        spec, name, space, lab.store, InlineEngine(bench), lab.environment, STOCK, Predictions(), lessons
    )
    run.run(lambda _: None, lambda: False)
    rows = trials_of(lab.store.trials(name))
    starts = {space.to_config(each).config_id for each in (*space.known_good(), *lessons.starts)}
    assert rows[0].config_id in starts
    assert rows[0].source == "seed"
    assert {row.source for row in rows if row.config_id not in starts} == {"search"}
    assert len({row.config_id for row in rows}) == 6
