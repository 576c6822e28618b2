"""A Ray cluster that loses its head, or the raylet of the search's machine, under a search that runs as a command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from time import monotonic, sleep
from typing import Any, Final

import pytest
from effort import LONG, sample
from patience import HANG_S

from flywheel.store.sql import open_store

SEARCH: Final = (
    "search", "--model", "smollm2-135m", "--gpu", "l4", "--context", "16", "--measure", "predict", "--engine", "ray",
    "--workers", "1", "--trials", "100000", "--cold", "--name", "c", "--jsonl",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Head:
    """A cluster of one node in processes of its own: its address, how to reach it, and its folder."""

    address: str
    environ: Mapping[str, str]
    folder: str

    def pid(self, name: str) -> int:
        """Of its gcs_server or raylet."""
        (found,) = [each for each, words in self.processes() if Path(words[0]).name == name]
        return found

    def processes(self) -> Iterator[tuple[int, list[str]]]:
        """(pid, command line) of all that were told its folder."""
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if self.folder in (entry / "environ").read_bytes().decode(errors="replace"):
                    yield int(entry.name), words


@pytest.fixture
def head() -> Iterator[Head]:
    """By Ray's own command: a process that is a driver has one token for its whole life."""
    with tempfile.TemporaryDirectory(prefix="fw", dir="/tmp") as folder:  # sockets want short names
        environ = {**os.environ, "RAY_TMPDIR": folder, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}
        options = ("--head", "--port=0", "--num-cpus=1", "--include-dashboard=false", "--include-log-monitor=false",
                   "--no-monitor", "--disable-usage-stats")  # fmt: skip
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start")
        subprocess.run([*ray, *options], env=environ, check=True, capture_output=True, timeout=120)
        made = Head(Path(folder, "ray", "ray_current_cluster").read_text().strip(), environ, folder)
        yield made
        for pid, _ in made.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def reported(out: Path) -> list[dict[str, Any]]:
    """The trials that a search has said to be in its store."""
    events = [json.loads(line) for line in out.read_text().split("\n")[:-1]]
    return [event for event in events if event["event"] == "trial"]


@LONG
@pytest.mark.parametrize(
    ("process", "number", "fact"),
    [
        *sample([
            ("gcs_server", signal.SIGKILL, "its head does not answer"),
            ("raylet", signal.SIGKILL, "this machine's raylet does not answer: Connection refused"),
        ]),
        pytest.param("gcs_server", signal.SIGSTOP, "its head does not answer", marks=pytest.mark.slow),
    ],
)
def test_a_cluster_that_is_gone_ends_its_search_with_code_1_and_its_rows(
    head: Head, process: str, number: signal.Signals, fact: str, tmp_path: Path
) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        where = ("--ray-address", head.address, "--store", str(tmp_path / "s.db"))
        command = [sys.executable, "-m", "flywheel", *SEARCH, *where]
        search = subprocess.Popen(command, env=head.environ, stdout=stdout, stderr=stderr)
    deadline = monotonic() + 120
    while len(reported(out)) < 3 and search.poll() is None and monotonic() < deadline:
        sleep(0.1)
    os.kill(head.pid(process), number)
    try:
        code = search.wait(HANG_S)
    finally:
        search.kill()
    assert code == 1, err.read_text()
    # The last one where a loaded machine starts an actor slowly.
    progress = ("Known: ", "trials ", "Latencies ", "smollm2", "flywheel: actor 0 waits for room")
    assert [line for line in err.read_text().splitlines() if not line.startswith(progress)] == [
        f"flywheel: ray: the cluster at {head.address} is gone: {fact}; rows are kept, and when it is back, the same "
        "command goes on"
    ]
    with open_store(str(tmp_path / "s.db"), create=False) as store:
        rows = store.trials("c")
    said = [(each["trial"], each["config_id"]) for each in reported(out)]
    assert [(row.trial, row.config_id) for row in rows] == said
    assert {row.outcome for row in rows} <= {"predicted", "rejected"}
