"""The command serve, without a socket that anybody uses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from flywheel.cli import interrupt
from flywheel.cli.serve import serve


class Stub:
    """An engine that starts at once."""

    def __init__(self, *_: object) -> None:
        self.closed = False

    def start(self) -> SimpleNamespace:
        return SimpleNamespace(model="m", schedule="s", context=8, max_sequences=1)

    def close(self) -> None:
        self.closed = True


def test_the_first_signal_leaves_a_server_that_drains_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    drains = []
    monkeypatch.setattr("flywheel.serve.engine.Engine", Stub)
    monkeypatch.setattr("flywheel.serve.server.run", lambda *_: drains.append(interrupt._GUARD.drains))
    result = CliRunner().invoke(serve, ["--model", "m", "--device", "reference", "--port", "0"])
    assert result.exit_code == 0, result.output
    assert drains == [True]
    assert not interrupt._GUARD.drains
