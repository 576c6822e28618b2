"""A server's Prometheus metrics."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

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
        self._first = Histogram(
            "flywheel_first_token_seconds", "From a request to its first token", buckets=_SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._later = Histogram(
            "flywheel_token_seconds", "From a token to the next", buckets=_SECONDS, registry=self.registry
        )
        waiting = Gauge("flywheel_requests_waiting", "Requests that wait or are answered", registry=self.registry)
        waiting.set_function(lambda: engine.waiting)
        restarts = Gauge("flywheel_worker_restarts", "Decoding processes that died", registry=self.registry)
        restarts.set_function(lambda: engine.restarts)

    def token(self, seconds: float, *, first: bool) -> None:
        """Count a token that came `seconds` after the request (the first token) or after the previous token."""
        (self._first if first else self._later).observe(seconds)

    def ended(self, prompt_tokens: int, made: int, reused: int, end: str) -> None:
        """Count a request that ended. `reused` tokens of its prompt were copied from another answer's cache."""
        self._requests.labels(end).inc()
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("answer").inc(made)
        self._tokens.labels("reused").inc(reused)
