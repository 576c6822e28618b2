"""What a client meets before its request is read: methods, origins, the log, and limits on slow clients."""

from __future__ import annotations

import errno
import json
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any

import h11
import pytest
from patience import HANG_S
from serve.conftest import eventually
from serve.test_fields import COMPLETION, Echo
from starlette.testclient import TestClient

from flywheel.errors import FlywheelError
from flywheel.runtime.sequences import PromptRead
from flywheel.serve import server as servers
from flywheel.serve.answers import Piece
from flywheel.serve.app import make_app
from flywheel.serve.server import bound, run
from flywheel.serve.worker import AnswerPiece, Begun, Ended

PAGE = "http://localhost:3000"
PREFLIGHT = {
    "Origin": PAGE, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}  # fmt: skip
READ, WRITE = ("/health", "/metrics", "/v1/models", "/v1/models/m"), (COMPLETION, "/v1/chat/completions")


def client_of(**options: Any) -> TestClient:
    engine: Any = Echo()
    return TestClient(make_app(engine, "m", **options))


def test_every_path_tells_its_methods() -> None:
    client = client_of(api_key="k")
    key = {"Authorization": "Bearer k"}
    for paths, able in ((READ, "GET, HEAD, OPTIONS"), (WRITE, "OPTIONS, POST")):
        for path in paths:
            answer = client.options(path, headers=PREFLIGHT)
            assert (answer.status_code, answer.headers["Allow"], answer.content) == (204, able, b"")
            assert not [name for name in answer.headers if name.startswith("access-control")]
            refused = client.delete(path, headers=key)
            assert (refused.status_code, refused.headers["Allow"]) == (405, able)
            assert refused.json()["error"]["message"] == "Method Not Allowed"
    assert client.options("/v1/nothing").status_code == 404


def test_head_is_get_without_a_body() -> None:
    client = client_of()
    for path in READ:
        asked = client.get(path)
        assert asked.status_code == 200
        head = client.head(path)
        assert (head.status_code, head.headers["content-type"]) == (200, asked.headers["content-type"])
    assert client.head(COMPLETION).status_code == 405


@pytest.mark.parametrize(("origins", "allowed"), [([PAGE, "http://other"], PAGE), (["*"], "*")])
def test_pages_of_an_allowed_origin_may_ask_and_read_refusals_too(origins: list[str], allowed: str) -> None:
    client = client_of(origins=origins, api_key="k")
    answer = client.options(COMPLETION, headers=PREFLIGHT)
    assert answer.status_code == 200
    assert answer.headers["Access-Control-Allow-Origin"] == allowed
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
    for status, headers in ((401, {}), (415, {"Authorization": "Bearer k"})):
        refused = client.post(COMPLETION, headers={"Origin": PAGE, **headers})
        assert (refused.status_code, refused.headers["Access-Control-Allow-Origin"]) == (status, allowed)


def test_pages_of_another_origin_may_not() -> None:
    client = client_of(origins=["http://other"])
    answer = client.options(COMPLETION, headers=PREFLIGHT)
    assert answer.status_code == 400
    assert "Access-Control-Allow-Origin" not in answer.headers
    assert "Access-Control-Allow-Origin" not in client.get("/health", headers={"Origin": PAGE}).headers


def test_the_log_has_a_line_for_each_request_and_no_prompt() -> None:
    said: list[str] = []
    client = client_of(log=said.append)
    client.post(COMPLETION, json={"model": "m", "prompt": "secret"})
    client.post(COMPLETION, json={"model": "m", "prompt": "secret", "stream": True})
    client.get("/v1/models?secret=1")
    client.get("/v1/models/a%0Ab\u202e")
    client.post(COMPLETION, content=b"secret")
    lines = [line.rpartition(" ms=") for line in said]
    assert all(ms.isdigit() for *_, ms in lines)
    assert [line for line, *_ in lines] == [
        "POST /v1/completions 200 prompt_tokens=1 tokens=0",
        "POST /v1/completions 200 prompt_tokens=1 tokens=0",
        "GET /v1/models 200",
        "GET /v1/models/a%0Ab%E2%80%AE 404",
        "POST /v1/completions 415",
    ]


@pytest.mark.parametrize("path", WRITE)
def test_no_event_of_a_stream_has_a_character_that_splits_lines(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    text = "a\u2028\u2029\x85\x0b\x0c\x1c\x1d\x1e\r\n\u2026\U0001f600b"

    def answer(self: Echo, ask: Any, hear: Any) -> int:
        for said in (Begun(0, 1), AnswerPiece(0, Piece(1, text)), Ended(0, "stop", PromptRead(0, 0))):
            hear(said)
        return 0

    monkeypatch.setattr(Echo, "ask", answer)
    fields = {"prompt": "a"} if path == COMPLETION else {"messages": [{"role": "user", "content": "a"}]}
    streamed = client_of().post(path, json={"model": "m", "stream": True, **fields}).content.decode()
    lines = [line for line in streamed.splitlines() if line]
    assert (lines[-1], {line[:6] for line in lines}) == ("data: [DONE]", {"data: "})
    choices = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
    assert "".join(each.get("text") or each.get("delta", {}).get("content") or "" for each in choices) == text


@contextmanager
def listening(
    limits: dict[object, tuple[str, float]], monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None] = print
) -> Iterator[tuple[str, int]]:
    """The address of a server with other limits, which ends since its engine fails."""
    monkeypatch.setattr(servers, "_LIMITS", MappingProxyType(limits))
    monkeypatch.setattr(servers, "_KEEP_ALIVE_S", 1)
    engine: Any = Echo()
    engine.failed = None
    ended: list[str] = []

    def serve() -> None:
        try:
            run(engine, "m", None, listener, say)
        except FlywheelError as error:
            ended.append(str(error))

    with bound("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            engine.failed = "no reason"
            thread.join(HANG_S)
    assert ended == ["the server ends, since no decoding process runs any more: no reason"]


def drip(address: tuple[str, int], start: bytes, more: Callable[[], bytes]) -> tuple[int, str] | None:
    """The (status, message) of a request that begins with `start` and goes on with `more` and no end, until the server
    closes; None if it says nothing."""
    with socket.create_connection(address, timeout=HANG_S) as connection:
        connection.sendall(start)
        connection.settimeout(0.05)
        end = time.monotonic() + HANG_S
        while time.monotonic() < end:
            try:
                if not connection.recv(1, socket.MSG_PEEK):
                    return None
                break
            except TimeoutError:
                pass
            if data := more():
                connection.sendall(data)
        connection.settimeout(HANG_S)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status, json.load(answer)["error"]["message"]


POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
LATE = {h11.IDLE: ("headers: the rest of them", 0.5), h11.SEND_BODY: ("body: the rest of it", 0.5)}


def test_a_request_that_does_not_arrive_in_time_is_refused_and_an_idle_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    headers, body = (408, "headers: the rest of them did not arrive within 0.5 s"), (
        408, "body: the rest of it did not arrive within 0.5 s",
    )  # fmt: skip
    with listening(LATE, monkeypatch) as address:
        assert drip(address, b"", lambda: b"") is None
        assert drip(address, b"GET /health HTT", lambda: b"") == headers
        assert drip(address, GET[:-2], lambda: b"X: y\r\n") == headers
        assert drip(address, POST + b"Content-Length: 9000\r\n\r\n", lambda: b" ") == body
        assert drip(address, POST + b"Transfer-Encoding: chunked\r\n\r\n", lambda: b"1\r\n \r\n") == body
        with socket.create_connection(address, timeout=HANG_S) as connection:
            for _ in range(3):  # one after the other
                connection.sendall(GET)
                answer = HTTPResponse(connection)
                answer.begin()
                assert json.load(answer) == {"status": "ok"}
                time.sleep(0.1)
            assert connection.recv(1) == b""  # idle
        with socket.create_connection(address, timeout=HANG_S) as connection:  # refused before its body ends
            connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: a\r\nContent-Length: 9000\r\n\r\n")
            answer = HTTPResponse(connection)
            answer.begin()
            assert (answer.status, answer.read()[:2]) == (404, b'{"')
            assert connection.recv(1) == b""


def test_an_answer_may_take_longer_than_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(self: Echo, ask: Any, hear: Any) -> int:
        time.sleep(1)
        return echo(self, ask, hear)

    echo = Echo.ask
    monkeypatch.setattr(Echo, "ask", slowly)
    body = b'{"model": "m", "prompt": "a"}'
    with (
        listening({kind: (what, 0.3) for kind, (what, _) in LATE.items()}, monkeypatch) as address,
        socket.create_connection(address, timeout=HANG_S) as connection,
    ):
        connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.status == 200


def asked_for_health(address: tuple[str, int]) -> int:
    with socket.create_connection(address, timeout=HANG_S) as connection:
        connection.sendall(GET)
        answer = HTTPResponse(connection)
        answer.begin()
        return answer.status


def is_healthy(address: tuple[str, int]) -> bool:
    """False also where a connection is closed at once, since no descriptor is left for it."""
    try:
        return asked_for_health(address) == 200
    except ConnectionResetError:
        return False


def test_idle_connections_beyond_the_limit_give_way_to_new_ones_and_are_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(servers, "_BESIDE", 2)  # with the queue of eight: ten
    said: list[str] = []
    with listening({h11.IDLE: ("headers", HANG_S)}, monkeypatch, said.append) as address, ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(address, timeout=HANG_S)) for _ in range(50)]
        for early in idle[:40]:
            with suppress(ConnectionResetError):
                assert early.recv(1) == b""
        idle[-1].sendall(GET)
        assert idle[-1].recv(12) == b"HTTP/1.1 200"
        assert asked_for_health(address) == 200
    assert said == ["10 connections are open, the most; one without a request is closed for each new one"]


def test_a_flood_of_idle_connections_leaves_descriptors_and_health(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * (used + 100), limits[1]))
        address = stack.enter_context(listening({h11.IDLE: ("headers", HANG_S)}, monkeypatch, said.append))
        flood = "import socket; held = [socket.create_connection(%r) for _ in range(900)]; print(flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", flood % (address,)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits),
        ) as client:  # fmt: skip
            assert client.stdout is not None
            assert client.stdout.readline() == b"\n"
            assert eventually(lambda: len(list(Path("/proc/self/fd").iterdir())) < 2 * used + 150)
            assert eventually(lambda: is_healthy(address))
            client.communicate(b"\n", HANG_S)
    assert [line for line in said if "most" not in line] == []


def test_a_connection_whose_descriptor_is_kept_for_others_is_closed_at_once() -> None:
    with bound("127.0.0.1", 0) as listener:
        listener.highest = 0
        with socket.create_connection(listener.getsockname(), timeout=HANG_S) as connection:
            with pytest.raises(BlockingIOError):
                listener.accept()
            assert connection.recv(1) == b""


def test_a_connection_that_cannot_be_accepted_is_one_line_and_the_server_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    tries: list[None] = []

    def no_descriptor(_: socket.socket) -> None:
        tries.append(None)
        raise OSError(errno.EMFILE, "Too many open files")

    with listening(LATE, monkeypatch, said.append) as address, ExitStack() as stack:
        assert asked_for_health(address) == 200
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", no_descriptor)
            waiting = [stack.enter_context(socket.create_connection(address, timeout=HANG_S)) for _ in range(3)]
            assert eventually(lambda: said != [])
            time.sleep(1.5)  # the next try
        waiting[0].sendall(GET)
        assert waiting[0].recv(12) == b"HTTP/1.1 200"
    assert said == ["no connection can be accepted: Too many open files; the server tries again every second"]
    assert len(tries) <= 4  # one a second; CPython 3.11 would make 2,048 of each
    assert "Traceback" not in capfd.readouterr().err


def test_what_strangers_send_writes_nothing_to_the_log(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    upgrade = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    said: list[str] = []
    with listening(LATE, monkeypatch, said.append) as address:
        for sent, status in ((upgrade, b"200"), (b"\x16\x03\x01\r\n\r\n", b"400"), (b"GET / HTTP/9\r\n\r\n", b"400")):
            with socket.create_connection(address, timeout=HANG_S) as connection:
                connection.sendall(sent)
                assert connection.recv(12) == b"HTTP/1.1 " + status
    assert said == []
    assert capfd.readouterr().err == ""
