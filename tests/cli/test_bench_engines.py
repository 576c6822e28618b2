"""bench --serve beside other engines: their processes, their loads, and why there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cli.conftest import invoke
from effort import LONG
from serve.conftest import checkpoint as served_checkpoint

from flywheel.cli import bench_engines
from flywheel.cli.bench_engines import EngineLoad, rows_of, time_engines, vllm_command

checkpoint = served_checkpoint
PROMPTS = ("once", "time upon a wheel", "a")

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Fake(BaseHTTPRequestHandler):
    def do_GET(self):
        self.say(json.dumps({"data": [{"id": "fake"}]}))
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        pieces = [{"choices": [{"text": "a"}]}, {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}}]
        self.say("".join(f"data: {json.dumps(piece)}\\n\\n" for piece in pieces))
    def say(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    def log_message(self, *_):
        return
HTTPServer(("127.0.0.1", int(sys.argv[1])), Fake).serve_forever()
"""


def asked_of(folder: Path) -> EngineLoad:
    return EngineLoad(folder, "float32", "cpu", 64, 2, (1, 2), PROMPTS, 4)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engines, "find_spec", lambda name: object())


def test_transformers_answers_the_same_prompts_in_batches_of_the_clients(checkpoint: Path) -> None:
    (one, two), _ = (each.get("loads") for each in time_engines(["transformers"], asked_of(checkpoint)).values())
    assert [one["clients"], two["clients"]] == [1, 2]
    for load in (one, two):
        assert (load["requests"], load["failed"], load["tokens"]) == (3, [], 12)
        assert load["prompt_tokens"] == sum(map(len, PROMPTS))
        assert load["first_token_ms"]["p50"] > 0


@LONG
def test_a_model_without_weights_is_timed_with_random_ones(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((checkpoint / name).read_bytes())
    found = time_engines(["transformers"], asked_of(tmp_path))["transformers"]
    assert [load["tokens"] for load in found["loads"]] == [12, 12]
    assert "--load-format" in vllm_command(asked_of(tmp_path), 9)
    assert "--load-format" not in vllm_command(asked_of(checkpoint), 9)


def test_an_engine_that_fails_says_so_in_a_line(tmp_path: Path) -> None:
    found = time_engines(["transformers"], asked_of(tmp_path))
    assert found["transformers"]["why"].startswith("failed: ")
    assert "\n" not in found["transformers"]["why"]
    assert found["vllm"] == {"why": "not asked for"}


@pytest.mark.usefixtures("installed")
def test_vllm_is_started_asked_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engines, "vllm_command", lambda _, port: [sys.executable, "-c", SERVER, str(port)])
    ended: list[int | None] = []
    monkeypatch.setattr(bench_engines, "end", lambda process: ended.append(bench_end(process)))
    loads = time_engines(["vllm"], asked_of(tmp_path))["vllm"]["loads"]
    assert [(load["clients"], load["tokens"], load["failed"]) for load in loads] == [(1, 3, []), (2, 3, [])]
    assert ended == [-15]


bench_end_of = bench_engines.end


def bench_end(process: object) -> int | None:
    bench_end_of(process)  # type: ignore[arg-type]
    return process.returncode  # type: ignore[attr-defined, no-any-return]


@pytest.mark.usefixtures("installed")
def test_a_server_of_vllm_that_ends_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_engines, "vllm_command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    assert time_engines(["vllm"], asked_of(tmp_path))["vllm"] == {"why": "failed: its server ended with code 3"}


@pytest.mark.usefixtures("installed")
def test_what_holds_for_all_engines_is_said_of_each() -> None:
    why = {"why": "not timed: needs a GPU"}
    assert time_engines(bench_engines.ENGINES, "not timed: needs a GPU") == {"transformers": why, "vllm": why}


def test_an_unknown_engine_is_a_usage_error() -> None:
    result = invoke("bench", "--serve", "--model", "x", "--engines", "transformers,llamas")
    assert result.exit_code == 2
    assert "--engines: 'llamas' is none of transformers, vllm, none" in result.output


def test_a_row_of_an_engine_has_its_name_and_times() -> None:
    times = {"p50": 1.0, "p90": 2.0, "p99": 3.0}
    load = {"clients": 8, "tokens_per_s": 12.34, "first_token_ms": times, "token_ms": None, "failed": []}
    assert rows_of("vllm", [load], (50, 99)) == [["vllm", "8", "12.3", "1.00", "3.00", "-", "-", "0"]]
