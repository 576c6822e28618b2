"""The command serve, without a socket that anybody uses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from flywheel.cli import interrupt
from flywheel.cli.main import cli
from flywheel.cli.serve import serve
from flywheel.cli.text import complain
from flywheel.decode.notes import Note

NOTES = (Note("random-weights", "RANDOM WEIGHTS"), Note("schedule", "decoding by s"))


class Stub:
    """An engine that starts at once."""

    def __init__(self, *_: object) -> None:
        self.closed = False

    def start(self) -> SimpleNamespace:
        return SimpleNamespace(model="m", schedule="s", context=8, max_sequences=1, notes=NOTES)

    def close(self) -> None:
        self.closed = True


def test_all_that_serving_a_checkpoint_lacks_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("flywheel.installing.find_spec", lambda name: None)
    result = CliRunner().invoke(cli, ["serve", "--model", str(tmp_path)])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert "serve needs torch, safetensors, fastapi, uvicorn and prometheus_client: pip install " in line
    assert line.endswith("[torch,hf,serve]'")


def test_the_first_signal_leaves_a_server_that_drains_its_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    drains = []
    monkeypatch.setattr("flywheel.serve.engine.Engine", Stub)
    monkeypatch.setattr("flywheel.serve.server.run", lambda *_: drains.append(interrupt._GUARD.drains))
    result = CliRunner().invoke(serve, ["--model", "m", "--device", "reference", "--port", "0"])
    assert result.exit_code == 0, result.output
    assert drains == [True]
    assert not interrupt._GUARD.drains


@pytest.mark.parametrize("origin", ["http://localhost:3000", "https://a.example", "http://[::1]:80", "app://a.md", "*"])
def test_origins_and_the_log_reach_the_server(monkeypatch: pytest.MonkeyPatch, origin: str) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr("flywheel.serve.engine.Engine", Stub)
    monkeypatch.setattr("flywheel.serve.server.run", lambda *given: asked.append(given[5:]))
    words = ["--model", "m", "--device", "reference", "--port", "0"]
    assert CliRunner().invoke(serve, words).exit_code == 0
    assert CliRunner().invoke(serve, [*words, "--allow-origin", origin, "--log-level", "info"]).exit_code == 0
    assert asked == [((), None), ((origin,), complain)]


@pytest.mark.parametrize("origin", ["http://a/", "a.example", "HTTP://a", "http://a:b", "http://u@a", "http://a,", ""])
def test_what_no_browser_sends_as_its_origin_is_refused(origin: str) -> None:
    result = CliRunner().invoke(cli, ["serve", "--model", "m", "--device", "reference", "--allow-origin", origin])
    assert result.exit_code == 2
    assert f"--allow-origin {origin!r}: is neither * nor SCHEME://HOST[:PORT] in small letters" in result.stderr
