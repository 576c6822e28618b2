"""Detects within 12 s that a Ray cluster no longer answers. Ray itself waits a minute for its head, and without limit
for the local raylet."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from time import monotonic
from types import TracebackType
from typing import Final, Self

import ray
from ray.exceptions import RayError

from flywheel.errors import ClusterGoneError

GONE_S: Final = 12.0
"""Wall seconds without an answer after which a cluster counts as gone."""

_PERIOD_S: Final = 1.0
_CONNECT_S: Final = 5.0
_GRACE_S: Final = 2 * _PERIOD_S
"""Wall seconds for one more answer: this process may itself have been stopped and have missed the earlier ones."""

_HEAD: Final = "its head does not answer"


class Pulse:
    """Checks a cluster once a second, in a thread: asks the head for its nodes and connects to this machine's raylet.

    `name` is the cluster's name in messages. The process must be connected to the cluster within the context.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._node = ray.get_runtime_context().get_node_id()
        self._changed = threading.Condition()
        self._answered = monotonic()
        self._trouble = _HEAD
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join(_PERIOD_S)  # where the head is gone, the thread lasts as long as Ray waits

    def check(self) -> None:
        """Raise ClusterGoneError where the cluster has not answered for GONE_S."""
        if self.gone:
            self.confirm()

    def confirm(self) -> None:
        """Wait for an answer to a question asked from now on. Raises ClusterGoneError after GONE_S without one."""
        begun = monotonic()
        with self._changed:
            limit_s = max(_GRACE_S, GONE_S - (begun - self._answered))
            if not self._changed.wait_for(lambda: self._answered > begun, limit_s):
                raise ClusterGoneError(
                    f"ray: {self._name} is gone: {self._trouble}; rows are kept, and when it is back, the same command "
                    "goes on"
                )

    @property
    def gone(self) -> bool:
        """Whether the cluster has not answered for GONE_S."""
        return monotonic() - self._answered > GONE_S

    def _listen(self) -> None:
        while not self._ended.wait(_PERIOD_S):
            asked = monotonic()
            self._trouble = _HEAD
            trouble = self._ask()
            with self._changed:
                if trouble is None:
                    self._answered = asked
                    self._changed.notify_all()
                else:
                    self._trouble = trouble

    def _ask(self) -> str | None:
        """What is wrong; None where head and raylet answer. It blocks for as long as the head is silent."""
        with suppress(RayError, RuntimeError):  # raised where the head is gone
            mine = next((node for node in ray.nodes() if node["NodeID"] == self._node), None)
            if mine is None or not mine["Alive"]:
                return "its head takes this machine's node for dead"
            try:
                socket.create_connection((mine["NodeManagerAddress"], mine["NodeManagerPort"]), _CONNECT_S).close()
            except OSError as error:
                return f"this machine's raylet does not answer: {error.strerror or error}"
            return None
        return _HEAD
