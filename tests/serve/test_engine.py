"""What becomes of requests where the decoding process dies, hangs, or does not start again."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from effort import LONG
from endless import load_for_ever, load_once, nothing, refuse, stop_itself
from serve.conftest import eventually

from flywheel.errors import FlywheelError, UsageError
from flywheel.runtime.sequences import Sampling
from flywheel.serve import child as children
from flywheel.serve import engine as engines
from flywheel.serve.child import GoneError
from flywheel.serve.engine import Died, Engine, FullError, Heard
from flywheel.serve.worker import Ask, Begun

ASK = Ask(-1, (1, 2), None, 150, Sampling(1.0), (), True)


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """`begin(then)`: a started engine whose second worker does `then`. Its lines go to `said`."""
    monkeypatch.setattr(engines, "_PAUSES_S", (0.0, 0.1))
    begun: list[Engine] = []

    def make(then: Callable[[], None] = refuse, most: int = 4, say: Callable[[str], None] = lambda _: None) -> Engine:
        begun.append(Engine(partial(load_once, tmp_path / "mark", then), most, say))
        begun[-1].start()
        return begun[-1]

    yield make
    for engine in begun:
        engine.close()
    assert eventually(lambda: multiprocessing.active_children() == [])  # the engine's thread may be waiting for it, too


def strike(number: int) -> None:
    """Send a signal to the one worker."""
    (worker,) = multiprocessing.active_children()
    assert worker.pid is not None
    os.kill(worker.pid, number)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no file but in the place of one that it closes."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open() as free:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free.fileno(), limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_requests_are_told_when_no_worker_starts_again(begin: Callable[..., Engine]) -> None:
    engine, heard = begin(), list[Heard]()
    engine.ask(ASK, heard.append)
    assert eventually(lambda: heard == [Begun(0, 2)])
    strike(signal.SIGKILL)
    assert eventually(lambda: isinstance(heard[-1], Died))
    assert eventually(lambda: engine.failed == "no memory is left")
    assert engine.waiting == 0
    assert engine.unable == f"no decoding process runs any more: {engines._UNTOLD}"  # a reason may name directories
    with pytest.raises(FlywheelError, match="no decoding process runs any more: it cannot load the model"):
        engine.ask(ASK, heard.append)


def test_a_first_worker_that_refuses_says_why(tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    engine = Engine(partial(load_once, tmp_path / "mark", refuse), 4)
    with pytest.raises(UsageError, match="no memory is left"):
        engine.start()
    engine.close()


def test_an_engine_that_is_closed_takes_no_request_and_leaves_no_worker(begin: Callable[..., Engine]) -> None:
    engine, heard = begin(), list[Heard]()
    engine.ask(ASK, heard.append)
    assert eventually(lambda: len(heard) == 1)
    engine.close()
    assert heard[-1] == Died("the server is shutting down")
    with pytest.raises(FlywheelError, match="the server is shutting down"):
        engine.ask(ASK, heard.append)
    with pytest.raises(GoneError, match="died of SIGTERM while it started"):
        engine._spawn()


def test_a_worker_is_replaced_as_soon_as_the_system_gives_a_process_again(
    begin: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_PAUSES_S", (0.0,) + 1000 * (0.05,))
    said: list[str] = []
    engine = begin(nothing, say=said.append)
    with no_descriptors():
        strike(signal.SIGKILL)
        assert eventually(lambda: engine.unable is not None and "attempt 3 of 1001" in engine.unable)
        assert engine.unable is not None
        assert "cannot be started: Too many open files" in engine.unable
        with pytest.raises(FlywheelError, match="starting again"):
            engine.ask(ASK, print)
    assert eventually(lambda: engine.unable is None)
    heard: list[Heard] = []
    engine.ask(ASK, heard.append)
    assert eventually(lambda: len(heard) == 1)
    assert said[0] == "the decoder's process died of SIGKILL; starting another one"
    assert said[-1] == "another decoding process is ready"


def test_a_start_without_descriptors_is_refused(tmp_path: Path) -> None:
    engine = Engine(partial(load_once, tmp_path / "mark", refuse), 4)
    with no_descriptors(), pytest.raises(GoneError, match="cannot be started: Too many open files"):
        engine.start()


@pytest.mark.parametrize("short", ["process", "thread"])
def test_no_process_and_no_thread_count_as_failed_starts_and_leave_nothing(
    begin: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    engine = begin()
    files = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        if short == "process":
            patch.setattr("multiprocessing.util.spawnv_passfds", raising(BlockingIOError, 11, "try again"))
        else:
            patch.setattr("threading.Thread.start", raising(RuntimeError, "can't start new thread"))
        strike(signal.SIGKILL)
        assert eventually(lambda: engine.failed is not None)
    words = "try again" if short == "process" else "can't start new thread"
    assert engine.failed == f"the decoder's process cannot be started: {words}"
    assert eventually(lambda: multiprocessing.active_children() == [])
    assert len(list(Path("/proc/self/fd").iterdir())) <= files


def raising(kind: type[Exception], *words: object) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise kind(*words)

    return fail


def test_a_worker_that_is_stopped_is_killed_and_replaced(
    begin: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, heard = begin(nothing), list[Heard]()
    monkeypatch.setattr(engines, "_PAUSES_S", (0.0,) * 10)
    with monkeypatch.context() as patch:
        patch.setattr(children, "_MISSED", 3)
        engine.ask(ASK, heard.append)
        assert eventually(lambda: len(heard) == 1)  # from the next beat on, the limit holds
        strike(signal.SIGSTOP)
        assert eventually(lambda: engine.restarts == 1)
    assert eventually(lambda: engine.unable is None)  # a busy machine takes longer to start a process
    assert heard[-1] == Died(
        "the decoder's process did not answer for 3 s and was killed; the next request is answered by another one"
    )


@pytest.mark.parametrize(
    ("then", "limit", "value", "why"),
    [
        (load_for_ever, "_START_S", 0.0, "was not ready after 0 s and was killed"),
        pytest.param(
            stop_itself, "_MISSED", 3, "did not answer for 3 s and was killed while it started", marks=LONG
        ),
    ],
)
def test_a_worker_that_hangs_while_it_starts_counts_as_a_failed_start(
    begin: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, then: Callable[[], None], limit: str, value: float,
    why: str,
) -> None:  # fmt: skip
    engine = begin(then)
    monkeypatch.setattr(children, limit, value)
    monkeypatch.setattr(engines, "_PAUSES_S", (0.0,))
    strike(signal.SIGKILL)
    assert eventually(lambda: engine.failed == f"the decoder's process {why}")


def test_a_thread_of_the_engine_that_fails_fails_the_engine(
    begin: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[str] = []
    monkeypatch.setattr("threading.excepthook", lambda what: traces.append(str(what.exc_value)))
    engine = begin()

    def hear(_: Heard) -> None:
        raise MemoryError("unforeseen")

    engine.ask(ASK, hear)
    assert eventually(lambda: engine.failed == "MemoryError in the server's own thread")
    assert engine.unable is not None
    assert eventually(lambda: traces == ["unforeseen"])


def test_a_sending_thread_that_fails_costs_its_worker(
    begin: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces: list[str] = []
    monkeypatch.setattr("threading.excepthook", lambda what: traces.append(str(what.exc_value)))
    engine, heard = begin(nothing), list[Heard]()
    engine.ask(Ask(-1, (1,), (threading.Lock(),), 1, Sampling(1.0), ()), heard.append)  # type: ignore[arg-type]
    assert eventually(lambda: engine.restarts == 1 and engine.unable is None)
    assert isinstance(heard[-1], Died)
    assert "pickle" in traces[0]


def test_a_full_queue_is_no_fault_of_the_engine(begin: Callable[..., Engine]) -> None:
    engine = begin(most=1)
    engine.ask(ASK, lambda _: None)
    with pytest.raises(FullError, match="1 requests are under way, of at most 1"):
        engine.ask(ASK, lambda _: None)
    assert engine.unable is None
