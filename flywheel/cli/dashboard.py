"""`flywheel dashboard`: MLflow's pages on the local store."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.error import URLError
from urllib.request import urlopen

import click

from flywheel.children import start_program
from flywheel.cli.interrupt import Drain
from flywheel.cli.mlflow import children_option, make_follower, place, tracking_option
from flywheel.cli.options import command, json_option, store_option
from flywheel.cli.text import note, show, show_json
from flywheel.errors import MirrorError, UsageError
from flywheel.process import child_environment

HOST: Final = "127.0.0.1"
START_S: Final = 120.0
"""Wall seconds until MLflow's server must answer. It takes some, and many on a loaded machine."""
STOP_S: Final = 10.0


@command
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="PORT",
              help="Port of the pages.  [default: a free one]")  # fmt: skip
@tracking_option
@children_option
@store_option
@json_option
def dashboard(port: int, tracking_uri: str | None, children: str, store: str, as_json: bool) -> None:
    """Show the store's campaigns in MLflow's browser pages, for this machine only, until Ctrl-C.

    The command first brings the mirror up to date, and keeps it so while the pages are open.
    """
    from flywheel.store.follow import follow

    follower = make_follower(store, tracking_uri, (), children)
    uri = follower.mirror.uri
    if "://" in uri and uri.split("://")[0] in ("http", "https", "databricks"):
        raise UsageError(f"{place(follower)} is already a server with pages; flywheel mlflow sync fills it")
    note(f"flywheel: mirroring the store in {place(follower)} and starting MLflow's pages; this takes some seconds")
    follower.look(last=False)
    pages = follower.mirror.pages()
    with Drain(lambda: None) as drain, serve(uri, port or free_port(), lambda: drain.requested) as (address, runs):
        if as_json:
            show_json({"url": address + pages, "tracking_uri": place(follower)}, indent=None)
        else:
            show(address + pages)
            note(f"flywheel: MLflow on {place(follower)}; Ctrl-C ends it")
        follow(follower, lambda: drain.requested or not runs(), lambda trouble: note(f"flywheel: {trouble}"))
        if not drain.requested:
            raise MirrorError("MLflow's server ended by itself; run mlflow server to see why")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        number: int = probe.getsockname()[1]
    return number


@contextmanager
def serve(uri: str, port: int, stop: Callable[[], bool]) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Run MLflow's server on a tracking file within the block: its address, once it answers, and whether it still runs.

    Raises MirrorError where it does not answer within START_S.
    """
    words = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1",
             "--gunicorn-opts", "--config python:flywheel.store.pages", *_artifacts(uri)]  # fmt: skip
    # gunicorn imports from its working directory, so it gets another one. The URI may hold a password: it is passed in
    # the environment, since everybody on the machine can read arguments.
    settings = {"MLFLOW_BACKEND_STORE_URI": _absolute(uri), "MLFLOW_DISABLE_TELEMETRY": "true",
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # fmt: skip
    server = start_program(words, cwd="/", env=child_environment(**settings))
    try:
        address = f"http://{HOST}:{port}"
        _await(address, lambda: server.poll() is None and not stop())
        yield address, lambda: server.poll() is None
    finally:
        _end(server)


def _absolute(uri: str) -> str:
    """The URI with an absolute path, so that it names the same file from any working directory."""
    if not uri.startswith("sqlite:///"):
        return uri
    path, mark, query = uri.removeprefix("sqlite:///").partition("?")
    return f"sqlite:///{Path(path).resolve()}{mark}{query}"


def _artifacts(uri: str) -> list[str]:
    if not uri.startswith("sqlite:///"):
        return []
    folder = Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlflow-artifacts"
    return ["--artifacts-destination", folder.as_uri()]


def _await(address: str, goes_on: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while goes_on() and time.monotonic() < deadline:
        try:
            with urlopen(f"{address}/health", timeout=2):
                return
        except (URLError, OSError):
            time.sleep(0.1)
    raise MirrorError(f"MLflow's server does not answer at {address}")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server and its workers, which are one process group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, number)
            server.wait(STOP_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        return
