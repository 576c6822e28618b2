"""Stations in Ray actors: one for each GPU that measures, or one for each processor that predicts.

Source: Ray 2.60's core API.
"""

from __future__ import annotations

import atexit
import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any, Final

import ray
from ray.exceptions import RayError, RayTaskError

from flywheel.errors import ClusterGoneError, FlywheelError, UsageError, WorkerDiedError
from flywheel.ir import ScheduleConfig
from flywheel.measure.environment import Environment
from flywheel.measure.outcome import Contest
from flywheel.process import abandon_threads
from flywheel.search.trials.evaluate import Prepared
from flywheel.search.trials.processes import CALL_S, MEASURE_S, START_S
from flywheel.search.trials.pulse import Pulse
from flywheel.search.trials.station import Setup, Station
from flywheel.vm.watching import tell

_LANES: Final = ("prepare", "measure")
"""Calls in one lane run one after the other. Calls in different lanes run side by side."""

_POLL_S: Final = 1.0
_SAY_S: Final = (5.0, 15.0, 45.0, 135.0, 405.0)

_CONNECT_S: Final = 10.0
_LEAVE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster's GPUs and processors in all, the GPUs of each node, and the pulse that says whether it answers."""

    cpus: int
    gpus: int
    pulse: Pulse
    node_gpus: tuple[int, ...] = ()

    def sets_of(self, count: int) -> int:
        """How many disjoint sets of `count` GPUs the cluster has, each within one node."""
        return sum(gpus // count for gpus in self.node_gpus)


@contextmanager
def connect(address: str | None) -> Iterator[Cluster]:
    """Connect this process as a driver to the Ray cluster whose head is at `address`, HOST:PORT.

    Without an address, start a cluster on this machine that ends with the context. Raises UsageError where no cluster
    answers, and where this process is a driver already.
    """
    if ray.is_initialized():
        raise UsageError("ray: this process is connected to a cluster already")
    if address is not None:
        _check_head(address)
    try:
        ray.init(address or "local", log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        raise UsageError(f"ray: no cluster at {address or 'this machine'}: {str(error).splitlines()[0]}") from error
    try:
        resources = ray.cluster_resources()
        with Pulse(f"the cluster at {address}" if address else "the cluster of this machine") as pulse:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            by_node = tuple([int(node.get("GPU", 0)) for node in nodes])
            yield Cluster(int(resources.get("CPU", 0)), int(resources.get("GPU", 0)), pulse, by_node)
    finally:
        _disconnect()


def _disconnect() -> None:
    """Disconnect. Ray would wait for ever for a frozen head, and its threads would then break the process's exit."""
    leaving = Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_S)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)
        abandon_threads()


def _check_head(address: str) -> None:
    """Raise UsageError where no head answers at once. Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise UsageError(f"ray: {address!r} is not HOST:PORT of a cluster's head")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"ray: no cluster at {address}: {error}") from error


class RayHost:
    """A station in a Ray actor, which has `gpus` GPUs and one processor of one node to itself.

    Ray takes all of an actor's resources from one node. Methods raise ClusterGoneError where `pulse` says that the
    cluster is gone: an actor's death is then no schedule's fault.
    """

    def __init__(self, name: str, setup: Setup, gpus: int, pulse: Pulse) -> None:
        self.name: Final = name
        self._setup = setup
        self._gpus = gpus
        self._pulse = pulse
        self._actor: Any = None

    def start(self) -> Environment:
        """As `Host.start`. It waits while the cluster has no room for the actor."""
        self.end(now=True)
        made = ray.remote(concurrency_groups=dict.fromkeys(_LANES, 1))(Station).options(
            num_cpus=1, num_gpus=self._gpus, scheduling_strategy="SPREAD"
        )
        self._actor = made.remote(self._setup, {})
        environment: Environment = self._call("prepare", "ready", (), START_S)
        return environment

    def prepare(self, config: ScheduleConfig) -> Prepared:
        """As `Host.prepare`."""
        prepared: Prepared = self._call("prepare", "prepare", (config,), CALL_S)
        return prepared

    def measure(self, config: ScheduleConfig, rivals: Sequence[ScheduleConfig], rounds: int) -> tuple[Contest, float]:
        """As `Host.measure`."""
        asked = config, tuple(rivals), rounds
        measured: tuple[Contest, float] = self._call("measure", "measure", asked, MEASURE_S)
        return measured

    def end(self, now: bool) -> None:
        """As `Host.end`."""
        actor, self._actor = self._actor, None
        if actor is None or not ray.is_initialized():
            return
        if not now:
            with suppress(RayError, ClusterGoneError):
                self._wait(actor.close.remote(), CALL_S)
        if not self._pulse.gone:
            ray.kill(actor)

    def _call(self, lane: str, method: str, arguments: tuple[Any, ...], limit_s: float) -> Any:
        actor = self._actor
        if actor is None:
            raise WorkerDiedError(f"{self.name}: has ended")
        self._pulse.check()  # actors answer for a while without their head
        try:
            asked = getattr(actor, method).options(concurrency_group=lane).remote(*arguments)
            if not self._wait(asked, limit_s, of=actor, starts=method == "ready"):
                self.end(now=True)
                raise WorkerDiedError(f"{self.name}: no answer within {limit_s:g} s")
            return ray.get(asked)
        except RayTaskError as error:
            if isinstance(error.cause, FlywheelError):
                raise error.cause from None
            if self._actor is not actor:  # it was ended meanwhile, so its error says nothing
                raise WorkerDiedError(f"{self.name}: was ended") from error
            raise
        except RayError as error:
            if self._actor is actor:
                self._pulse.confirm()
            raise WorkerDiedError(f"{self.name}: {_line(error)}") from error

    def _wait(self, asked: Any, limit_s: float, of: Any = None, starts: bool = False) -> bool:
        """Whether `asked` is answered within `limit_s`. Lines say that an actor that `starts` takes long.

        Raises WorkerDiedError where the actor `of` was ended while it waited for room, and ClusterGoneError.
        """
        waited_s = 0.0
        while not ray.wait([asked], timeout=_POLL_S)[0]:
            waited_s += _POLL_S
            if starts and waited_s in _SAY_S:
                tell(f"{self.name} waits for room in the cluster, or starts, for {waited_s:g} s; it has {limit_s:g} s")
            if of is not None and self._actor is not of:
                raise WorkerDiedError(f"{self.name}: was ended")
            if waited_s >= limit_s:
                return False
            self._pulse.check()
        return True


def _line(error: RayError) -> str:
    """Ray's reason for a death, without its advice."""
    return str(error).splitlines()[0]
