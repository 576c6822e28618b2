from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest

from flywheel.children import start_child, start_program
from tests.orphans import KINDS

ROOT = Path(__file__).parents[1]
SOON_S = 2.0


@contextmanager
def owner(state: str, go: Path) -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A process that has started a child of each of KINDS, which are in `state`, and their process ids."""
    words = [sys.executable, "-m", "tests.orphans", state]
    settings = {**os.environ, "GO": str(go)}
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, env=settings) as process:
        children: dict[str, int] = {}
        busy = 0
        try:
            assert process.stderr is not None
            while busy < len(KINDS):
                line = process.stderr.readline()
                assert line, "the owner ended"
                if line.startswith("orphan "):
                    _, pid, kind = line.strip().split(" ", 2)
                    children[kind] = int(pid)
                busy += line == "busy\n"
                if len(children) == len(KINDS):
                    go.touch()
            yield process, children
        finally:
            process.kill()
            for pid in children.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def running(pid: int) -> bool:
    """Whether a process runs. A dead one that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def left(children: dict[str, int]) -> list[str]:
    """Who still runs after SOON_S."""
    end = time.monotonic() + SOON_S
    while any(map(running, children.values())) and time.monotonic() < end:
        time.sleep(0.02)
    return [kind for kind, pid in children.items() if running(pid)]


@pytest.mark.parametrize(
    ("state", "number"),
    [
        ("in foreign code", signal.SIGKILL),
        pytest.param("in a loop", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("idle", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("in a loop", signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_every_child_ends_with_its_owner_whatever_it_executes(state: str, number: int, tmp_path: Path) -> None:
    with owner(state, tmp_path / "go") as (process, children):
        assert set(children) == set(KINDS)
        assert all(map(running, children.values()))
        process.send_signal(number)
        assert left(children) == []


def test_a_child_does_not_end_with_the_thread_that_asked_for_it() -> None:
    source = f"import os, time; from flywheel.lifetime import *; die_with_parent({os.getpid()}); time.sleep(600)"
    started: list[subprocess.Popen[bytes]] = []

    def ask() -> None:
        started.append(start_child(lambda: subprocess.Popen([sys.executable, "-c", source])))

    thread = Thread(target=ask)
    thread.start()
    thread.join()
    with started[0] as child:
        time.sleep(0.5)
        try:
            assert child.poll() is None
        finally:
            child.kill()


def test_a_child_whose_parent_has_ended_before_it_said_so_ends_at_once() -> None:
    source = "from flywheel.lifetime import *; die_with_parent(1 << 22); print('lives')"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")


def test_a_program_has_its_own_exit_code_and_streams() -> None:
    script = "import sys; print(sys.stdin.read().upper()); sys.stderr.write('said'); sys.exit(7)"
    pipe = subprocess.PIPE
    with start_program([sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True) as program:
        assert program.communicate("given") == ("GIVEN\n", "said")
    assert program.returncode == 7


def test_a_program_that_is_not_there_is_one_line() -> None:
    with start_program(["/nonexistent/program"], stderr=subprocess.PIPE, text=True) as program:
        assert program.communicate()[1] == "/nonexistent/program: No such file or directory\n"
    assert program.returncode == 127


def test_what_a_program_started_ends_when_nobody_has_the_program_any_more() -> None:
    script = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid)"
    with start_program([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as program:
        pid = int(program.communicate()[0])
    assert running(pid)
    del program
    assert left({"child": pid}) == []
