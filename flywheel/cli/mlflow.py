"""`flywheel mlflow`: mirror campaigns in MLflow once, or keep the mirror up to date."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from flywheel.cli.exits import FAILED
from flywheel.cli.interrupt import Drain
from flywheel.cli.options import SharedOption, command, json_option, store_option
from flywheel.cli.text import note, show, show_json
from flywheel.errors import MirrorError
from flywheel.process import child_environment
from flywheel.search.provenance import find_campaign

if TYPE_CHECKING:
    from flywheel.store.follow import Follower

_F = TypeVar("_F", bound=Callable[..., Any])

CHILDREN: Final = ("all", "kept", "none")
_PAGE: Final = "page: "
"""A search's mirror process begins the line with its page's address by this."""
_SILENT_S: Final = 10.0
"""Wall seconds that a mirror process may compute nothing after its search: its server froze during a request."""
_WORK_S: Final = 0.1
"""Processor seconds above which a process computes and does not merely wait."""
_OUTLIVE_S: Final = 120.0
"""Wall seconds that a mirror process may run after its search, at most."""
_NICENESS: Final = 5
"""Niceness of a search's mirror process, so that the search goes first."""


def tracking_option(function: _F) -> _F:
    """`--tracking-uri`, None where not given."""
    return click.option(
        "--tracking-uri", cls=SharedOption, metavar="URI",
        help="MLflow server or file.  [default: MLFLOW_TRACKING_URI, else mlflow.db beside the store]",
    )(function)  # fmt: skip


def children_option(function: _F) -> _F:
    """`--children`."""
    return click.option(
        "--children", type=click.Choice(CHILDREN), default="kept", show_default=True,
        help="Trials that get a run of their own: all, each new best, or none.",
    )(function)  # fmt: skip


@command
@click.argument("action", type=click.Choice(["sync"]), metavar="sync")
@click.argument("campaigns", nargs=-1, metavar="[NAME]...")
@tracking_option
@children_option
@click.option("--follow", is_flag=True, help="Follow the store as it grows, until Ctrl-C.")
@click.option("--pid", type=int, metavar="PID", help="With --follow: stop when this process has ended.")
@store_option
@json_option
@click.pass_context
def mlflow(
    ctx: click.Context,
    action: str,
    campaigns: tuple[str, ...],
    tracking_uri: str | None,
    children: str,
    follow: bool,
    pid: int | None,
    store: str,
    as_json: bool,
) -> None:
    """Mirror campaigns of the store, all or the named ones, in MLflow.

    Each campaign is one run of the experiment `flywheel`. A sync adds what is missing, and a second sync changes
    nothing. The store is the truth: if a server was down or lost its data, the next sync restores it.
    """
    from flywheel.store.sql import open_store

    with open_store(store, create=False) as opened:
        campaigns = tuple(find_campaign(opened, name).name for name in campaigns)
    follower = make_follower(store, tracking_uri, campaigns, children)
    if follow:
        follower.running = pid is not None
        ctx.exit(_follow(follower, pid))
    note(f"flywheel: mirroring the store in {place(follower)}")
    written = follower.look(last=True)
    if as_json:
        show_json({"tracking_uri": place(follower), "written": written})
        return
    show(f"{place(follower)}: {f'{written:,} things added' if written else 'nothing was missing'}")
    link = _link(follower.mirror.uri, follower.mirror.pages())
    note(f"{link or _dashboard(store, tracking_uri)} shows it")


def make_follower(store: str, tracking_uri: str | None, campaigns: tuple[str, ...], children: str) -> Follower:
    """A mirror of the store, not yet connected. Raises UsageError without the mlflow package."""
    from flywheel.report.files import views
    from flywheel.store.follow import Follower
    from flywheel.store.mlflow import Mirror

    return Follower(store, Mirror(tracking_place(store, tracking_uri)), campaigns, children, views())


def tracking_place(store: str, tracking_uri: str | None) -> str:
    """The tracking URI: as given, else from MLFLOW_TRACKING_URI, else a file beside the store."""
    from flywheel.store.tracking import local_tracking

    return tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or local_tracking(store)


def place(follower: Follower) -> str:
    """Where a follower writes, without a password."""
    from flywheel.store.tracking import shown

    return shown(follower.mirror.uri)


def _follow(follower: Follower, pid: int | None) -> int:
    """Follow the store and return the exit code. The reader of stderr may have gone."""
    from flywheel.store.follow import follow

    def tell(trouble: str) -> None:
        with suppress(OSError):
            note(f"flywheel: {trouble}")

    def found(page: str) -> None:
        link = _link(follower.mirror.uri, page)
        if link is not None:
            with suppress(OSError):
                note(f"{_PAGE}{link}")

    follower.found = found
    runs = _watch(pid)
    if pid is not None:
        threading.Thread(target=_expire, args=(runs,), daemon=True).start()
    with Drain(lambda: None) as drain:
        done = follow(follower, lambda: drain.requested or not runs(), tell)
    return 0 if done else FAILED


def _link(uri: str, page: str) -> str | None:
    """The address of a page, without a password; None where no server shows the page."""
    from flywheel.store.tracking import is_server, shown

    return shown(uri).rstrip("/") + page if is_server(uri) else None


def announce_mirror(store: str, tracking_uri: str | None) -> str:
    """The line that says where a search will be mirrored, or why it cannot be yet. Raises UsageError where it never
    can."""
    from flywheel.store.mlflow import check_installed
    from flywheel.store.tracking import check_answer, check_tracking, is_server, shown

    check_installed()
    uri = tracking_place(store, tracking_uri)
    try:
        check_tracking(uri, store)
        check_answer(uri)
    except MirrorError as error:
        return f"flywheel: {error}; the search goes on without it; flywheel mlflow sync adds what is missing"
    pages = "" if is_server(uri) else f"; {_dashboard(store, tracking_uri)} shows it"
    return f"Mirrored in MLflow, {shown(uri)}{pages}"


def _dashboard(store: str, tracking_uri: str | None) -> str:
    """The command, without passwords, that shows a mirror which no server shows."""
    from flywheel.store.places import make_store_url, store_name
    from flywheel.store.tracking import shown

    words = ["flywheel", "dashboard", "--store", store_name(make_store_url(store))]
    return shlex.join(words if tracking_uri is None else [*words, "--tracking-uri", shown(tracking_uri)])


def _expire(runs: Callable[[], bool]) -> None:
    """End this process some time after the followed one, even while it waits."""
    while runs():
        time.sleep(1.0)
    ended = worked = time.monotonic()
    spent_s = time.process_time()
    while time.monotonic() - worked < _SILENT_S and time.monotonic() - ended < _OUTLIVE_S:
        time.sleep(1.0)
        if time.process_time() - spent_s > _WORK_S:
            worked, spent_s = time.monotonic(), time.process_time()
    with suppress(OSError):
        note("flywheel: the mirror gave up waiting for its server; flywheel mlflow sync adds what is missing")
    os._exit(FAILED)


def _watch(pid: int | None) -> Callable[[], bool]:
    """A function that says whether process `pid` still runs; for None, always.

    A parent process is watched by being the parent, since another process may get its number.
    """
    if pid is None:
        return lambda: True
    if pid == os.getppid():
        return lambda: os.getppid() == pid

    def runs() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    return runs


class Beside:
    """A process that mirrors one campaign until this process has ended. Nobody waits for it."""

    def __init__(self, store: str, campaign: str, children: str, tracking_uri: str | None) -> None:
        # A process group of its own, which Ctrl-C does not reach; in this session, so that its priority counts.
        words = [sys.executable, "-m", "flywheel", "mlflow", "sync", "--follow", "--pid", str(os.getpid()),
                 "--children", children, "--", campaign]  # fmt: skip
        # In the environment, since they may hold passwords and everybody on the machine can read arguments.
        places = {"FLYWHEEL_MLFLOW_STORE": store, "FLYWHEEL_MLFLOW_TRACKING_URI": tracking_place(store, tracking_uri)}
        self._process = subprocess.Popen(
            words, env=child_environment(**places), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, process_group=0,
        )  # fmt: skip
        os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)

    def said(self) -> tuple[str | None, str | None]:
        """The campaign's page, and the process's last complaint so far; None where there is none."""
        assert self._process.stderr is not None
        lines = (self._process.stderr.read() or b"").decode(errors="replace").splitlines()
        self._process.returncode = self._process.poll() or 0  # it outlives this process; Popen would warn
        pages, complaints = (
            [line.removeprefix(mark) for line in lines if line.startswith(mark)] for mark in (_PAGE, "flywheel: ")
        )
        return pages[-1] if pages else None, complaints[-1] if complaints else None
