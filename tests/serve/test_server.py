"""The server as a client of OpenAI's finds it, on the reference device."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import openai
import pytest
from openai import OpenAI
from patience import HANG_S
from serve.conftest import Served, eventually

from flywheel.runtime.sequences import Sampling
from flywheel.serve.decoder import Decoder

MESSAGES: Any = [
    {"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
]  # fmt: skip


def client_of(served: Served, **options: Any) -> OpenAI:
    return OpenAI(base_url=served.url, api_key=options.pop("api_key", "none"), max_retries=0, timeout=60, **options)


@pytest.fixture(scope="module")
def client(served: Served) -> OpenAI:
    return client_of(served)


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Iterator[Decoder]:
    with Decoder.load(str(checkpoint), device="reference", context=160, max_sequences=4) as made:
        yield made


def metric(served: Served, name: str) -> float:
    with urllib.request.urlopen(served.url.removesuffix("/v1") + "/metrics", timeout=HANG_S) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(name + " ")))


def test_a_prompt_that_begins_as_another_is_counted_and_so_are_pieces_and_the_longest_gap(served: Served) -> None:
    names = ('prompts_total{prefix="new"}', 'prompts_total{prefix="reused"}', 'tokens_total{of="reused"}',
             "prompt_pieces_total")  # fmt: skip
    before = {name: metric(served, f"flywheel_{name}") for name in names}
    asked = {"model": "tiny", "max_tokens": 3, "ignore_eos": True}
    beginning = [17, 3, 99, 250] * 10
    for last, reused in ((5, 0), (6, 32)):
        status, told = post(served, "/completions", json.dumps({**asked, "prompt": [*beginning, last]}).encode())
        assert status == 200
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == reused
    status, told = post(
        served, "/completions", json.dumps({**asked, "prompt": [*beginning, 7], "cache_prompt": False}).encode()
    )
    assert (status, told["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)
    found = {name: metric(served, f"flywheel_{name}") - before[name] for name in names}
    assert found == dict(zip(names, (2, 1, 32, 3), strict=True))
    assert 0 < metric(served, "flywheel_longest_token_gap_seconds") < HANG_S


def post(served: Served, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    address = urlparse(served.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=HANG_S)
    connection.request("POST", address.path + path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_a_completion_is_what_the_decoder_makes(client: OpenAI, decoder: Decoder) -> None:
    expected = decoder.complete("Once upon", max_tokens=24)
    answer = client.completions.create(model="tiny", prompt="Once upon", max_tokens=24, temperature=0)
    assert answer.choices[0].text == expected.text != ""
    assert answer.choices[0].finish_reason == expected.finish
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, len(expected.token_ids))
    ids = client.completions.create(
        model="tiny", prompt=[list(decoder.encode("Once upon"))], max_tokens=24, temperature=0
    )
    assert ids.choices[0].text == expected.text


def test_a_stream_is_the_answer_in_pieces(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0)
    chunks = list(
        client.completions.create(
            model="tiny", prompt="abc", max_tokens=40, temperature=0, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert len(chunks) > 5
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_chat_goes_through_the_models_template(client: OpenAI, decoder: Decoder) -> None:
    prompt = "<system>be brief\n<user>hi\n<assistant>"
    expected = decoder.complete(prompt, max_tokens=16)
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=16, temperature=0)
    assert answer.choices[0].message.content == expected.text
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    pieces = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_completion_tokens=16, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected.text


def test_variables_of_a_request_reach_the_models_template(client: OpenAI, served: Served, decoder: Decoder) -> None:
    prompt = "<system>be brief\n<user>hi\n(a)(b)<assistant><none>"
    set_by = {"chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "a"}, {"text": "b"}]}
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=8, temperature=0, extra_body=set_by
    )
    assert answer.choices[0].message.content == decoder.complete(prompt, max_tokens=8).text
    said = [{"role": "user", "content": "hi"}]
    assert decoder.chat(said, enable_thinking=False) == decoder.encode("<user>hi\n<assistant><none>")
    body = {"model": "tiny", "messages": MESSAGES, "chat_template_kwargs": {"thinking": False}}
    status, document = post(served, "/chat/completions", json.dumps(body).encode())
    assert status == 400
    assert document["error"]["message"] == (
        "messages: the chat template has no variable 'thinking' that a request may set"
    )


def test_a_seed_decides_what_is_drawn_whatever_else_runs(client: OpenAI, decoder: Decoder) -> None:
    def draw(seed: int) -> str:
        answer = client.completions.create(
            model="tiny", prompt="x", max_tokens=20, temperature=1.2, top_p=0.95, seed=seed, extra_body={"top_k": 50}
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(4) as pool:
        drawn = list(pool.map(draw, [1, 2, 1, 2]))
    assert drawn[:2] == drawn[2:]
    assert drawn[0] != drawn[1]
    alone = decoder.complete("x", max_tokens=20, sampling=Sampling(1.2, 50, 0.95, seed=1))
    assert drawn[0] == alone.text


def test_eight_clients_at_once_each_get_what_they_get_alone(client: OpenAI, decoder: Decoder) -> None:
    prompts = ["Once upon", "a", "time there was", "c" * 60, "xyz", "q" * 31, "the end", "b"]
    samplings = [Sampling(1.3, top_p=0.9, seed=place) if place % 2 else Sampling() for place in range(len(prompts))]

    def ask(place: int) -> str:
        sampling, length = samplings[place], 6 + 5 * place
        request: Any = {
            "model": "tiny", "prompt": prompts[place], "max_tokens": length, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "seed": sampling.seed,
        }  # fmt: skip
        if place == 4:  # one that leaves in mid-stream
            stream = client.completions.create(**request, stream=True)
            first = next(iter(stream)).choices[0].text
            stream.close()
            return str(first)
        if place % 3:
            pieces = client.completions.create(**request, stream=True)
            return "".join(piece.choices[0].text for piece in pieces if piece.choices)
        return str(client.completions.create(**request).choices[0].text)

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(ask, range(len(prompts))))
    for place, text in enumerate(texts):
        whole = decoder.complete(prompts[place], max_tokens=6 + 5 * place, sampling=samplings[place]).text
        assert text == whole if place != 4 else whole.startswith(text)


def test_a_short_request_does_not_wait_for_a_long_one(client: OpenAI) -> None:
    long = client.completions.create(
        model="tiny", prompt="a", max_tokens=150, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    pieces = iter(long)
    next(pieces)
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=2).choices
    assert len(list(pieces)) > 50


def test_stop_words_end_the_text_and_are_no_part_of_it(client: OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0).choices[0].text
    word = whole[5:8]
    cut = client.completions.create(model="tiny", prompt="abc", max_tokens=40, temperature=0, stop=[word])
    assert cut.choices[0].text == whole[: whole.find(word)]
    assert cut.choices[0].finish_reason == "stop"


def test_the_model_is_listed_and_the_server_is_well(client: OpenAI, served: Served) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    with urllib.request.urlopen(served.url.removesuffix("/v1") + "/health", timeout=HANG_S) as answer:
        assert json.load(answer) == {"status": "ok"}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"prompt": "a" * 200}, 400, "its 200 tokens do not fit the context of 160"),
        ({"prompt": "a" * 150, "max_tokens": 20}, 400, "150 tokens and 20 more need 169 positions"),
        ({"prompt": ""}, 400, "prompt: has no tokens"),
        ({"prompt": [1, 260]}, 400, "token 260 is not in 0..259"),
        ({"prompt": ["a"] * 64, "n": 2}, 400, "prompt: 64 prompts of n=2 choices; the queue holds 64"),
        ({"prompt": ["a", "b" * 200]}, 400, "its 200 tokens do not fit the context of 160"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature: -1"),
        ({"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a", "stop": [""]}, 400, "stop"),
        ({"prompt": {"a": 1}}, 400, "prompt"),
        ({"prompt": "a", "model": "other"}, 404, "'other' is not served here; 'tiny' is"),
        ({"prompt": "a", "seed": 10**400}, 400, "body: cannot be read as JSON: integer "),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"prompt": "\ud800"}, 400, "prompt: the text has half a character, U+D800"),
        ({}, 400, "prompt: is missing"),
        ({"prompt": "a", "guided_json": {}}, 400, "guided_json: {} is not served here"),
        ({"prompt": [-1]}, 400, "prompt: token -1 is not in 0..259"),
    ],
)
def test_a_request_that_cannot_be_served_says_why(
    served: Served, body: dict[str, Any], status: int, words: str
) -> None:
    got, document = post(served, "/completions", json.dumps({"model": "tiny", **body}).encode())
    assert got == status, document
    assert words in document["error"]["message"]
    assert set(document["error"]) == {"message", "type", "param", "code"}
    assert len(document["error"]["message"]) < 600


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b'{"model": "tiny", "prompt": NaN}', b"[" * 100_000])
def test_malformed_bodies_are_400(served: Served, body: bytes) -> None:
    status, document = post(served, "/completions", body)
    assert status == 400
    assert len(document["error"]["message"]) < 400


def test_a_body_beyond_the_bound_is_refused_however_it_comes(served: Served) -> None:
    assert post(served, "/completions", b" " * (16 * 2**20 + 1))[0] == 413
    address = urlparse(served.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", address.path + "/completions", iter([b" " * 2**20] * 17), headers, encode_chunked=True)
    assert connection.getresponse().status == 413


def test_a_conversation_that_the_template_refuses_is_told_its_words_and_no_path(
    client: OpenAI, served: Served
) -> None:
    body = {"model": "tiny", "messages": [{"role": "developer", "content": "x"}]}
    status, document = post(served, "/chat/completions", json.dumps(body).encode())
    assert status == 400
    assert document["error"]["message"] == "messages: the chat template refuses them: no role developer"
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=2).choices


def test_a_long_prompt_keeps_nobody_else_waiting(served: Served) -> None:
    """A server that is deaf while it reads a prompt answers both prompts before the last of these requests."""
    body = json.dumps({"model": "tiny", "prompt": "a" * 1_000_000}).encode()
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(post, served, "/completions", body) for _ in range(2)]
        for _ in range(50):
            with urllib.request.urlopen(served.url.removesuffix("/v1") + "/health", timeout=HANG_S) as answer:
                assert answer.status == 200
        assert not all(each.done() for each in asked)
        assert [each.result()[0] for each in asked] == [400, 400]


def test_nulls_are_defaults(served: Served) -> None:
    body = {"model": "tiny", "prompt": "a", "temperature": None, "top_p": None, "stream": None, "max_tokens": 1}
    assert post(served, "/completions", json.dumps(body).encode())[0] == 200


def test_a_client_that_leaves_in_mid_stream_makes_room_for_the_next(client: OpenAI, served: Served) -> None:
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=155, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    assert eventually(lambda: metric(served, "flywheel_requests_waiting") == 0, 10)
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=2).usage is not None


def test_a_slow_reader_keeps_nobody_else_waiting(client: OpenAI) -> None:
    slow = iter(client.completions.create(model="tiny", prompt="a", max_tokens=60, temperature=0, stream=True))
    next(slow)
    assert client.completions.create(model="tiny", prompt="abc", max_tokens=4).choices
    assert len(list(slow)) > 1


def begin_long(client: OpenAI) -> Any:
    """A stream that goes on for long, behind its first piece."""
    stream = client.completions.create(
        model="other", prompt="a", max_tokens=155, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    return stream


def test_a_key_is_asked_for_where_there_is_one(guarded: Served) -> None:
    with pytest.raises(openai.AuthenticationError, match="no valid API key"):
        client_of(guarded, api_key="wrong").models.list()
    assert [model.id for model in client_of(guarded, api_key="s3cret").models.list()] == ["other"]
    with urllib.request.urlopen(guarded.url.removesuffix("/v1") + "/health", timeout=HANG_S) as answer:
        assert answer.status == 200


def test_more_requests_than_the_queue_holds_are_429(guarded: Served) -> None:
    client = client_of(guarded, api_key="s3cret")
    stream = begin_long(client)
    waiting = threading.Thread(
        target=lambda: client.completions.create(model="other", prompt="b", max_tokens=1), daemon=True
    )
    waiting.start()
    assert eventually(lambda: metric(guarded, "flywheel_requests_waiting") == 2)
    with pytest.raises(openai.RateLimitError, match="2 requests are under way, of at most 2"):
        client.completions.create(model="other", prompt="c", max_tokens=1)
    stream.close()
    waiting.join(HANG_S)
    assert client.completions.create(model="other", prompt="c", max_tokens=1).choices


def test_a_worker_that_dies_fails_its_request_and_the_next_one_is_served(guarded: Served) -> None:
    client = client_of(guarded, api_key="s3cret")
    stream = begin_long(client)
    (worker,) = guarded.workers()
    os.kill(worker, signal.SIGKILL)
    with pytest.raises(openai.APIError, match="died of SIGKILL"):
        list(stream)

    def works() -> bool:
        try:
            return bool(client.completions.create(model="other", prompt="abc", max_tokens=2).choices)
        except openai.InternalServerError as error:
            assert "starting again" in str(error)
            return False

    assert eventually(works)
    assert metric(guarded, "flywheel_worker_restarts") == 1


def storm(served: Served, requests: int, clients: int) -> int:
    """Requests of random lengths from many clients, streams and whole ones, some of which leave; how many were
    answered."""
    draw = random.Random(1)
    asked = [(draw.randrange(1, 40), draw.randrange(1, 12), draw.random()) for _ in range(requests)]

    held = threading.local()  # a client takes longer to make than a request

    def one(request: tuple[int, int, float]) -> int:
        length, most, kind = request
        if not hasattr(held, "client"):
            held.client = stack.enter_context(client_of(served))
        return answered(held.client, length, most, kind)

    def answered(client: OpenAI, length: int, most: int, kind: float) -> int:
        while True:
            try:
                answer: Any = client.completions.create(
                    model="tiny", prompt="q" * length, max_tokens=most, stream=kind < 0.6
                )
                if kind >= 0.6:
                    return len(answer.choices)
                if kind < 0.1:
                    next(iter(answer))
                    answer.close()
                    return 1
                return int(list(answer)[-1].choices[0].finish_reason in ("length", "stop"))
            except openai.RateLimitError:
                time.sleep(0.05)

    with ExitStack() as stack, ThreadPoolExecutor(clients) as pool:
        return sum(pool.map(one, asked))


MOST_GROWTH_KB = 16 * 1024
"""Of a process over a storm. 3,600 requests took 4 MB, the last 1,000 of them 0.3 MB: caches that fill. In 10,000
requests, 2 KB that each leaves behind are more."""


def held_by(pid: int) -> tuple[int, int]:
    """(open files, resident KB) of a process."""
    (resident,) = re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), int(resident)


def check_storm(served: Served, requests: int, clients: int) -> None:
    storm(served, clients, clients)
    pids = (served.process.pid, *served.workers())
    before = [held_by(pid) for pid in pids]
    assert storm(served, requests, clients) == requests
    assert eventually(lambda: metric(served, "flywheel_requests_waiting") == 0)
    assert (served.process.pid, *served.workers()) == pids
    grown = [held_by(pid)[1] - resident for pid, (_, resident) in zip(pids, before, strict=True)]
    assert max(grown) <= MOST_GROWTH_KB, grown
    files = [then for then, _ in before]
    assert eventually(lambda: all(held_by(pid)[0] <= then + 8 for pid, then in zip(pids, files, strict=True)), 10)
    assert metric(served, "flywheel_worker_restarts") == 0


def test_requests_of_many_clients_are_all_answered_and_nothing_is_held(served: Served) -> None:
    check_storm(served, 60, 12)


@pytest.mark.slow
def test_ten_thousand_requests_of_32_clients_leave_nothing_behind(served: Served) -> None:
    check_storm(served, 10_000, 32)
