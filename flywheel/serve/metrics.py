"""A server's Prometheus metrics."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from flywheel.runtime.sequences import PromptRead
from flywheel.serve.engine import Engine

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counters of one server in a registry of their own."""

    def __init__(self, engine: Engine) -> None:
        self.registry: Final = CollectorRegistry()
        self._requests = Counter("flywheel_requests", "Requests by how they ended", ["end"], registry=self.registry)
        self._tokens = Counter(
            "flywheel_tokens", "Tokens of prompts, of those what was not read again, and of answers", ["of"],
            registry=self.registry,
        )  # fmt: skip
        self._prompts = Counter(
            "flywheel_prompts", "Answered prompts by whether a beginning of them was not read again", ["prefix"],
            registry=self.registry,
        )  # fmt: skip
        self._pieces = Counter(
            "flywheel_prompt_pieces", "Pieces in which prompts were read between launches", registry=self.registry
        )
        for counter, labels in ((self._tokens, ("prompt", "answer", "reused")), (self._prompts, ("new", "reused"))):
            for label in labels:
                counter.labels(label)  # which shows it as 0
        self._first = Histogram(
            "flywheel_first_token_seconds", "From a request to its first token", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._later = Histogram(
            "flywheel_token_seconds", "From a token to the next", buckets=_SECONDS, registry=self.registry
        )
        self._longest_s = 0.0
        longest = Gauge(
            "flywheel_longest_token_gap_seconds", "Longest time so far from a token to the next of its answer",
            registry=self.registry,
        )  # fmt: skip
        longest.set_function(lambda: self._longest_s)
        waiting = Gauge("flywheel_requests_waiting", "Requests that wait or are answered", registry=self.registry)
        waiting.set_function(lambda: engine.waiting)
        restarts = Gauge("flywheel_worker_restarts", "Decoding processes that died", registry=self.registry)
        restarts.set_function(lambda: engine.restarts)

    def token(self, seconds: float, *, first: bool) -> None:
        """Count a token that came `seconds` after the request (the first token) or after the previous token."""
        (self._first if first else self._later).observe(seconds)
        if not first:
            self._longest_s = max(self._longest_s, seconds)

    def ended(self, prompt_tokens: int, made: int, read: PromptRead, end: str) -> None:
        """Count a request that ended."""
        self._requests.labels(end).inc()
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("answer").inc(made)
        self._tokens.labels("reused").inc(read.reused)
        self._pieces.inc(read.pieces)
        if made:
            self._prompts.labels("reused" if read.reused else "new").inc()
