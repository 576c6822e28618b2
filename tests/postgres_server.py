"""A throw-away PostgreSQL server: its own cluster in a temporary folder, behind a Unix socket, never as root."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import psycopg

MISSING = "the tests need PostgreSQL's server, initdb and postgres: on Debian and Ubuntu, apt install postgresql"
BINARIES = ("initdb", "postgres")
START_S = 60
SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # what a killed process leaves is in the kernel all the same
    "autovacuum": "off",
    "max_connections": "60",
    "shared_buffers": "16MB",
}
# A server whose tests were killed reads the end of its standard input, and ends too.
GUARD = 'exec 3<&0; "$@" 3<&- & server=$!; (read -r _ <&3; kill -QUIT $server) & wait $server'


def find_binaries() -> Path | None:
    """Folder of initdb and postgres: of those on PATH, else of Debian's newest. None where they are not installed."""
    found = shutil.which("initdb")
    on_path = [Path(found).resolve().parent] if found is not None else []
    folders = [*on_path, *debian_folders()]
    return next((folder for folder in folders if all((folder / name).is_file() for name in BINARIES)), None)


def debian_folders() -> Iterator[Path]:
    """Where Debian's packages put a version's programs, newest first."""
    versions = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if re.fullmatch(r"\d+", path.parent.name)]
    yield from sorted(versions, key=lambda path: -int(path.parent.name))


def unprivileged() -> dict[str, Any]:
    """How a process is started whose owner must not be root."""
    if os.geteuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


class Server:
    """A running server; use as a context manager. `stop` and `start` take it away and bring it back."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._who = unprivileged()
        self._folder = Path(tempfile.mkdtemp(prefix="flywheel-postgres-"))
        self._names = count()
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        if self._who:
            os.chown(self._folder, self._who["user"], self._who["group"])
        command = [self._binaries / "initdb", "--username=flywheel", "--auth=trust", "--locale=C", "--encoding=UTF8"]
        options = ["--no-sync", "--wal-segsize=1", "--pgdata", self._data]
        done = subprocess.run(
            [*command, *options], cwd=self._folder, capture_output=True, text=True, check=False, **self._who
        )
        assert done.returncode == 0, done.stderr
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self._folder)

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    @property
    def pid(self) -> int:
        """Of the server's first process, from which each session's is forked."""
        return int((self._data / "postmaster.pid").read_text().partition("\n")[0])

    def url(self, database: str) -> str:
        """URL of a database."""
        return f"postgresql://flywheel@/{database}?host={self._folder}"

    def create_database(self) -> str:
        """URL of a new, empty database."""
        name = f"store{next(self._names)}"
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop a database of `create_database`, whoever uses it."""
        name = urlsplit(url).path.removeprefix("/")
        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")

    def start(self) -> None:
        """Start, and wait until it answers."""
        settings = {**SETTINGS, "unix_socket_directories": str(self._folder)}
        options = [option for name, value in settings.items() for option in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "sh", self._binaries / "postgres", "-D", self._data, *options],
                cwd=self._folder,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the tests
                **self._who,
            )
        deadline = monotonic() + START_S
        while not self._answers():
            assert self._process.poll() is None and monotonic() < deadline, (self._folder / "log").read_text()
            sleep(0.02)

    @contextmanager
    def files_up_to(self, size_bytes: int) -> Iterator[None]:
        """No file of a session that begins in here can grow beyond that; a write that would is cut or refused."""
        self._limit_files(f"{size_bytes}:")
        try:
            yield
        finally:
            self._limit_files("unlimited:")

    def _limit_files(self, soft: str) -> None:
        command = ["prlimit", "--pid", str(self.pid), f"--fsize={soft}"]
        subprocess.run(command, cwd=self._folder, check=True, **self._who)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """With every process of the server stopped: it takes connections and answers none."""
        self.freeze()
        try:
            yield
        finally:
            self.thaw()

    def freeze(self) -> None:
        """Stop every process of the server, the first one before it can start another."""
        os.kill(self.pid, signal.SIGSTOP)
        for session in self._sessions():
            os.kill(session, signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        for process in (*self._sessions(), self.pid):
            os.kill(process, signal.SIGCONT)

    def _sessions(self) -> list[int]:
        command = ["ps", "-o", "pid=", "--ppid", str(self.pid)]
        listed = subprocess.run(command, capture_output=True, text=True, check=False)
        return [int(line) for line in listed.stdout.split()]

    def stop(self) -> None:
        """Stop at once, as a crash would: every session ends, and what was committed is there at the next start."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait(timeout=START_S)
            self._process = None

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.url("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True
