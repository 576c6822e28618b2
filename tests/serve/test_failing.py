"""A server whose decoding process cannot be replaced: what its health says, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import pytest
from effort import LONG
from patience import HANG_S
from serve.conftest import Served, eventually, serving

PATIENT = "import sys; import flywheel.serve.engine as engine; engine._PAUSES_S = (0.0,) + 9 * (0.3,); "
"""The pauses between attempts take five minutes otherwise."""


@pytest.fixture
def failing(checkpoint: Path, tmp_path: Path) -> Iterator[Served]:
    """A server of a model that can be taken away: the directory `model` of `tmp_path`."""
    shutil.copytree(checkpoint, tmp_path / "model")
    command = [sys.executable, "-c", PATIENT + "from flywheel.cli.main import main; sys.exit(main())"]
    with serving(command, tmp_path / "model", tmp_path) as served:
        yield served


def health(served: Served) -> tuple[int, str]:
    """(status, reason) of /health."""
    address = urlparse(served.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=HANG_S)
    connection.request("GET", "/health")
    answer = connection.getresponse()
    document = json.load(answer)
    connection.close()
    return answer.status, document.get("why", document["status"])


@LONG
def test_health_is_what_a_request_meets_and_a_server_without_workers_ends(failing: Served, tmp_path: Path) -> None:
    pid = failing.process.pid
    assert health(failing) == (200, "ok")
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    (worker,) = failing.workers()
    used = max(int(each.name) for each in Path(f"/proc/{pid}/fd").iterdir())
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 3, limits[1]))  # room for a client, not for a worker
    os.kill(worker, signal.SIGKILL)
    assert eventually(lambda: "Too many open files" in health(failing)[1])
    assert health(failing)[0] == 503
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    assert eventually(lambda: health(failing) == (200, "ok"))
    shutil.rmtree(tmp_path / "model")
    os.kill(failing.workers()[0], signal.SIGKILL)
    assert failing.process.wait(HANG_S) == 1
    assert failing.process.stderr is not None
    said = failing.process.stderr.read()
    assert said.splitlines()[-1].startswith("flywheel: the server ends, since no decoding process runs any more: ")
    assert "Traceback" not in said
