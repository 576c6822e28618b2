"""A mirror of campaigns in MLflow, for people to watch: one run a campaign, child runs for its trials.

A mirror depends on rows only. `Mirror.sync` finds the runs of a campaign by their tags and adds only what is missing,
so a mirror may lag, be down or be lost. Source: the tracking API of MLflow 3.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

from flywheel.errors import MirrorError, UsageError
from flywheel.installing import install_line
from flywheel.measure.latency import band_of, rounded, tokens_per_s
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, incumbents, tied_with, trials_of
from flywheel.process import default_environment
from flywheel.store.campaign import Campaign, work_named
from flywheel.store.mirror import (
    CAMPAIGNS,
    KEY,
    KNOB,
    MetricPoint,
    Views,
    campaign_key,
    campaign_params,
    campaign_points,
    code_span,
    columns,
    knob_params,
    run_name,
    to_ms,
    to_points,
    trial_params,
    trial_points,
)
from flywheel.store.tracking import shown
from flywheel.version import VERSION

EXPERIMENT: Final = "flywheel"
CHILDREN: Final = ("all", "kept", "none")
"""Which trials get a run of their own: every one, those that were the best so far, or none."""

_TRIAL, _TRIALS, _FILES = "flywheel.trial", "flywheel.trials", "flywheel.files"
_PARENT, _NOTE = "mlflow.parentRunId", "mlflow.note.content"
_TRAINING: Final = {"mlflow.experimentKind": "custom_model_development"}
"""A tag that makes the pages show runs and metrics instead of traces of language models."""
_WORKFLOW: Final = "workflowType=machine_learning"
"""The same choice in an address."""
_VIEW: Final = "flywheel"
_VIEW_TAG: Final = f"mlflow.sharedViewState.{_VIEW}"
"""The tag of the experiment that holds a view of the list of runs, which everybody's pages share."""

REPORT: Final = "report.html"
"""The artifact that a run's description links to."""

_VIEWED: Final = 200
"""The number of newest runs whose metrics decide the columns of the shared view."""

MOST: Final = 300
"""Most characters of an error of MLflow that a message repeats."""

_PATIENCE: Final = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Settings for variables that the environment does not set: limits of one request, since MLflow itself waits for
minutes, and no telemetry, so that only the tracking server gets data."""


def check_installed() -> None:
    """Raises UsageError without the mlflow package."""
    if find_spec("mlflow") is None:
        raise UsageError(f"mlflow is not installed: {install_line('mlflow')}")


class Mirror:
    """The experiment `flywheel` of one tracking server or file. Raises UsageError without the mlflow package.

    Every method raises MirrorError on trouble with the server. Data that was written before stays; the next sync does
    not write it again.
    """

    def __init__(self, uri: str) -> None:
        check_installed()
        self.uri: Final = uri
        default_environment(_PATIENCE)
        self._connected: tuple[Any, str] | None = None

    def pages(self) -> str:
        """The path, behind a server's address, of the page that lists the campaigns."""
        with _reported(self.uri):
            return f"/#/experiments/{self._connect()[1]}/runs?{_WORKFLOW}&viewStateShareKey={_VIEW}"

    def page(self, campaign: Campaign, goes_on: bool = False) -> str:
        """The path, behind a server's address, of the page of one campaign. Where its search `goes_on`, the page is the
        one that the campaign will have at its end: a run with the parameters of an earlier end is replaced at once."""
        with _reported(self.uri):
            client, experiment = self._connect()
            run = _campaign_run(client, experiment, campaign)
            if goes_on and any(name.startswith(KNOB) for name in run.data.params):
                run = _replaced(client, experiment, run)
            return f"/{_page(experiment, run.info.run_id)}?{_WORKFLOW}"

    def sync(
        self,
        campaign: Campaign,
        records: Sequence[TrialRecord],
        children: str,
        views: Views,
        *,
        live: bool = False,
        files: bool = True,
    ) -> int:
        """Bring the campaign's run up to date with `records`, its rows by number. Returns how many things it added.

        `live` marks the run as running instead of finished; `files=False` leaves its artifacts as they are. A finished
        run has the best schedule's knobs as parameters, and what the search gained. A server never changes a parameter:
        where the best has other knobs by now, a new run replaces that one.
        """
        from mlflow.exceptions import MlflowException

        with _reported(self.uri):
            client, experiment = self._connect()
            best = best_of(records)
            knobs = {} if best is None else knob_params(views.knobs([best])[0])
            while True:
                run = _campaign_run(client, experiment, campaign)
                known = {name: value for name, value in run.data.params.items() if name.startswith(KNOB)}
                if known and knobs and known != knobs:
                    run = _replaced(client, experiment, run)
                try:
                    return self._write(client, experiment, run, campaign, records, children, views, knobs, live, files)
                except MlflowException:
                    # Where another process keeps another run of the campaign, it deletes this one.
                    if client.get_run(run.info.run_id).info.lifecycle_stage == "active":
                        raise

    def _write(
        self, client: Any, experiment: str, run: Any, campaign: Campaign, records: Sequence[TrialRecord],
        children: str, views: Views, knobs: Mapping[str, str], live: bool, files: bool,
    ) -> int:  # fmt: skip
        """Bring one run up to date; how many things it added."""
        params, points, gained = campaign_params(campaign, records), list(campaign_points(records)), None
        if not live and best_of(records) is not None:
            gained, numbers = views.gains(campaign, records)
            params |= knobs
            points += to_points(numbers, records[-1])
        written = self._write_rows(client, run, params, points)
        chosen = {"all": list(records), "kept": incumbents(records), "none": []}[children]
        written += self._write_children(client, experiment, run, chosen, views)
        if files:
            written += self._write_files(client, run, campaign, records, views)
        report = f"{_page(experiment, run.info.run_id)}/artifacts/{REPORT}?{_WORKFLOW}"
        note = f"[The report]({report}). {_describe(campaign, records, gained)}"  # first: MLflow folds long texts
        written += _write_tags(client, run, {_TRIALS: str(len(trials_of(records))), _NOTE: note})
        written += _write_view(client, experiment)
        return written + _write_status(client, run, campaign, records, live)

    def _connect(self) -> tuple[Any, str]:
        """(client, experiment's id)."""
        if self._connected is None:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException

            for name in ("alembic", "mlflow"):
                logging.getLogger(name).setLevel(logging.ERROR)
            with _alone(self.uri):
                client = MlflowClient(self.uri)
                found = client.get_experiment_by_name(EXPERIMENT)
                if found is None:
                    try:
                        client.create_experiment(EXPERIMENT, _artifact_folder(self.uri), _TRAINING)
                    except MlflowException:
                        if client.get_experiment_by_name(EXPERIMENT) is None:
                            raise
                    found = client.get_experiment_by_name(EXPERIMENT)
            if found is None:
                raise OSError("does not keep a new experiment: is it an MLflow server?")
            self._connected = client, found.experiment_id
        return self._connected

    def _write_rows(self, client: Any, run: Any, params: Mapping[str, str], points: Iterable[MetricPoint]) -> int:
        from mlflow.entities import Metric, Param

        missing: list[Any] = []
        for name, series in groupby(sorted(points, key=lambda point: point.name), key=lambda point: point.name):
            known = client.get_metric_history(run.info.run_id, name) if name in run.data.metrics else ()
            steps = {metric.step for metric in known}
            missing += [Metric(name, each.value, each.time_ms, each.step) for each in series if each.step not in steps]
        unsaid = [Param(name, value) for name, value in params.items() if name not in run.data.params]
        if missing or unsaid:
            client.log_batch(run.info.run_id, metrics=missing, params=unsaid)
        return len(missing) + len(unsaid)

    def _write_children(
        self, client: Any, experiment: str, parent: Any, chosen: list[TrialRecord], views: Views
    ) -> int:
        ended = {"FINISHED", "FAILED"}
        known = _children(client, experiment, parent)
        missing = [each for each in chosen if each.trial not in known or known[each.trial].info.status not in ended]
        for record in missing:
            if record.trial not in known:
                tags = {_PARENT: parent.info.run_id, _TRIAL: str(record.trial), **_trial_tags(record)}
                name = f"{'final' if record.source == 'final' else 'trial'} {record.trial}"
                client.create_run(experiment, to_ms(record.created_at), tags, name)
        if any(record.trial not in known for record in missing):
            known = _children(client, experiment, parent)
        for record, knobs in zip(missing, views.knobs(missing), strict=True):
            child = known[record.trial]
            self._write_rows(client, child, trial_params(record, knobs), trial_points(record))
            status = "FINISHED" if record.objective_us is not None else "FAILED"
            client.set_terminated(child.info.run_id, status, to_ms(record.created_at))
        return len(missing)

    def _write_files(
        self, client: Any, run: Any, campaign: Campaign, records: Sequence[TrialRecord], views: Views
    ) -> int:
        """Write the files whose digests differ from those in the run's tag; without new rows, only lost files."""
        before: dict[str, str] = json.loads(run.data.tags.get(_FILES, "{}"))
        present = _artifacts(client, run.info.run_id, before)
        stamp = f"{len(records)} rows, flywheel {VERSION}"
        if before.get("", "") == stamp and before.keys() - {""} <= present:
            return 0
        files = views.files(campaign, records)
        digests = {path: sha256(text.encode()).hexdigest()[:16] for path, text in files.items()}
        stale = [path for path, digest in digests.items() if before.get(path) != digest or path not in present]
        for path in stale:
            client.log_text(run.info.run_id, files[path], path)
        client.set_tag(run.info.run_id, _FILES, json.dumps({"": stamp, **digests}, sort_keys=True))
        return len(stale)


def _campaign_run(client: Any, experiment: str, campaign: Campaign) -> Any:
    """The run of a campaign; made if there is none. If two processes made one each, all processes keep the same."""
    query = f"tags.`{KEY}` = '{campaign_key(campaign)}'"
    found = list(client.search_runs([experiment], query))
    if not found:
        client.create_run(experiment, to_ms(campaign.created_at), {KEY: campaign_key(campaign)}, run_name(campaign))
        found = list(client.search_runs([experiment], query))
    if not found:
        raise OSError("does not keep a new run: is it an MLflow server?")
    return _settle(client, found)


def _replaced(client: Any, experiment: str, old: Any) -> Any:
    """A new run, without parameters and series, in the place of a campaign's `old` one, whose children it gets."""
    kept = {name: value for name, value in old.data.tags.items() if name not in (_TRIALS, _FILES)}
    new = client.create_run(experiment, old.info.start_time, kept, old.info.run_name)
    for child in _children(client, experiment, old).values():
        client.set_tag(child.info.run_id, _PARENT, new.info.run_id)
    client.delete_run(old.info.run_id)
    return client.get_run(new.info.run_id)


def _children(client: Any, experiment: str, parent: Any) -> dict[int, Any]:
    """Child runs by trial."""
    query, token, found = f"tags.`{_PARENT}` = '{parent.info.run_id}'", None, []
    while token != "":
        page = client.search_runs([experiment], query, page_token=token)
        found += list(page)
        token = page.token or ""
    twins: dict[int, list[Any]] = {}
    for run in found:
        twins.setdefault(int(run.data.tags[_TRIAL]), []).append(run)
    return {trial: _settle(client, runs) for trial, runs in twins.items()}


def _settle(client: Any, runs: list[Any]) -> Any:
    """Choose one of several runs of one campaign or trial, by the same rule in every process; delete the others."""
    first, *others = sorted(runs, key=lambda run: (_TRIALS not in run.data.tags, run.info.run_id))
    for other in others:
        client.delete_run(other.info.run_id)
    return first


def _artifacts(client: Any, run_id: str, paths: Mapping[str, str]) -> set[str]:
    folders = {"/".join(PurePosixPath(path).parts[:-1]) for path in paths}
    return {entry.path for folder in sorted(folders) for entry in client.list_artifacts(run_id, folder or None)}


def _write_tags(client: Any, run: Any, tags: Mapping[str, str]) -> int:
    changed = {name: value for name, value in tags.items() if run.data.tags.get(name) != value}
    for name, value in changed.items():
        client.set_tag(run.info.run_id, name, value)
    return len(changed)


def _write_view(client: Any, experiment: str) -> int:
    """Make the shared view show a column for each kind of latency that some campaign has."""
    tags = client.get_experiment(experiment).tags
    runs = client.search_runs([experiment], CAMPAIGNS, max_results=_VIEWED, order_by=["attributes.start_time DESC"])
    view = columns({name for run in runs for name in run.data.metrics})
    if tags.get(_VIEW_TAG) == view:
        return 0
    client.set_experiment_tag(experiment, _VIEW_TAG, view)
    return 1


def _page(experiment: str, run_id: str) -> str:
    """The address of a run's page, relative to any page of the same server."""
    return f"#/experiments/{experiment}/runs/{run_id}"


def _write_status(client: Any, run: Any, campaign: Campaign, records: Sequence[TrialRecord], live: bool) -> int:
    """Running, or finished when its last row was made."""
    end = to_ms(records[-1].created_at if records else campaign.created_at)
    if live:
        if run.info.status == "RUNNING":
            return 0
        client.update_run(run.info.run_id, status="RUNNING")
    elif (run.info.status, run.info.end_time) == ("FINISHED", end):
        return 0
    else:
        client.set_terminated(run.info.run_id, "FINISHED", end)
    return 1


def _trial_tags(record: TrialRecord) -> dict[str, str]:
    tags = {"outcome": record.outcome, "source": record.source, "reason": record.reason, "throttle": record.throttle,
            "imported_from": record.imported_from, "verdict_where": record.verdict_where}  # fmt: skip
    return {f"flywheel.{name}": value[:2000] for name, value in tags.items() if value is not None}


def _describe(campaign: Campaign, records: Sequence[TrialRecord], gained: str | None) -> str:
    """The run's description, in Markdown: the campaign, its best, and what was `gained`, in sentences."""
    best, count = best_of(records), len(trials_of(records))
    model, gpu, dtype = map(code_span, (campaign.model, campaign.gpu, campaign.dtype))
    stored = campaign.dtype if campaign.weights is None else campaign.weights
    weights = dtype if stored == campaign.dtype else code_span(stored)
    work = f"Campaign {code_span(campaign.name)}, "
    work += work_named(model, gpu, dtype, campaign.context, campaign.batch, weights)
    if best is None or best.objective_us is None:
        return f"{work}: no feasible schedule in {count} trials."
    floor = "" if best.floor_fraction is None else f", {best.floor_fraction:.1%} of the weight floor"
    kind, took = best.took.split(" ", 1)
    step = "token" if campaign.batch == 1 else "step"
    rate = tokens_per_s(best.objective_us, campaign.batch)
    tokens = rounded(rate) if best.is_predicted else f"{rate:,.0f}"
    said = f"**{kind}** {took} a {step} ({tokens} tokens/s){_expected(best)}{floor}"
    tied = ", ".join(record.title for record in tied_with(best, records))
    said = f"{work}: {said}; {best.title}, of {count} trials{f'; **tied** with {tied}' if tied else ''}."
    return said if gained is None else f"{said} {gained}"


def _expected(best: TrialRecord) -> str:
    """The range in which a measurement of a predicted best is expected, and what that rests on."""
    if not best.is_predicted or best.predicted_us is None:
        return ""
    band = band_of(best.gpu, best.predictor or "")
    return f", {band.words(best.predicted_us)} ({band.why})"


def _artifact_folder(uri: str) -> str | None:
    """The folder of artifacts of a local tracking file; None for a server, which decides for itself."""
    if not uri.startswith("sqlite:///"):
        return None
    return (Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlflow-artifacts").as_uri()


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Let one process of this machine at a time make the tables of a tracking file: MLflow's own migrations break if
    two processes run them together. The lock is on the file's folder and leaves no file there."""
    folder = Path(uri.removeprefix("sqlite:///").partition("?")[0]).resolve().parent
    if not uri.startswith("sqlite:///") or not folder.is_dir():
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


@contextmanager
def _reported(uri: str) -> Iterator[None]:
    """Turn whatever MLflow raises into a MirrorError that names the server.

    Alembic's errors too: machines that make the tables of one new database at once are in each other's way.
    """
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, OSError) as error:
        said = _fact(error).replace(uri, shown(uri))
        raise MirrorError(f"MLflow {shown(uri)}: {said if len(said) <= MOST else said[:MOST] + '...'}") from error


def _fact(error: Exception) -> str:
    """The first line of what MLflow says; of a request that failed, only why."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if said.startswith("API request to"):
        cause = said.rpartition(": ")[2].strip(" \"'()")
        return f"does not answer: {cause}"
    return said
