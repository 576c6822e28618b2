"""bench --serve: a load for a server, and what its clients saw."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cli.conftest import invoke
from effort import LONG
from serve.conftest import checkpoint as served_checkpoint

from flywheel.cli.bench_serve import START, _served
from flywheel.cli.exits import REJECTED
from flywheel.errors import UsageError
from flywheel.serve.load import Answered, Load, Server, draw_prompts, find_server, fit_prompts, put_load

checkpoint = served_checkpoint


STRANGE = {
    "words": '{"error": "out of memory"}',
    "list": '{"choices": ["a"]}',
    "null": '{"choices": [{"text": "a"}], "usage": {"prompt_tokens": null, "completion_tokens": 1}}',
    "number": "5",
    "half": '{"choices": [',
    "silent": '{"choices": [{"text": ""}], "usage": {"prompt_tokens": 1, "completion_tokens": 3}}',
}
"""Answers that are none, by their prompts."""


class Fake(BaseHTTPRequestHandler):
    """Streams three tokens, and fails for prompts that hold the word wheel."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [{"id": "fake"}]}).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(asked)
        if "wheel" in asked["prompt"]:
            self._answer(500, b"no")
            return
        if asked["prompt"] in STRANGE:
            self._answer(200, f"data: {STRANGE[asked['prompt']]}\n\n".encode())
            return
        pieces: list[dict[str, Any]] = [{"choices": [{"text": text}]} for text in "abc"]
        pieces.append({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
        lines = [f"data: {json.dumps(piece)}\n\n" for piece in pieces]
        self._answer(200, "".join([*lines, "data: [DONE]\n\n"]).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def fake() -> Iterator[str]:
    Fake.asked.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Fake) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_prompt_is_asked_once_whatever_the_clients(fake: str) -> None:
    server = find_server(fake)
    assert server == Server(f"{fake}/v1", "fake")
    prompts = draw_prompts(7, 20, 4)
    load = put_load(server, prompts, 3, 3)
    assert sorted(asked["prompt"] for asked in Fake.asked) == sorted(prompts)
    refused = sum("wheel" in prompt for prompt in prompts)
    assert (len(load.failed), len(load.answered)) == (refused, len(prompts) - refused)
    assert refused
    assert {each.tokens for each in load.answered} == {3}
    assert all(0 < each.first_s <= each.last_s <= load.seconds for each in load.answered)


def test_answers_of_another_shape_have_failed_and_end_no_client(fake: str) -> None:
    load = put_load(find_server(fake), [*STRANGE, "fine"], 1, 3)
    assert (len(load.failed), len(load.answered)) == (len(STRANGE), 1)
    assert "out of memory" in load.failed[0]
    assert load.failed[-1] == "ValueError: the answer has no text"
    assert load.document()["tokens"] == 3


def test_a_server_that_has_gone_fails_each_request(fake: str) -> None:
    server = find_server(fake)
    load = put_load(Server("http://127.0.0.1:9/v1", server.model), ["a", "b", "c"], 2, 3)
    assert len(load.failed) == 3 and not load.answered
    assert load.document()["token_ms"] is None


def test_a_server_that_answers_no_first_request_is_a_usage_error_with_its_reason(fake: str) -> None:
    seed = next(seed for seed in range(99) if draw_prompts(seed, 2, 1)[0] == "wheel")
    result = invoke("bench", "--serve", fake, "--requests", "2", "--prompt-words", "1", "--seed", str(seed))
    assert result.exit_code == 2
    assert "does not answer a first request: ValueError: status 500: no" in result.output


def test_a_load_of_which_some_fail_says_why(fake: str) -> None:
    seed = next(seed for seed in range(999) if [text == "wheel" for text in draw_prompts(seed, 2, 1)] == [False, True])
    result = invoke("bench", "--serve", fake, "--requests", "2", "--prompt-words", "1", "--seed", str(seed))
    assert result.exit_code == REJECTED
    assert "1 of them failed, the first one with ValueError: status 500: no" in result.output


def test_percentiles_and_rates_are_of_what_was_answered() -> None:
    answered = tuple(Answered(5, 3, first, first + 2.0) for first in (1.0, 2.0, 3.0))
    document = Load(2, 6.0, answered, ("status 500",)).document()
    assert document["first_token_ms"] == {"p50": 2000.0, "p90": 2800.0, "p99": 2980.0}
    assert document["token_ms"] == {"p50": 1000.0, "p90": 1000.0, "p99": 1000.0}
    assert (document["tokens_per_s"], document["requests"], document["failed"]) == (1.5, 4, ["status 500"])
    assert Load(1, 1.0, (), ()).document()["first_token_ms"] is None


def test_prompts_are_the_seeds() -> None:
    assert draw_prompts(1, 9, 30) == draw_prompts(1, 9, 30) != draw_prompts(2, 9, 30)
    assert {len(prompt.split()) for prompt in draw_prompts(3, 200, 5)} == {1, 2, 3, 4, 5}


def test_prompts_are_cut_word_by_word_to_what_fits() -> None:
    prompts = ["a line", "once upon a time", "the"]
    assert fit_prompts(prompts, len, 99) == prompts
    assert fit_prompts(prompts, len, 9) == ["a line", "once upon", "the"]
    assert fit_prompts(prompts, len, 4) == ["a", "once", "the"]
    with pytest.raises(UsageError, match="prompt: the word 'once' has 4 tokens; there is room for 3"):
        fit_prompts(prompts, len, 3)


@pytest.mark.parametrize(
    "url",
    ["nowhere", "ftp://x/v1", "http://127.0.0.1:9/v1", "http://x:99999", "http://x:y", "http://[::1", "http://a b"],
)
def test_no_server_is_a_usage_error(url: str) -> None:
    with pytest.raises(UsageError):
        find_server(url)


def test_a_started_server_that_says_much_does_not_stop_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import sys; print('at http://127.0.0.1:9/v1; now', file=sys.stderr); print('x' * 300_000, file=sys.stderr)"
    started = subprocess.Popen
    said: list[subprocess.Popen[str]] = []

    def start(words: object, **how: Any) -> subprocess.Popen[str]:
        said.append(started([sys.executable, "-c", code], **how))
        return said[0]

    def find(url: str) -> Server:
        assert said[0].wait(60) == 0
        return Server(url, "talker")

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("flywheel.serve.load.find_server", find)
    with _served(START, {}) as server:
        assert server.url == "http://127.0.0.1:9/v1"


def test_a_server_that_is_started_is_loaded_and_ended(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    result = invoke(
        "bench", "--serve", "--model", str(checkpoint), "--device", "reference", "--context", "64", "--clients", "1,2",
        "--requests", "3", "--max-tokens", "4", "--prompt-words", "3", "-o", str(file),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert [load["clients"] for load in document["loads"]] == [1, 2]
    assert [load["tokens"] for load in document["loads"]] == [12, 12]
    assert not any(load["failed"] for load in document["loads"])
    assert "first p99" in result.output
    assert "vllm: not installed" in result.output


@LONG
def test_prompts_of_a_server_that_is_started_fit_its_context(checkpoint: Path) -> None:
    asked = ("bench", "--serve", "--model", str(checkpoint), "--device", "reference", "--context", "64",
             "--clients", "1", "--requests", "4", "--prompt-words", "40", "--seed", "3", "--json")  # fmt: skip
    result = invoke(*asked, "--max-tokens", "40")
    assert result.exit_code == 0, result.output
    (load,) = json.loads(result.stdout)["loads"]
    assert (load["failed"], load["tokens"]) == ([], 160)
    assert load["prompt_tokens"] <= 4 * 25
    assert re.search(r"flywheel: [1-4] of 4 prompts are cut to 25 tokens, to fit the context 64\n", result.stderr)
    refused = invoke(*asked, "--max-tokens", "65")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr.endswith("flywheel: bench: --max-tokens 65 is more than the context of 64\n")
