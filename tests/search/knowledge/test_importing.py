from __future__ import annotations

import json
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rows import timed

from flywheel.errors import StoreError, UsageError
from flywheel.ir import ScheduleConfig
from flywheel.measure.record import TrialRecord
from flywheel.search.knowledge.importing import import_priors, import_trials, priors_of
from flywheel.search.opening import resumed
from flywheel.search.spec import METHOD
from flywheel.store.tsv import from_tsv, to_tsv

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20)
numbers = count()


@pytest.fixture
def rows(lab: Any) -> list[TrialRecord]:
    """Six trials of a finished campaign."""
    lab.run(lab.spec(trials=6, name="finished"))
    return lab.store.trials("finished")


@given(
    changes=st.lists(
        st.fixed_dictionaries(
            {"reason": st.none() | texts, "host": texts, "ask_s": st.none() | st.floats(0, 1e9), "commit": texts}
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_that_were_written_and_imported_are_the_rows(
    lab: Any, rows: list[TrialRecord], changes: list[dict[str, object]]
) -> None:
    changed = [replace(row, **change) for row, change in zip(rows, changes, strict=False)]  # type: ignore[arg-type]
    name = f"back {next(numbers)}"
    _, new = import_trials(lab.store, name, from_tsv(to_tsv(changed)))
    assert new == len(changed)
    assert lab.store.trials(name) == [replace(row, campaign=name, imported_from="finished") for row in changed]
    back = [replace(row, campaign="finished", imported_from=None) for row in lab.store.trials(name)]
    assert to_tsv(back) == to_tsv(changed)


def test_an_import_that_was_cut_off_is_finished_by_repeating_it(lab: Any, rows: list[TrialRecord]) -> None:
    assert import_trials(lab.store, "copy", rows[:2])[1] == 2
    assert import_trials(lab.store, "copy", rows)[1] == 4
    assert import_trials(lab.store, "copy", rows)[1] == 0
    assert [row.config_id for row in lab.store.trials("copy")] == [row.config_id for row in rows]


def test_another_trial_of_the_same_number_is_not_overwritten(lab: Any, rows: list[TrialRecord]) -> None:
    import_trials(lab.store, "copy", rows)
    with pytest.raises(StoreError, match="has another trial 3"):
        import_trials(lab.store, "copy", [*rows[:3], replace(rows[3], host="elsewhere")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"campaign": "other"}, "trials of 2 campaigns: finished, other"),
        ({"model": "other"}, "trials of model other and of small"),
        ({"context": 65}, "trials of context 64 and of 65"),
        ({"trial": 0}, "has two trials 0"),
        ({"batch": 2}, "trials of batch 1 and of 2"),
        ({"outcome": "incorrect", "predicted_us": None, "predictor": None, "floor_fraction": None},
         "measured and predicted trials"),
    ],
)  # fmt: skip
def test_rows_that_are_not_of_one_campaign_are_refused(
    lab: Any, rows: list[TrialRecord], change: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        import_trials(lab.store, "copy", [*rows[:-1], replace(rows[-1], **change)])  # type: ignore[arg-type]
    assert lab.store.campaign("copy") is None


def test_a_row_whose_id_is_not_that_of_its_config_cannot_be_made(rows: list[TrialRecord]) -> None:
    with pytest.raises(ValueError, match=r"config_id '?0123456789ab'? is not its config's, [0-9a-f]{12}"):
        replace(rows[0], config_id="0123456789ab")


def test_rows_of_other_work_do_not_join_a_campaign(lab: Any, rows: list[TrialRecord]) -> None:
    import_trials(lab.store, "copy", rows[:1])
    with pytest.raises(UsageError, match="context=64, the trials have 65"):
        import_trials(lab.store, "copy", [replace(row, context=65) for row in rows])


def test_rows_that_only_a_gpu_gives_make_a_measured_campaign(lab: Any, rows: list[TrialRecord]) -> None:
    blank = {"predicted_us": None, "predictor": None, "floor_fraction": None}
    measured = timed(replace(rows[0], **blank, outcome="rejected"), 9.0)  # type: ignore[arg-type]
    assert import_trials(lab.store, "m", [measured])[0].measure == "cuda"
    assert import_trials(lab.store, "p", rows)[0].measure == "predict"
    rejected = replace(rows[0], **blank, outcome="rejected", reason="why")  # type: ignore[arg-type]
    assert import_trials(lab.store, "r", [rejected])[0].measure == "predict"
    assert import_trials(lab.store, "n", [replace(rejected, nvrtc="13.0")])[0].measure == "cuda"


def test_a_search_goes_on_from_imported_trials_even_with_gaps(
    lab: Any, rows: list[TrialRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.search.knowledge.importing.resolve_model", lambda _: lab.workload.spec)
    import_trials(lab.store, "toy", [rows[1], rows[4]])
    result = lab.run(lab.spec(trials=5))
    assert (result.trials, result.new_trials) == (5, 3)
    assert [row.trial for row in lab.store.trials("toy")] == [1, 4, 5, 6, 7]


def test_trials_of_a_model_that_is_not_here_can_be_kept_but_not_continued(lab: Any, rows: list[TrialRecord]) -> None:
    import_trials(lab.store, "toy", rows)
    with pytest.raises(UsageError, match="another model of that name"):
        lab.run(lab.spec(trials=7))


def test_a_campaign_of_priors_tries_them_first_as_trials_of_its_own(lab: Any) -> None:
    space = lab.space()
    wanted = [space.to_config({**space.known_good()[0], "depth": depth}) for depth in (3, 0, 3)]
    import_priors(lab.store, "toy", lab.workload, "predict", wanted)
    assert lab.store.trials("toy") == []
    lab.run(lab.spec(trials=4, seeds=True))
    first, second, third, _ = lab.store.trials("toy")
    assert [first.config_id, second.config_id] == [config.config_id for config in wanted[:2]]
    assert third.config_id == space.to_config(space.known_good()[0]).config_id
    assert (first.source, first.outcome, third.source) == ("seed", "predicted", "seed")


def test_no_seeds_leaves_priors_out(lab: Any) -> None:
    prior = lab.space().to_config({**lab.space().known_good()[0], "depth": 3})
    import_priors(lab.store, "toy", lab.workload, "predict", [prior])
    lab.run(lab.spec(trials=2, seeds=False))
    assert {row.source for row in lab.store.trials("toy")} == {"search"}


def test_the_first_run_of_an_imported_campaign_decides_how_it_is_searched(lab: Any) -> None:
    import_priors(lab.store, "toy", lab.workload, "predict", [ScheduleConfig(pipelining_depth=3)])
    lab.run(lab.spec(sampler="random", seed=5, trials=2))
    campaign = lab.store.campaign("toy")
    assert (campaign.sampler, campaign.seed, json.loads(campaign.spec)["seeds"]) == ("random", 5, False)
    assert len(priors_of(campaign)) == 1
    with pytest.raises(UsageError, match="campaign 'toy' has sampler=random, not tpe; --fresh or --name"):
        lab.run(lab.spec(sampler="tpe", seed=5, trials=4))
    assert len(lab.store.trials("toy")) == 2


def test_imported_trials_keep_their_sampler_unless_another_is_chosen(lab: Any, rows: list[TrialRecord]) -> None:
    campaign, _ = import_trials(lab.store, "toy", rows)
    asked = lab.spec(sampler="descent", seed=9)
    kept = resumed(asked, lab.store, fresh=False, given=())
    assert (kept.sampler, kept.seed) == (campaign.sampler, campaign.seed)
    assert resumed(asked, lab.store, fresh=False, given=METHOD) == asked


def test_priors_begin_a_campaign_and_join_none(lab: Any) -> None:
    configs = [ScheduleConfig(pipelining_depth=3), ScheduleConfig(sm_assignment={1: 2})]
    campaign = import_priors(lab.store, "toy", lab.workload, "predict", configs)
    assert priors_of(campaign) == configs
    with pytest.raises(UsageError, match="'toy' already exists"):
        import_priors(lab.store, "toy", lab.workload, "predict", configs)


def test_a_searched_campaign_has_no_priors(lab: Any) -> None:
    lab.run(lab.spec(trials=1))
    campaign = lab.store.campaign("toy")
    assert campaign is not None
    assert priors_of(campaign) == []


RECORDED = Path(__file__).parents[3] / "results" / "archive" / "h200"


def test_recorded_tables_of_before_there_were_batches_come_in_with_one(lab: Any) -> None:
    rows = from_tsv((RECORDED / "results.134d1d1.tsv").read_text(encoding="utf-8"), batch=8)
    chosen = [row for row in rows if row.campaign == "s11b8"]
    campaign, new = import_trials(lab.store, "recorded", chosen)
    assert (campaign.batch, campaign.measure, new) == (8, "cuda", len([row for row in chosen if row.source != "final"]))
    assert {(row.batch, row.imported_from, row.kind) for row in lab.store.trials("recorded")} == {
        (8, "s11b8", "imported")
    }


def test_imported_trials_do_not_join_trials_of_the_store(lab: Any, rows: list[TrialRecord]) -> None:
    with pytest.raises(StoreError, match="campaign 'finished' has 6 own trials; imported ones"):
        import_trials(lab.store, "finished", [replace(row, trial=row.trial + 6) for row in rows])
    assert import_trials(lab.store, "finished", rows)[1] == 0
    assert not any(row.is_imported for row in lab.store.trials("finished"))


def test_a_floor_that_is_not_the_gpus_is_refused(lab: Any) -> None:
    rows = from_tsv((RECORDED / "results.134d1d1.tsv").read_text(encoding="utf-8"), batch=8)[:3]
    cheap = replace(rows[1], floor_us=1.0, floor_fraction=1.0 / (rows[1].latency_us or 1.0))
    with pytest.raises(UsageError, match=r"trial 1 of campaign 's11b8': floor_us 1\.0 is not the 514\.\d+ us"):
        import_trials(lab.store, "recorded", [rows[0], cheap, rows[2]])
    assert lab.store.campaign("recorded") is None
