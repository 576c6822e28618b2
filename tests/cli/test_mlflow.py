"""The mirror as a process of its own: a server that is dead, hangs or dies takes nothing from the search."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cli.conftest import quieten
from click.testing import Result
from effort import LONG
from patience import HANG_S

from flywheel.cli.dashboard import free_port, serve
from flywheel.cli.mlflow import _OUTLIVE_S, CHILDREN
from flywheel.measure.latency import curtailed
from flywheel.store import mlflow as mirror
from flywheel.store.sql import open_store

Run = Callable[..., Result]

SEARCH = (
    "search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--jobs", "1", "--name", "c", "--json",
)  # fmt: skip


@pytest.fixture
def dead() -> str:
    """A server that is not there."""
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
def hung() -> Iterator[str]:
    """A server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        held: list[socket.socket] = []

        def accept() -> None:
            try:
                while True:
                    held.append(listener.accept()[0])
            except OSError:
                return

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for connection in held:
            connection.close()


@pytest.fixture
def searches() -> Iterator[Callable[..., tuple[dict[str, Any], str]]]:
    """Run a search in a process: (its JSON, its stderr). Ends its mirrors.

    A mirror goes on for as long as its search runs, so a search that waits for its mirror never ends.
    """
    started: list[int] = []

    def search(store: str, *options: str) -> tuple[dict[str, Any], str]:
        command = [sys.executable, "-m", "flywheel", *SEARCH, "--store", store, *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process.pid)
        out, err = process.communicate(timeout=HANG_S)
        assert process.returncode == 0, err
        for mirror_process in processes("--pid", process.pid):
            with suppress(PermissionError, ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, mirror_process, 0)  # it has nobody to yield to but other tests
        return json.loads(out), err

    yield search
    for parent in started:
        for process in processes("--pid", parent):
            os.kill(process, signal.SIGKILL)


@pytest.fixture
def tracking(empty_tracking: Path, quiet_environment: None) -> str:
    """An empty tracking file here."""
    shutil.copy(empty_tracking, "m.db")
    return f"sqlite:///{Path.cwd() / 'm.db'}"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a search without a mirror finds."""
    command = [sys.executable, "-m", "flywheel", *SEARCH, "--store", "plain.db", "--trials", "6"]
    with pytest.MonkeyPatch.context() as patch:
        quieten(patch, tmp_path_factory.mktemp("plain"))
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S)
    return facts(json.loads(done.stdout))


def processes(option: str, value: int) -> list[int]:
    """Processes of MLflow's and of its mirrors that were given that value of an option."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        if "mlflow" in words and option in words and words[words.index(option) + 1] == str(value):
            found.append(int(entry.parent.name))
    return found


def until(holds: Callable[[], bool], limit_s: float = 240.0) -> None:
    """Wait; a mirror gets little of a busy machine."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def facts(document: dict[str, Any]) -> dict[str, Any]:
    """What a search found, without its times."""
    return {name: value for name, value in document.items() if name not in ("elapsed_s", "events")}


def runs(uri: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("flywheel")
    found = [] if experiment is None else client.search_runs([experiment.experiment_id])
    return {run.info.run_name: run for run in found}


def test_sync_mirrors_beside_the_store_and_then_finds_nothing_missing(run: Run, store: str) -> None:
    first = run("mlflow", "sync", "--store", store, "--json")
    assert first.exit_code == 0, first.stderr
    assert json.loads(first.stdout)["written"] > 20
    again = run("mlflow", "sync", "small", "--store", store)
    assert again.stdout == f"sqlite:///{Path.cwd() / 'mlflow.db'}: nothing was missing\n"
    assert again.stderr.endswith(f"\nflywheel dashboard --store {store} shows it\n")
    found = runs(f"sqlite:///{Path.cwd() / 'mlflow.db'}")
    assert found["small"].info.status == "FINISHED"
    assert "trial 0" in found
    files = {path.name for path in Path("mlflow-artifacts").rglob("*") if path.is_file()}
    assert {"best_schedule.json", "report.html", "results.tsv", "history.svg", "layer.svg"} <= files


def test_an_unknown_campaign_is_a_usage_error_before_anything_is_written(run: Run, searched: Path) -> None:
    result = run("mlflow", "sync", "smll", "--store", searched, "--tracking-uri", "sqlite:///m.db")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert not Path("m.db").exists()


def test_a_dead_server_is_one_line_and_code_1(run: Run, searched: Path, dead: str) -> None:
    result = run("mlflow", "sync", "--store", searched, "--tracking-uri", dead)
    assert (result.exit_code, result.stdout) == (1, "")
    assert [dead in line for line in result.stderr.splitlines()] == [True, True]  # what it does, and what came of it


def test_the_offered_children_are_those_of_the_mirror() -> None:
    assert CHILDREN == mirror.CHILDREN


def test_without_mlflow_a_search_that_wants_it_does_not_start(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "find_spec", lambda _: None)
    result = run(*SEARCH, "--trials", "1", "--mlflow", "kept")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "[mlflow]" in result.stderr
    assert not Path("flywheel.db").exists()


def test_a_tracking_uri_that_is_none_ends_a_search_before_it_starts(run: Run) -> None:
    result = run(*SEARCH, "--trials", "1", "--mlflow", "kept", "--tracking-uri", "http://[::1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not a URL of a server" in result.stderr
    assert not Path("flywheel.db").exists()


@pytest.mark.parametrize("kind", ["dead", pytest.param("hung", marks=LONG)])
def test_nothing_waits_for_a_server_that_does_not_answer_and_nothing_is_lost(
    kind: str, request: pytest.FixtureRequest, run: Run, searches: Callable[..., tuple[dict[str, Any], str]],
    plain: dict[str, Any], tracking: str,
) -> None:  # fmt: skip
    options = ("--trials", "6", "--mlflow", "all", "--tracking-uri", request.getfixturevalue(kind))
    mirrored, said = searches("mirrored.db", *options)
    assert said.startswith(f"flywheel: MLflow {options[-1]}: does not answer: ")
    assert said.index("the search goes on without it") < said.index("trial ")
    assert facts(mirrored) == plain
    result = run("mlflow", "sync", "--children", "all", "--store", "mirrored.db", "--tracking-uri", tracking)
    assert result.exit_code == 0, result.stderr
    assert sorted(runs(tracking)) == ["c", *(f"trial {trial}" for trial in range(6))]


def trials(store: str) -> int:
    with open_store(store, create=False) as opened:
        return len(opened.trials("c"))


@LONG
def test_a_server_killed_in_the_middle_takes_nothing_from_the_search_and_is_made_up_for(
    run: Run, tracking: str
) -> None:
    port = free_port()
    options = ("--store", "s.db", "--trials", "100000", "--sampler", "random", "--mlflow", "kept", "--tracking-uri")
    with serve(tracking, port, lambda: False) as (address, _):
        command = [sys.executable, "-m", "flywheel", *SEARCH, *options, address]
        search = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until(lambda: "trial 0" in runs(tracking))
        os.killpg(os.getpgid(processes("--port", port)[0]), signal.SIGKILL)
    before = trials("s.db")
    until(lambda: trials("s.db") >= before + 10)
    search.send_signal(signal.SIGINT)
    out, err = search.communicate(timeout=HANG_S)
    assert search.returncode == 130, err
    assert f"Mirrored in MLflow, {address}\n" in err
    assert re.search(rf"In MLflow: {address}/#/experiments/\d+/runs/[0-9a-f]{{32}}\?workflowType=machine_learning", err)
    for process in processes("--pid", search.pid):
        os.kill(process, signal.SIGKILL)
    found = json.loads(out)
    assert found["trials"] == trials("s.db")
    with serve(tracking, port, lambda: False) as (address, _):
        assert run("mlflow", "sync", "--store", "s.db", "--tracking-uri", address).exit_code == 0
        again = run("mlflow", "sync", "--store", "s.db", "--tracking-uri", address)
        assert again.stdout.endswith("nothing was missing\n")
        parent = runs(address)["c"]
        assert parent.data.tags["flywheel.trials"] == str(found["trials"])
        assert parent.data.metrics["best_us/predicted"] == curtailed(found["best"]["predicted_us"])


@LONG
def test_a_mirror_whose_request_is_never_answered_ends_after_its_search(
    searches: Callable[..., tuple[dict[str, Any], str]], hung: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert HANG_S < _OUTLIVE_S  # by which every mirror ends
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "600")
    searches("s.db", "--trials", "3", "--mlflow", "kept", "--tracking-uri", hung)
    (mirror_process,) = mirrors_of("s.db")
    until(lambda: not Path(f"/proc/{mirror_process}").exists(), HANG_S)


def mirrors_of(store: str) -> list[int]:
    """Mirrors of a store, which stands in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"FLYWHEEL_MLFLOW_STORE={store}" in entry.read_bytes().decode(errors="replace").split("\0"):
                found.append((entry.parent.name, (entry.parent / "cwd").readlink()))
    return [int(number) for number, folder in found if folder == Path.cwd()]


def test_the_mirror_beside_a_search_follows_it_to_its_end_and_ends(
    searches: Callable[..., tuple[dict[str, Any], str]], tracking: str
) -> None:
    searches("trials.db", "--trials", "8", "--mlflow", "none", "--tracking-uri", tracking)
    until(lambda: "c" in runs(tracking) and runs(tracking)["c"].info.status == "FINISHED")
    assert list(runs(tracking)) == ["c"]
    assert runs(tracking)["c"].data.tags["flywheel.trials"] == "8"
    files = {path.name for path in Path("mlflow-artifacts").rglob("*")}
    assert {"best_schedule.json", "report.html"} <= files
