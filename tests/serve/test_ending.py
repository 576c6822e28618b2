"""How a server ends while requests are under way, seen from its clients and on its stderr."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Callable
from http.client import HTTPResponse
from typing import Any
from urllib.parse import urlparse
from urllib.request import urlopen

import pytest
from effort import LONG
from patience import HANG_S
from serve.conftest import Served

from flywheel.serve.guard import Guard

ASKED = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 159, "ignore_eos": True, "stream": True}).encode()


def ask(served: Served, sent: bytes, length: int) -> socket.socket:
    """A request of which so much of its body has been sent."""
    address = urlparse(served.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=HANG_S)
    connection.sendall(
        f"POST {address.path}/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n".encode()
        + sent
    )
    return connection


@pytest.mark.parametrize("leaves", [False, pytest.param(True, marks=LONG)])
def test_a_server_that_ends_before_a_body_is_whole_says_so_without_a_traceback(
    start: Callable[..., Served], leaves: bool
) -> None:
    served = start()
    connection = ask(served, ASKED[:20], len(ASKED))
    with urlopen(served.url.removesuffix("/v1") + "/health", timeout=HANG_S) as answer:
        assert answer.status == 200  # it has taken the other connection before
    if leaves:
        connection.close()
    served.process.send_signal(signal.SIGINT)
    assert served.process.stderr is not None
    said = served.process.stderr.read()
    assert served.process.wait(HANG_S) == 130
    assert "Traceback" not in said and "Exception" not in said, said
    if not leaves:
        cut = HTTPResponse(connection)
        cut.begin()
        assert (cut.status, json.load(cut)["error"]["message"]) == (503, "the server is shutting down")
        connection.close()


@LONG
def test_an_answer_that_is_cut_off_ends_its_stream_without_a_traceback(start: Callable[..., Served]) -> None:
    served = start("--max-sequences", "1")
    connections = [ask(served, ASKED, len(ASKED)) for _ in range(12)]  # more than 3 s of answers
    answers = []
    for connection in connections:
        answers.append(HTTPResponse(connection))
        answers[-1].begin()
    served.process.send_signal(signal.SIGINT)
    assert served.process.stderr is not None
    said = served.process.stderr.read()
    assert served.process.wait(HANG_S) == 130
    assert "Traceback" not in said and "Exception" not in said, said
    assert [answer.status for answer in answers] == [200] * len(answers)
    ends = [answer.read() for answer in answers]  # which a stream that breaks off raises in
    assert any(b"[DONE]" not in end for end in ends)
    for connection in connections:
        connection.close()


@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_is_ended_once_whether_or_not_it_is_whole_when_it_is_cut_off(whole: bool) -> None:
    sent: list[tuple[str, bytes, bool]] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": not whole})
        raise asyncio.CancelledError

    async def send(message: Any) -> None:
        sent.append((message["type"], message.get("body", b""), message.get("more_body", False)))

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
    asyncio.run(Guard(answer, None)(scope, receive, send))
    ends = [message for message in sent if message[0] == "http.response.body" and not message[2]]
    assert ends == [sent[-1]]
    assert b"".join(body for _, body, _ in sent) == b"a"
