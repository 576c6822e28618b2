"""What becomes of requests where workers do not start again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from effort import LONG
from serve.conftest import eventually

from flywheel.decode.sampling import Sampling
from flywheel.errors import FlywheelError, UsageError
from flywheel.serve import engine as engines
from flywheel.serve.decoder import Decoder
from flywheel.serve.engine import Died, Engine, Heard
from flywheel.serve.worker import Ask

ASK = Ask(-1, "a", None, 150, Sampling(1.0), (), True)


def load_once(folder: Path, mark: Path) -> Decoder:
    """A decoder the first time, a refusal from then on."""
    if mark.exists():
        raise UsageError("no memory is left")
    mark.touch()
    return Decoder.load(str(folder), device="reference", context=160)


@LONG
def test_requests_are_told_when_no_worker_starts_again(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "_PAUSES_S", (0.0, 0.1))
    engine = Engine(partial(load_once, checkpoint, tmp_path / "mark"), 4)
    engine.start()
    try:
        heard: list[Heard] = []
        engine.ask(ASK, heard.append)
        assert eventually(lambda: len(heard) > 1)
        assert engine._process is not None
        engine._process.kill()
        assert eventually(lambda: isinstance(heard[-1], Died))
        assert eventually(lambda: engine.failed == "no memory is left", 120)
        assert engine.waiting == 0
        with pytest.raises(FlywheelError, match="failed to start: no memory is left"):
            engine.ask(ASK, heard.append)
    finally:
        engine.close()


def test_a_first_worker_that_refuses_says_why(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "mark").touch()
    engine = Engine(partial(load_once, checkpoint, tmp_path / "mark"), 4)
    with pytest.raises(UsageError, match="no memory is left"):
        engine.start()
    engine.close()


def test_an_engine_that_is_closed_takes_no_request_and_leaves_no_worker(checkpoint: Path, tmp_path: Path) -> None:
    engine = Engine(partial(load_once, checkpoint, tmp_path / "mark"), 4)
    engine.start()
    heard: list[Heard] = []
    engine.ask(ASK, heard.append)
    assert eventually(lambda: len(heard) > 1)
    engine.close()
    assert heard[-1] == Died("the server is shutting down")
    with pytest.raises(FlywheelError, match="the server is shutting down"):
        engine.ask(ASK, heard.append)
    with pytest.raises(UsageError, match="died of SIGTERM while it started"):
        engine._spawn()
