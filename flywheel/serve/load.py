"""Load generator for servers with OpenAI's API: sends requests and times the answers as clients see them."""

from __future__ import annotations

import json
import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from time import perf_counter
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from flywheel.errors import UsageError

PERCENTILES: Final = (50, 90, 99)
_LIMIT_S: Final = 600.0
"""Maximum time without data from the server."""
_WRONG: Final = (ValueError, LookupError, TypeError, AttributeError)
"""Exceptions that JSON of another shape than OpenAI's raises."""
WORDS: Final = ("time", "once", "wheel", "upon", "a", "line", "there", "river", "stone", "was", "the", "and")
"""Words of the prompts. No two prompts are equal."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server: its address up to /v1, the model to request, and the API key, if it needs one."""

    url: str
    model: str
    key: str | None = None
    context: int | None = None  # most tokens of prompt and answer; None if the server does not say


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of `tokens` tokens to a prompt of `prompt_tokens`. Its first text came after `first_s` seconds, its
    last after `last_s`."""

    prompt_tokens: int
    tokens: int
    first_s: float
    last_s: float

    @property
    def token_s(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        return (self.last_s - self.first_s) / (self.tokens - 1) if self.tokens > 1 else None


@dataclass(frozen=True, slots=True)
class Load:
    """The answers to `clients` concurrent clients within `seconds`; each client sends its next request when its last
    one has ended. `failed` has the reason for each failed request."""

    clients: int
    seconds: float
    answered: tuple[Answered, ...]
    failed: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The load, JSON-ready: times in ms, null if there are no answers."""
        made = sum(each.tokens for each in self.answered)
        return {
            "clients": self.clients,
            "requests": len(self.answered) + len(self.failed),
            "failed": list(self.failed),
            "seconds": self.seconds,
            "prompt_tokens": sum(each.prompt_tokens for each in self.answered),
            "tokens": made,
            "tokens_per_s": made / self.seconds,
            "first_token_ms": _percentiles([each.first_s for each in self.answered]),
            "token_ms": _percentiles([s for each in self.answered if (s := each.token_s) is not None]),
        }


def draw_prompts(seed: int, count: int, longest: int) -> list[str]:
    """`count` random texts of 1 to `longest` words."""
    dice = random.Random(seed)
    return [" ".join(dice.choices(WORDS, k=dice.randint(1, longest))) for _ in range(count)]


def fit_prompts(prompts: Sequence[str], count: Callable[[str], int], room: int) -> list[str]:
    """The prompts, each without the words at its end with which it has more than `room` tokens, as `count` counts them.
    Raises UsageError if a word alone does not fit."""
    fitting = []
    for prompt in prompts:
        words = prompt.split()
        texts = [" ".join(words[: place + 1]) for place in range(len(words))]
        most = bisect_right(texts, room, key=count)
        if not most:
            raise UsageError(f"prompt: the word {words[0]!r} has {count(words[0])} tokens; there is room for {room}")
        fitting.append(texts[most - 1])
    return fitting


def find_server(url: str, key: str | None = None) -> Server:
    """The server at an address, with or without /v1, and the first model that it lists. Raises UsageError."""
    base = _base(url)
    with closing(_connect(base)) as connection:
        try:
            connection.request("GET", f"{urlsplit(base).path}/models", headers=_headers(key))
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                raise UsageError(f"{base}/models: status {answer.status}")
            first = json.loads(body)["data"][0]
            context = first.get("max_model_len")
            return Server(base, str(first["id"]), key, context if isinstance(context, int) else None)
        except (OSError, HTTPException, *_WRONG) as error:
            raise UsageError(f"{base}/models: {type(error).__name__}: {error}") from None


def _base(url: str) -> str:
    """The address up to /v1. Raises UsageError for an invalid address."""
    try:
        parts = urlsplit(url)
        _connect(url).close()  # checks host and port
    except (HTTPException, ValueError):
        parts = None
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is no address of a server; such is http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path if path.endswith('/v1') else path + '/v1'}"


def put_load(server: Server, prompts: Sequence[str], clients: int, max_tokens: int) -> Load:
    """Let `clients` clients request continuations of the prompts; each sends its next request when its last one has
    ended. Answers are greedy, and continue after the model's end token if the server supports that."""
    answered: list[Answered] = []
    failed: list[str] = []
    left, lock = iter(prompts), threading.Lock()

    def ask() -> None:
        while True:
            with lock:
                prompt = next(left, None)
            if prompt is None:
                return
            try:
                answered.append(_ask(server, prompt, max_tokens))
            except (OSError, HTTPException, *_WRONG) as error:
                failed.append(f"{type(error).__name__}: {error}"[:200])

    started = perf_counter()
    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Load(clients, perf_counter() - started, tuple(answered), tuple(failed))


def _ask(server: Server, prompt: str, max_tokens: int) -> Answered:
    """One request. Raises OSError, HTTPException, and ValueError for an incomplete answer."""
    asked = {
        "model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    usage, first_s, last_s = None, 0.0, 0.0
    with closing(_connect(server.url)) as connection:
        started = perf_counter()
        headers = {"Content-Type": "application/json", **_headers(server.key)}
        connection.request("POST", f"{urlsplit(server.url).path}/completions", json.dumps(asked), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise ValueError(f"status {answer.status}: {answer.read(200).decode(errors='replace')}")
        for event in _events(answer):
            now = perf_counter() - started
            if "error" in event:
                raise ValueError(f"the server says {json.dumps(event['error'])}")
            if any(choice.get("text") for choice in event["choices"]):
                first_s, last_s = first_s or now, now
            usage = event.get("usage") or usage
    if usage is None:
        raise ValueError("the answer broke off")
    if not first_s:
        raise ValueError("the answer has no text")
    return Answered(int(usage["prompt_tokens"]), int(usage["completion_tokens"]), first_s, last_s)


def _events(lines: Any) -> Iterator[dict[str, Any]]:
    """The JSON documents of an event stream."""
    for line in lines:
        data = line.strip().removeprefix(b"data:").strip()
        if line.startswith(b"data:") and data != b"[DONE]":
            yield json.loads(data)


def _connect(url: str) -> HTTPConnection:
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    return kind(parts.hostname or "", parts.port, timeout=_LIMIT_S)


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles in ms; None without values."""
    if not seconds:
        return None
    found = np.percentile(np.array(seconds) * 1e3, PERCENTILES)
    return {f"p{rank}": float(value) for rank, value in zip(PERCENTILES, found, strict=True)}
