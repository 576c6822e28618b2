from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import timed

from flywheel.cost_model import MODEL_VERSION
from flywheel.ir import TARGETS, MegakernelProgram, config_from_dict
from flywheel.measure.latency import PredictedLatency
from flywheel.measure.outcome import Predicted, TrialOutcome
from flywheel.measure.record import TrialRecord
from flywheel.models.catalog import CATALOG
from flywheel.models.spec import DecoderSpec
from flywheel.search.campaign import CampaignResult, CampaignRun
from flywheel.search.knowledge.importing import import_priors
from flywheel.search.knowledge.lessons import taught_by
from flywheel.search.knowledge.warm import FEATURES, NEIGHBOURS, carry, choose_starts, distance, starts_of
from flywheel.search.opening import learns_before, open_campaign
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec, to_campaign
from flywheel.search.trials.engine import EvaluationSetup, InlineEngine
from flywheel.search.trials.evaluate import Measure
from flywheel.search.trials.predicting import look
from flywheel.search.workload import Workload
from flywheel.store.sql import Store, open_store
from flywheel.vm.gpu.sources import kernels_id

SPEC = DecoderSpec("small", "llama", 96, 160, 1, 4, 2, 16, 300, 1e4, 1e-6, 4096)

works = st.builds(
    lambda spec, target, dtype, context: Workload("any", spec, target, dtype, min(context, spec.max_position)),
    st.sampled_from(list(CATALOG.values())),
    st.sampled_from(list(TARGETS.values())),
    st.sampled_from(["bf16", "f16", "f32"]),
    st.integers(1, 8192),
)


def on(gpu: str, context: int = 64, **changes: Any) -> Workload:
    """The small model, or a changed one, on a GPU."""
    return Workload("small", replace(SPEC, **changes), TARGETS[gpu], "bf16", context)


HOME = on("h100")


class Site:
    """One store, and campaigns of a few random trials in it."""

    def __init__(self, url: str, store: Store, lab: Any) -> None:
        self.url, self.store, self._lab = url, store, lab

    def search(
        self, name: str, work: Workload = HOME, measure: Measure | None = None, **options: Any
    ) -> CampaignResult:
        settled: dict[str, Any] = {"sampler": "random", "trials": 5, **options}
        spec = CampaignSpec(
            work.model, work.target.name, work.dtype, work.context, measure="predict", name=name, **settled
        )
        space = make_space(work, spec.fix)
        bench = EvaluationSetup(work, partial(look, self.store, spec.gpu, spec.dtype), measure or self._lab.measure)
        opened = open_campaign(spec, space, self.store, fresh=False)
        run = CampaignRun(spec, opened, space, self.store, InlineEngine(bench), self._lab.environment)
        return run.run(lambda _: None, lambda: False)

    def starts(self, name: str = "home") -> list[str]:
        """Campaigns that the campaign starts from."""
        campaign = self.store.campaign(name)
        assert campaign is not None
        return [start.campaign for start in starts_of(campaign)]

    def configs(self, name: str = "home") -> list[str]:
        return [record.config_id for record in self.store.trials(name)]

    def add(self, name: str, work: Workload, measure: str, records: list[TrialRecord], **described: Any) -> None:
        """A campaign made of these rows."""
        spec = CampaignSpec(work.model, work.target.name, work.dtype, work.context, measure=measure, name=name)
        decoder = described.get("decoder", asdict(work.spec))
        self.store.create_campaign(to_campaign(spec, name, decoder=decoder, created_at=records[0].created_at))
        for record in records:
            self.store.append(replace(record, campaign=name, gpu=spec.gpu, context=spec.context))


@pytest.fixture
def site(lab: Any, tmp_path: Path) -> Iterator[Site]:
    url = f"sqlite:///{tmp_path / 'site.db'}"
    with open_store(url) as store:
        yield Site(url, store, lab)


def carried(result: CampaignResult, source: Workload, **fix: str) -> str:
    """Id of the config that the best one of a campaign over `source` is at home."""
    assert result.best is not None
    choice = make_space(source).to_choice(config_from_dict(json.loads(result.best.config)))
    assert choice is not None
    space = make_space(HOME, fix)
    return space.to_config(carry(choice, source, space)).config_id


def known_good(work: Workload = HOME) -> list[str]:
    space = make_space(work)
    return [space.to_config(choice).config_id for choice in space.known_good()]


def measured(record: TrialRecord, latency_us: float = 7.0) -> TrialRecord:
    """The row as a GPU would have made it, with the kernels of today."""
    return timed(record, latency_us, predicted_us=None, predictor=None, kernels=kernels_id(), floor_us=None)


def test_a_campaign_begins_with_the_best_schedules_of_the_nearest_work_then_the_known_good_ones(site: Site) -> None:
    far, near = site.search("far", on("l4"), trials=9), site.search("near", on("h200"), trials=9)
    site.search("home", trials=9)
    wanted = list(dict.fromkeys([carried(near, on("h200")), carried(far, on("l4")), *known_good()]))
    assert site.starts() == ["near", "far"]
    assert site.configs()[: len(wanted)] == wanted
    assert {record.source for record in site.store.trials("home")[: len(wanted)]} == {"seed"}


def test_measurements_of_other_works_teach_and_those_of_this_work_with_other_kernels(site: Site) -> None:
    later = "2999-01-01"
    for name, work in (("near", on("h200")), ("same", HOME)):
        site.search(name, work, trials=9)
    assert taught_by(site.store, HOME, later) == []  # predictions teach nothing
    rows = [replace(measured(row, 7.0 + row.trial), predictor=None) for row in site.store.trials("near")]
    site.add("measured near", on("h200"), "cuda", rows)
    site.add("measured here", HOME, "cuda", [measured(row) for row in site.store.trials("same")])
    (near,) = taught_by(site.store, HOME, later)
    assert near.workload == on("h200")
    assert min(latency_us for _, latency_us in near.rows) == 7.0
    site.add("older", HOME, "cuda", [replace(measured(row), kernels="older") for row in site.store.trials("same")])
    assert len(taught_by(site.store, HOME, later)) == 2
    assert taught_by(site.store, HOME, rows[0].created_at) == []


def test_a_campaign_that_is_resumed_learns_from_what_was_measured_before_it_began(site: Site) -> None:
    spec = CampaignSpec(HOME.model, HOME.target.name, context=HOME.context, measure="cuda", name="home")
    learns = learns_before(spec, site.store, fresh=False)
    open_campaign(spec, make_space(HOME), site.store, fresh=False, learns=learns)
    assert learns is not None
    assert learns_before(spec, site.store, fresh=False) == learns
    assert learns_before(spec, site.store, fresh=True) != learns
    assert learns_before(replace(spec, name="cold", warm=False), site.store, fresh=False) is None


def test_only_schedules_pass_and_every_start_is_measured_again(site: Site) -> None:
    near = site.search("near", on("h200"), trials=9)
    programs: list[str] = []

    def slow(program: MegakernelProgram) -> TrialOutcome:
        programs.append(program.target.name if program.target is not None else "none")
        return Predicted(PredictedLatency(1e6, MODEL_VERSION))

    site.search("home", measure=slow)
    first, *_ = site.store.trials("home")
    assert (first.config_id, first.predicted_us, first.source) == (carried(near, on("h200")), 1e6, "seed")
    assert programs == ["h100"] * len(set(site.configs()))
    assert near.best is not None
    campaign = site.store.campaign("home")
    assert campaign is not None
    assert str(near.best.predicted_us) not in campaign.spec


def test_an_empty_store_and_cold_searches_propose_the_same(site: Site, lab: Any, tmp_path: Path) -> None:
    site.search("home")
    with open_store(tmp_path / "other.db") as store:
        other = Site(f"sqlite:///{tmp_path / 'other.db'}", store, lab)
        other.search("near", on("h200"))
        other.search("home", warm=False)
        assert (site.starts(), other.starts()) == ([], [])
        assert site.configs() == other.configs()


@pytest.mark.parametrize("options", [{"warm": False}, {"seeds": False}])
def test_cold_campaigns_and_those_without_seeds_start_from_nothing(site: Site, options: dict[str, bool]) -> None:
    site.search("near", on("h200"))
    site.search("home", **options)
    assert site.starts() == []


def test_what_a_campaign_starts_from_is_settled_when_it_is_created(site: Site) -> None:
    site.search("far", on("l4"))
    site.search("home", trials=1)
    site.search("near", on("h200"))
    site.search("home", trials=6)
    assert site.starts() == ["far"]


def test_a_campaign_that_has_starts_can_be_searched_cold(site: Site) -> None:
    site.search("near", on("h200"), trials=9)
    space = make_space(HOME)
    prior = space.to_config({**space.known_good()[0], "depth": 3})
    import_priors(site.store, "home", HOME, "predict", [prior])
    site.search("home", warm=False)
    assert site.starts() == ["near"]
    assert site.configs()[:3] == [prior.config_id, *known_good()[:2]]


def test_the_same_store_gives_the_same_starts_whatever_the_order_of_its_campaigns(
    site: Site, lab: Any, tmp_path: Path
) -> None:
    places = [on("h200"), on("a100"), on("h100", context=128), on("l4")]
    for work in places:
        site.search(f"{work.target.name}-{work.context}", work, warm=False)
    with open_store(tmp_path / "other.db") as store:
        other = Site(f"sqlite:///{tmp_path / 'other.db'}", store, lab)
        for work in reversed(places):
            other.search(f"{work.target.name}-{work.context}", work, warm=False)
        chosen = choose_starts(store, make_space(HOME), "predict")
    assert chosen == choose_starts(site.store, make_space(HOME), "predict")
    assert len(chosen) == NEIGHBOURS
    assert [start.distance for start in chosen] == sorted(start.distance for start in chosen)


def test_the_same_work_under_the_same_conditions_is_no_start(site: Site) -> None:
    site.search("home")
    assert choose_starts(site.store, make_space(HOME), "predict") == []
    renamed = replace(HOME, model="another", spec=replace(SPEC, name="another"))
    assert choose_starts(site.store, make_space(renamed), "predict") == []


def test_the_same_work_predicted_by_an_older_cost_model_is_the_nearest_start(site: Site) -> None:
    site.search("new", on("h200"))
    old = [replace(record, predictor="0") for record in site.store.trials("new")]
    site.add("old", HOME, "predict", old)
    first, second = choose_starts(site.store, make_space(HOME), "predict")
    assert (first.campaign, first.distance, second.campaign) == ("old", 0.0, "new")


def test_the_same_work_in_rows_with_ids_of_before_is_a_start(site: Site) -> None:
    site.search("new", on("h200"))
    rows = [replace(record, program_id=f"{record.trial:016x}") for record in site.store.trials("new")]
    site.add("old", HOME, "predict", rows)
    assert choose_starts(site.store, make_space(HOME), "predict")[0].campaign == "old"


def test_predictions_of_the_same_work_start_a_measured_campaign_of_it(site: Site) -> None:
    site.search("predicted")
    (start,) = choose_starts(site.store, make_space(HOME), "cuda")
    assert (start.campaign, start.distance) == ("predicted", 0.0)


def test_measurements_of_the_same_work_are_a_start_once_the_kernels_have_changed(site: Site) -> None:
    site.search("elsewhere", on("h200"))
    rows = [measured(record) for record in site.store.trials("elsewhere")]
    site.add("now", on("a100"), "cuda", rows)
    assert [start.campaign for start in choose_starts(site.store, make_space(on("a100")), "cuda")] == ["elsewhere"]
    site.search("longer", on("l4", 128))
    rows = [measured(record) for record in site.store.trials("longer")]
    site.add("before", on("l4"), "cuda", [replace(record, kernels="older") for record in rows])
    assert choose_starts(site.store, make_space(on("l4")), "cuda")[0].campaign == "before"


def test_imported_measurements_of_another_work_are_a_start(site: Site) -> None:
    site.search("made", on("h200"))
    row = replace(measured(site.store.trials("made")[-1]), imported_from="elsewhere")
    site.store.delete_campaign("made")
    site.add("table", on("h200"), "cuda", [row])
    assert [start.campaign for start in choose_starts(site.store, make_space(HOME), "predict")] == ["table"]


def test_of_one_work_latencies_of_the_campaigns_own_kind_decide(site: Site) -> None:
    site.search("predicted", on("h200"))
    row = site.store.trials("predicted")[-1]
    site.add("measured", on("h200"), "cuda", [measured(row)])
    assert [start.campaign for start in choose_starts(site.store, make_space(HOME), "cuda")] == ["measured"]
    assert [start.campaign for start in choose_starts(site.store, make_space(HOME), "predict")] == ["predicted"]


def test_the_best_of_all_campaigns_of_a_work_is_its_schedule(site: Site) -> None:
    site.search("one", on("h200"), trials=8)
    site.search("two", on("h200"), trials=8, seed=1, warm=False)
    best = site.store.best(measured=False)
    assert best is not None
    assert [(start.campaign, start.trial) for start in choose_starts(site.store, make_space(HOME), "predict")] == [
        (best.campaign, best.trial)
    ]


def test_work_that_is_not_known_here_is_passed_over(site: Site) -> None:
    site.search("near", on("h200"))
    rows = site.store.trials("near")
    site.add("unknown", on("a100"), "predict", rows, decoder=None)
    site.add("newer", on("a100"), "predict", rows, decoder={**asdict(SPEC), "experts": 8})
    site.add("elsewhere", replace(HOME, target=replace(TARGETS["h100"], name="h900")), "predict", rows)
    assert [start.campaign for start in choose_starts(site.store, make_space(HOME), "predict")] == ["near"]


def test_priors_go_before_what_the_store_has(site: Site) -> None:
    near = site.search("near", on("h200"), trials=9)
    space = make_space(HOME)
    prior = space.to_config({**space.known_good()[0], "depth": 3})
    import_priors(site.store, "home", HOME, "predict", [prior])
    site.search("home")
    assert site.starts() == ["near"]
    assert site.configs()[:2] == [prior.config_id, carried(near, on("h200"))]


def test_a_start_keeps_to_the_pinned_knobs(site: Site) -> None:
    near = site.search("near", on("h200"), fix={"depth": "1"})
    site.search("home", fix={"depth": "6"})
    first, *_ = site.store.trials("home")
    assert json.loads(first.config)["pipelining_depth"] == 6
    assert first.config_id == carried(near, on("h200"), depth="6")


@given(works, st.data())
def test_a_choice_carried_to_the_same_work_is_the_same_choice(work: Workload, data: st.DataObject) -> None:
    space = make_space(work)
    choice = {dimension.name: data.draw(st.sampled_from(dimension.values)) for dimension in space.dimensions}
    assert carry(choice, work, space) == choice


@given(works, works, st.data())
def test_a_choice_carried_anywhere_is_in_the_space_there(one: Workload, two: Workload, data: st.DataObject) -> None:
    space = make_space(two)
    choice = {dimension.name: data.draw(st.sampled_from(dimension.values)) for dimension in make_space(one).dimensions}
    assert space.to_choice(space.to_config(carry(choice, one, space))) is not None


def test_tiles_an_sm_and_fusions_survive_another_family_and_gpu() -> None:
    source = Workload("any", CATALOG["llama3-8b"], TARGETS["h200"], "bf16", 512)
    target = make_space(Workload("any", CATALOG["qwen3-14b"], TARGETS["a100"], "bf16", 512))
    good = make_space(source).known_good()[0]
    there = carry(good, source, target)
    fusions = {name: value for name, value in good.items() if name.startswith("fuse.")}
    assert {name: there[name] for name in fusions} == fusions
    assert {name: there[name] for name in there if name.startswith("rows.") and name != "rows.lm_head"} == {
        name: value
        for name, value in target.known_good()[0].items()
        if name.startswith("rows.") and name != "rows.lm_head"
    }
    assert there["smem"] == target.workload.target.smem_bytes_per_block_optin


@given(works, works, works)
def test_distance_is_a_metric_up_to_equal_features(one: Workload, two: Workload, three: Workload) -> None:
    assert distance(one, one) == 0
    assert isclose(distance(one, two), distance(two, one))
    assert distance(one, three) <= distance(one, two) + distance(two, three) + 1e-9


@pytest.mark.parametrize(
    "other",
    [
        on("h100", hidden=192), on("h100", intermediate=320), on("h100", n_heads=8), on("h100", n_kv_heads=1),
        on("h100", vocab=600), on("h100", n_layers=2), on("h100", context=128), replace(HOME, dtype="f32"),
        replace(HOME, batch=2), replace(HOME, ranks=2), on("h200"), on("l4"),
    ],
    ids=lambda work: f"{work.target.name}-{work.dtype}-{work.context}-{work.spec.hidden}-{work.spec.n_heads}",
)  # fmt: skip
def test_whatever_changes_the_schedule_adds_distance(other: Workload) -> None:
    assert distance(HOME, other) > 0


@pytest.mark.parametrize("value", [feature.value for feature in FEATURES], ids=[feature.name for feature in FEATURES])
def test_every_feature_tells_some_built_in_works_apart(value: Callable[[Workload], float]) -> None:
    some = [Workload("any", spec, target, *rest) for spec in CATALOG.values() for target in TARGETS.values()
            for rest in (("bf16", 512, 1), ("f32", 2048, 2), ("bf16", 512, 1, None, 2))]  # fmt: skip
    assert len({value(work) for work in some}) > 1
    assert all(value(work) > 0 for work in some)
