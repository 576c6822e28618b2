"""Stations in Ray actors, one a GPU, or one a processor where latencies are predicted. Source: Ray 2.60's core API."""

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
from flywheel.measure.contest import Contest
from flywheel.measure.environment import Environment
from flywheel.process import abandon_threads
from flywheel.search.trials.evaluate import Prepared
from flywheel.search.trials.processes import CALL_S, MEASURE_S, START_S
from flywheel.search.trials.pulse import Pulse
from flywheel.search.trials.station import Setup, Station

_LANES: Final = ("prepare", "measure")
"""Methods of one lane run one after the other, those of two side by side."""

_POLL_S: Final = 1.0

_CONNECT_S: Final = 10.0
_LEAVE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """What the nodes of a cluster have in all, the GPUs of each, and whether it still answers."""

    cpus: int
    gpus: int
    pulse: Pulse
    node_gpus: tuple[int, ...] = ()

    def sets_of(self, count: int) -> int:
        """How many sets of so many GPUs there are, each on one node."""
        return sum(gpus // count for gpus in self.node_gpus)


@contextmanager
def connect(address: str | None) -> Iterator[Cluster]:
    """Be a driver of the cluster whose head is at `address`, HOST:PORT, or without one of a cluster on this machine
    that ends with it.

    Raises UsageError where there is none, or where this process is a driver already.
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
    """Ray waits for ever for a head that is frozen, and its own threads break the end of the process then."""
    leaving = Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(_LEAVE_S)
    if leaving.is_alive():
        atexit.unregister(ray.shutdown)
        abandon_threads()


def _check_head(address: str) -> None:
    """Ray itself tries for minutes. Raises UsageError."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        raise UsageError(f"ray: {address!r} is not HOST:PORT of a cluster's head")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise UsageError(f"ray: no cluster at {address}: {error}") from error


class RayHost:
    """A station in an actor that has `gpus` GPUs of one node and a processor to itself, in a cluster with that pulse.

    Ray never takes an actor's resources from two nodes, as with a placement group of one bundle.

    Where the cluster is gone, its methods raise ClusterGoneError: no death of an actor is a schedule's fault then.
    """

    def __init__(self, name: str, setup: Setup, gpus: int, pulse: Pulse) -> None:
        self.name: Final = name
        self._setup = setup
        self._gpus = gpus
        self._pulse = pulse
        self._actor: Any = None

    def start(self) -> Environment:
        """As `Host.start`. Where there is no room for it, it waits for some."""
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
            if not self._wait(asked, limit_s, of=actor):
                self.end(now=True)
                raise WorkerDiedError(f"{self.name}: no answer within {limit_s:g} s")
            return ray.get(asked)
        except RayTaskError as error:
            if isinstance(error.cause, FlywheelError):
                raise error.cause from None
            if self._actor is not actor:  # what breaks while it is being ended is no news
                raise WorkerDiedError(f"{self.name}: was ended") from error
            raise
        except RayError as error:
            if self._actor is actor:
                self._pulse.confirm()
            raise WorkerDiedError(f"{self.name}: {_line(error)}") from error

    def _wait(self, asked: Any, limit_s: float, of: Any = None) -> bool:
        """Whether there is an answer within a time. Raises WorkerDiedError where the actor that it is `of` was ended
        meanwhile, while it waited for room, and ClusterGoneError."""
        waited_s = 0.0
        while not ray.wait([asked], timeout=_POLL_S)[0]:
            waited_s += _POLL_S
            if of is not None and self._actor is not of:
                raise WorkerDiedError(f"{self.name}: was ended")
            if waited_s >= limit_s:
                return False
            self._pulse.check()
        return True


def _line(error: RayError) -> str:
    """What Ray says of a death, without its advice."""
    return str(error).splitlines()[0]
