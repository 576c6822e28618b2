"""The mirror against MLflow itself, on its SQLite backend."""

from __future__ import annotations

import json
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import LONG

from flywheel.errors import MirrorError, UsageError
from flywheel.measure.record import TrialRecord
from flywheel.store.campaign import Campaign, work_key
from flywheel.store.mirror import Views, run_name
from flywheel.store.mlflow import EXPERIMENT, Mirror
from flywheel.store.tracking import local_tracking

Records = Callable[..., TrialRecord]
Campaigns = Callable[..., Campaign]


def knobs(records: Sequence[TrialRecord]) -> list[Mapping[str, str | int]]:
    return [{"depth": record.trial % 3, "pages": "none"} for record in records]


def files(campaign: Campaign, records: Sequence[TrialRecord]) -> Mapping[str, str]:
    return {"best.json": f"{campaign.name} {len(records)}\n", "plots/history.svg": "<svg/>\n"}


def gains(_: Campaign, records: Sequence[TrialRecord]) -> tuple[str, Mapping[str, float]]:
    return "Searching gained much.", {"gained/percent": 12.3456, "gained/known_us": 900.0}


NOTE = "mlflow.note.content"
VIEWS = Views(knobs, files, gains)


@pytest.fixture
def uri(empty_tracking: Path, tmp_path: Path) -> str:
    shutil.copy(empty_tracking, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def rows(make_record: Records) -> list[TrialRecord]:
    """Five trials: three improve, one does not, one is rejected."""
    times = (900.0, 950.0, 800.0, None, 700.0)
    return [
        make_record("rejected", trial=trial)
        if us is None
        else make_record(trial=trial, predicted_us=us, floor_us=500.0, floor_fraction=500.0 / us)
        for trial, us in enumerate(times)
    ]


def everything(uri: str) -> list[Any]:
    """All that MLflow holds of the experiment, in an order of its own."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    found = []
    for run in client.search_runs([experiment.experiment_id]):
        history = {
            name: [(m.step, m.value, m.timestamp) for m in client.get_metric_history(run.info.run_id, name)]
            for name in sorted(run.data.metrics)
        }
        paths = [entry.path for entry in client.list_artifacts(run.info.run_id)]
        info, data = run.info, run.data
        if NOTE in data.tags:  # which links to the run by its id
            data.tags[NOTE] = data.tags[NOTE].replace(info.run_id, "ID")
        found.append((info.run_name, info.status, info.end_time, data.params, data.tags, history, paths))
    return sorted(found, key=lambda entry: str(entry[0]))


def by_name(uri: str) -> dict[str, Any]:
    return {name: entry for name, *entry in everything(uri)}


def test_a_campaign_is_one_run_with_its_series_parameters_and_files(
    uri: str, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    assert Mirror(uri).sync(make_campaign(), rows, "none", VIEWS) > 0
    status, end, params, tags, history, paths = by_name(uri)["first"]
    assert (status, end) == ("FINISHED", 1767323045000)
    assert (params["model"], params["measure"], params["host"]) == ("llama3.2-1b", "predict", "lab")
    assert [value for _, value, _ in history["best_us/predicted"]] == [900.0, 900.0, 800.0, 800.0, 700.0]
    assert [step for step, _, _ in history["best_us/predicted"]] == [0, 1, 2, 3, 4]
    assert history["floor_fraction/predicted"][-1][1] == round(500 / 700, 3)
    assert history["tokens_per_s/predicted"][-1][1] == 1430.0
    assert history["outcomes/rejected"] == [(3, 1.0, 1767323045000)]
    assert "**predicted** 700 us" in tags["mlflow.note.content"]
    assert [point[:2] for point in history["best_us/predicted_low"]] == [(0, 774.0), (2, 688.0), (4, 602.0)]
    assert [point[:2] for point in history["best_us/predicted_high"]] == [(0, 1030.0), (2, 912.0), (4, 798.0)]
    assert "measured perhaps 602 to 798 us (predictions for 47 schedules of" in tags["mlflow.note.content"]
    assert (params["predicted.basis"], params["predicted.why"][:11]) == ("checked", "predictions")
    assert paths == ["best.json", "plots"]


def test_a_run_links_to_its_report_and_the_list_shows_latency_and_floor(
    uri: str, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    from mlflow import MlflowClient

    mirror = Mirror(uri)
    mirror.sync(make_campaign(), rows, "none", VIEWS)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    run = client.search_runs([experiment.experiment_id])[0]
    page = f"#/experiments/{experiment.experiment_id}/runs/{run.info.run_id}"
    assert f"[The report]({page}/artifacts/report.html?workflowType=machine_learning)" in run.data.tags[NOTE]
    assert mirror.page(make_campaign()) == f"/{page}?workflowType=machine_learning"
    key = mirror.pages().partition("viewStateShareKey=")[2]
    view = json.loads(experiment.tags[f"mlflow.sharedViewState.{key}"])
    latency, fraction, gained, *params = view["selectedColumns"]
    assert [latency, fraction] == ["metrics.`best_us/predicted`", "metrics.`floor_fraction/predicted`"]
    assert gained == "metrics.`gained/percent`"
    assert params == [f"params.`{name}`" for name in ("model", "weights", "batch", "gpu", "context")]
    assert set(view["columnWidths"]) == set(view["selectedColumns"])
    assert (view["orderByKey"], view["orderByAsc"]) == (latency, True)
    mirror.sync(make_campaign(), rows, "all", VIEWS)
    listed = client.search_runs([experiment.experiment_id], view["searchFilter"])
    assert [run.info.run_name for run in listed] == ["first"]  # and not its trials


def test_a_finished_campaign_has_the_knobs_of_its_best_and_what_it_gained(
    uri: str, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    Mirror(uri).sync(make_campaign(), rows, "none", VIEWS)
    _, _, params, tags, history, _ = by_name(uri)["first"]
    assert {name: value for name, value in params.items() if name.startswith("knob.")} == {
        "knob.depth": "1", "knob.pages": "none",
    }  # fmt: skip
    assert (params["weights"], params["batch"]) == ("BF16", "1")
    assert [point[:2] for point in history["gained/percent"]] == [(4, 12.3)]
    assert "Searching gained much." in tags[NOTE]
    assert "(1,430 tokens/s)" in tags[NOTE]


def test_a_campaign_that_goes_on_has_the_knobs_of_its_new_best_and_keeps_its_children(
    uri: str, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    """MLflow refuses to change a parameter."""
    from mlflow import MlflowClient

    campaign, mirror, client = make_campaign(), Mirror(uri), MlflowClient(uri)
    mirror.sync(campaign, rows[:3], "kept", VIEWS)
    first = mirror.page(campaign)
    assert by_name(uri)["first"][2]["knob.depth"] == "2"
    client.set_tag(first.split("/")[-1].partition("?")[0], "mine", "kept")
    mirror.sync(campaign, rows, "kept", VIEWS)
    assert mirror.page(campaign) != first
    runs = by_name(uri)
    assert sorted(runs) == ["first", "trial 0", "trial 2", "trial 4"]
    assert (runs["first"][2]["knob.depth"], runs["first"][3]["mine"]) == ("1", "kept")
    parent = mirror.page(campaign).split("/")[-1].partition("?")[0]
    assert {entry[3]["mlflow.parentRunId"] for name, entry in runs.items() if name != "first"} == {parent}
    assert [step for step, *_ in runs["first"][4]["best_us/predicted"]] == [0, 1, 2, 3, 4]
    assert mirror.sync(campaign, rows, "kept", VIEWS) == 0


def test_no_run_shows_the_knobs_of_an_earlier_best(
    uri: str, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    """Whoever opens a dashboard beside a search mirrors it before it ends."""
    campaign, mirror = make_campaign(), Mirror(uri)
    mirror.sync(campaign, rows[:3], "none", VIEWS)
    mirror.sync(campaign, rows[:4], "none", VIEWS, live=True)
    assert by_name(uri)["first"][2]["knob.depth"] == "2"  # still those of the best
    mirror.sync(campaign, rows, "none", VIEWS, live=True)
    assert "knob.depth" not in by_name(uri)["first"][2]
    gone = replace(VIEWS, knobs=lambda rows: [None for _ in rows])
    mirror.sync(campaign, rows, "none", VIEWS)
    mirror.sync(campaign, rows, "none", gone)
    assert by_name(uri)["first"][2]["knob.depth"] == "1"


def test_the_page_of_a_search_that_goes_on_is_the_one_of_its_end(
    uri: str, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    campaign, mirror = make_campaign(), Mirror(uri)
    mirror.sync(campaign, rows[:3], "none", VIEWS)
    page = mirror.page(campaign, goes_on=True)
    mirror.sync(campaign, rows[:4], "none", VIEWS, live=True)
    assert "knob.depth" not in by_name(uri)["first"][2]
    mirror.sync(campaign, rows, "none", VIEWS)
    assert mirror.page(campaign, goes_on=False) == page


def test_numbers_have_the_decimals_of_their_unit(uri: str, make_record: Records, make_campaign: Campaigns) -> None:
    row = make_record(trial=0, predicted_us=700.123456789, floor_us=500.0, floor_fraction=500.0 / 700.123456789,
                      ask_s=0.123456789, validate_s=1e-6)  # fmt: skip
    Mirror(uri).sync(make_campaign(), [row], "all", VIEWS)
    runs = by_name(uri)
    shown = {**runs["first"][4], **runs["trial 0"][4]}
    assert [shown[name][0][1] for name in ("best_us/predicted", "predicted_us", "ask_s", "floor_fraction")] == [
        700.0, 700.0, 0.1235, 0.7142,
    ]  # fmt: skip


def test_a_prediction_for_a_gpu_that_nobody_measured_says_that_its_constants_are_scaled(
    uri: str, make_record: Records, make_campaign: Campaigns
) -> None:
    Mirror(uri).sync(make_campaign(gpu="l40s"), [make_record(gpu="l40s", predicted_us=18_960.6)], "all", VIEWS)
    found = by_name(uri)
    _, _, params, tags, history, _ = found["first"]
    assert params["predicted.basis"] == "scaled"
    assert "measured perhaps 13,300 to 26,500 us (a guess: " in tags[NOTE]
    assert "scaled from an H200's" in tags[NOTE] and "18,960" not in tags[NOTE]
    assert [history[f"best_us/predicted_{end}"][0][1] for end in ("low", "high")] == [13300.0, 26500.0]
    trial = found["trial 0"][4]
    assert [trial[f"predicted{end}_us"][0][1] for end in ("_low", "", "_high")] == [13300.0, 19000.0, 26500.0]


def test_a_measured_campaign_has_no_range_of_predictions(
    uri: str, make_record: Records, make_campaign: Campaigns
) -> None:
    Mirror(uri).sync(make_campaign(measure="cuda"), [make_record("measured")], "none", VIEWS)
    _, _, params, tags, history, _ = by_name(uri)["first"]
    assert "perhaps" not in tags[NOTE]
    assert not [name for name in (*params, *history) if "predicted" in name]


def test_campaigns_that_a_search_named_differ_in_the_first_words_of_their_runs(make_campaign: Campaigns) -> None:
    def named(tail: str = "-cuda-descent-s0", **changes: Any) -> str:
        work = {"model": "llama3-8b", "gpu": "h200", "dtype": "bf16", "context": 512, "batch": 1, "weights": None}
        work |= changes
        return run_name(make_campaign(name=work_key(**work) + tail, measure="cuda", **work))

    assert named() == "llama3-8b h200"
    assert named(weights="int4", batch=8) == "llama3-8b int4 b8 h200"
    assert named(context=4096, gpu="2xh200") == "llama3-8b c4096 2xh200"
    assert named("-cuda-tpe-s3.2") == "llama3-8b h200 tpe-s3.2"
    assert named("-cuda-descent-s0.2") == "llama3-8b h200 2"
    assert run_name(make_campaign(name="my own")) == "my own"


def test_syncing_twice_changes_nothing(uri: str, rows: list[TrialRecord], make_campaign: Campaigns) -> None:
    campaign = make_campaign()
    Mirror(uri).sync(campaign, rows, "all", VIEWS)
    before = everything(uri)
    assert Mirror(uri).sync(campaign, rows, "all", VIEWS) == 0
    assert everything(uri) == before


def test_a_mirror_that_grew_with_the_campaign_is_the_one_that_is_rebuilt_at_its_end(
    uri: str, empty_tracking: Path, tmp_path: Path, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    campaign, mirror = make_campaign(), Mirror(uri)
    for count in range(len(rows) + 1):
        mirror.sync(campaign, rows[:count], "kept", VIEWS, live=True, files=count == 2)
    assert by_name(uri)["first"][0] == "RUNNING"
    mirror.sync(campaign, rows, "kept", VIEWS)
    (tmp_path / "other").mkdir()
    shutil.copy(empty_tracking, tmp_path / "other" / "mlflow.db")
    fresh = f"sqlite:///{tmp_path / 'other' / 'mlflow.db'}"
    Mirror(fresh).sync(campaign, rows, "kept", VIEWS)
    grown, rebuilt = everything(uri), everything(fresh)
    for *_, tags, _, _ in [*grown, *rebuilt]:
        tags.pop("mlflow.parentRunId", None)
    assert grown == rebuilt


@pytest.mark.parametrize(("children", "trials"), [("all", [0, 1, 2, 3, 4]), ("kept", [0, 2, 4]), ("none", [])])
def test_children_are_all_trials_or_the_kept_ones_or_none(
    children: str, trials: list[int], uri: str, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    Mirror(uri).sync(make_campaign(), rows, children, VIEWS)
    runs = by_name(uri)
    assert sorted(runs) == sorted(["first", *(f"trial {trial}" for trial in trials)])
    for trial in trials:
        status, _, params, tags, history, _ = runs[f"trial {trial}"]
        assert status == ("FAILED" if trial == 3 else "FINISHED")
        assert params["knob.depth"] == str(trial % 3)
        assert tags["flywheel.outcome"] == rows[trial].outcome
        assert ("predicted_us" in history) == (trial != 3)


def test_what_was_lost_comes_back(uri: str, rows: list[TrialRecord], make_campaign: Campaigns, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    campaign, mirror = make_campaign(), Mirror(uri)
    mirror.sync(campaign, rows, "none", VIEWS)
    lost = next((tmp_path / "mlflow-artifacts").rglob("history.svg"))
    lost.unlink()
    assert mirror.sync(campaign, rows, "none", VIEWS) == 1
    assert lost.read_text(encoding="utf-8") == "<svg/>\n"
    client = MlflowClient(uri)
    run = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])[0]
    before = by_name(uri)
    client.delete_run(run.info.run_id)
    mirror.sync(campaign, rows, "none", VIEWS)
    assert by_name(uri) == before


def test_of_two_runs_that_two_processes_made_at_once_one_stays(
    uri: str, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    from mlflow import MlflowClient

    campaign, mirror = make_campaign(), Mirror(uri)
    mirror.sync(campaign, rows[:3], "kept", VIEWS)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    for run in client.search_runs([experiment]):
        tags = {name: value for name, value in run.data.tags.items() if name != "flywheel.trials"}
        client.create_run(experiment, tags=tags, run_name=run.info.run_name)
    mirror.sync(campaign, rows, "kept", VIEWS)
    names = sorted(run.info.run_name for run in client.search_runs([experiment]))
    assert names == ["first", "trial 0", "trial 2", "trial 4"]
    assert [step for step, _, _ in by_name(uri)["first"][4]["best_us/predicted"]] == [0, 1, 2, 3, 4]


@LONG
def test_two_processes_that_make_the_tables_of_one_file_at_once_both_end_well(tmp_path: Path) -> None:
    """They are forked where all is imported, so that they begin at once."""
    code = (
        "import os, sys\n"
        "import mlflow.store.tracking.sqlalchemy_store\n"
        "from flywheel.store.mlflow import Mirror\n"
        "other = os.fork()\n"
        "print(Mirror(sys.argv[1]).pages(), flush=True)\n"
        "if other:\n"
        "    sys.exit(os.waitpid(other, 0)[1])\n"
    )
    command = [sys.executable, "-c", code, f"sqlite:///{tmp_path / 'new.db'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == second


def test_more_points_than_one_request_takes_all_arrive(
    uri: str, make_record: Records, make_campaign: Campaigns
) -> None:
    rows = [make_record(trial=trial, predicted_us=5000.0 - trial) for trial in range(700)]
    Mirror(uri).sync(make_campaign(), rows, "none", VIEWS)
    history = by_name(uri)["first"][4]
    assert {name: len(points) for name, points in history.items()} == dict.fromkeys(
        ("outcomes/predicted", "best_us/predicted", "best_us/predicted_low", "best_us/predicted_high",
         "predicted/latency_us", "tokens_per_s/predicted"), 700
    ) | {"gained/percent": 1, "gained/known_us": 1}


def test_a_server_that_is_not_there_is_one_line(
    rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    silent = rf"^MLflow http://me:\*\*\*@127\.0\.0\.1:{port}: does not answer: .*refused$"
    with pytest.raises(MirrorError, match=silent) as caught:
        Mirror(f"http://me:secret@127.0.0.1:{port}").sync(make_campaign(), rows, "kept", VIEWS)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_is_a_mirror_error(
    tmp_path: Path, rows: list[TrialRecord], make_campaign: Campaigns
) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"not a database, certainly" * 100)
    with pytest.raises(MirrorError, match=r"mlflow\.db"):
        Mirror(f"sqlite:///{tmp_path / 'mlflow.db'}").sync(make_campaign(), rows, "none", VIEWS)


def test_a_database_of_another_mlflow_is_a_mirror_error(
    rows: list[TrialRecord], make_campaign: Campaigns, tmp_path: Path
) -> None:
    with closing(sqlite3.connect(tmp_path / "m.db")) as other, other:
        other.execute("CREATE TABLE experiments (experiment_id INTEGER)")
        other.execute("CREATE TABLE alembic_version (version_num TEXT)")
        other.execute("INSERT INTO alembic_version VALUES ('feedface')")
    with pytest.raises(MirrorError, match="feedface"):
        Mirror(f"sqlite:///{tmp_path / 'm.db'}").sync(make_campaign(), rows, "none", VIEWS)


def test_without_mlflow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.store.mlflow.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install .*\[mlflow\]"):
        Mirror("sqlite:///x.db")


def test_the_local_mirror_lies_beside_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert local_tracking(str(tmp_path / "trials.db")) == f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.chdir(tmp_path)
    assert local_tracking("postgresql://lab/trials") == f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_a_run_that_another_process_deletes_meanwhile_gives_way_to_the_one_that_it_keeps(
    uri: str, rows: list[TrialRecord], make_campaign: Campaigns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that mirror a new campaign at once make a run each, and one deletes the other's."""
    write, met = Mirror._write, []

    def late(self: Mirror, client: Any, experiment: str, run: Any, *more: Any) -> int:
        if not met:
            met.append(run.info.run_id)
            client.create_run(experiment, run.info.start_time, run.data.tags, run.info.run_name)
            client.delete_run(run.info.run_id)
        return write(self, client, experiment, run, *more)

    monkeypatch.setattr(Mirror, "_write", late)
    assert Mirror(uri).sync(make_campaign(), rows, "none", VIEWS) > 0
    ((_, status, _, params, tags, _, _),) = everything(uri)
    assert (status, params["model"]) == ("FINISHED", "llama3.2-1b")
    assert met[0] not in tags[NOTE] and "**predicted** 700 us" in tags[NOTE]
