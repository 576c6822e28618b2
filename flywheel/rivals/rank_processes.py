"""Starts one process per rank for a decode step with torch.distributed, collects their answers, and ends them
together."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from math import inf
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final, Generic, Literal, TypeAlias, TypeVar

import torch
from torch.distributed import TCPStore, destroy_process_group, init_process_group  # type: ignore[attr-defined]

from flywheel.children import start_child
from flywheel.decode.memory import asked, is_exhausted
from flywheel.errors import FlywheelError, GpuMemoryError, NoGpuError, WorkerDiedError
from flywheel.process import enter_child, set_environment
from flywheel.vm.client import death_of
from flywheel.vm.watching import PATIENCE, watched

Backend: TypeAlias = Literal["nccl", "gloo"]
"""Backend of torch.distributed: "nccl" for GPUs, with rank r on the GPU that CUDA numbers r; "gloo" for CPUs."""

HOST: Final = "127.0.0.1"
ENVIRONMENT: Final = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
"""Ranks connect over the loopback interface of one host. NCCL does not use NVLink multicast, as flywheel's kernels do
not."""

_EXIT_S: Final = 5.0
"""Seconds that a process may take to end after it has answered."""

_ECHO_S: Final = 1.0
"""Within it, the others notice that a rank is gone: the first to fail need not be the first to be heard of."""

_LATER_S: Final = 60.0
"""So much later than the ranks' limit torch gives up by itself: whoever waits for them says it first."""

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RankResult(Generic[_T]):
    """The result of a rank's work."""

    given: _T


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank has no answer. `caused` is true if the rank itself failed, and false if another rank's end may be the
    cause."""

    error: FlywheelError
    caused: bool


def run_ranks(
    what: str, work: Callable[..., _T], ranks: int, backend: Backend, limit_s: float, *arguments: Any
) -> list[_T]:
    """Run `work(rank, *arguments)` for each rank in its own process, within torch.distributed's default group. Returns
    the results in the order of ranks.

    `work`, its arguments and its results are pickled. When one rank fails or dies, all others are killed. Raises

    - NoGpuError when NCCL has fewer GPUs than ranks;
    - the FlywheelError that a rank raised, and GpuMemoryError when a rank's GPU is full;
    - WorkerDiedError when a rank died, when torch failed in one, and when one did not answer in `limit_s` seconds.
    """
    if backend == "nccl" and torch.cuda.device_count() < ranks:
        raise NoGpuError(f"{what}: {ranks} ranks need as many GPUs: torch finds {torch.cuda.device_count()}")
    end, wait_s = time.monotonic() + limit_s, limit_s + _LATER_S
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        HOST, port, ranks, True, timedelta(seconds=wait_s), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    processes: dict[Connection, SpawnProcess] = {}
    try:
        for rank in range(ranks):
            processes |= _start(what, work, rank, ranks, backend, port, wait_s, arguments)
        with ExitStack() as watches:
            for rank, process in enumerate(processes.values()):
                assert process.pid is not None
                watches.enter_context(watched(f"{what}: rank {rank}", process.pid, "", inf, PATIENCE, inf))
            heard = _hear(what, processes, end, limit_s)
        for process in processes.values():
            process.join(_EXIT_S)
        return heard
    finally:
        for connection, process in processes.items():
            connection.close()
            process.kill()
            process.join(_EXIT_S)
        del store  # the ranks that met there have ended


def _start(what: str, work: Callable[..., Any], rank: int, *arguments: Any) -> dict[Connection, SpawnProcess]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(theirs, what, work, rank, *arguments), name=f"flywheel-rank-{rank}")
    start_child(process.start)
    theirs.close()  # else reading would not end when the process dies
    return {ours: process}


def _hear(what: str, processes: Mapping[Connection, SpawnProcess], end: float, limit_s: float) -> list[Any]:
    """The results of all ranks, in order. `end` is the deadline on the monotonic clock."""
    ranks = list(processes)
    answers: dict[Connection, RankResult[Any]] = {}
    failures: dict[Connection, Failure] = {}
    while len(answers) + len(failures) < len(ranks):
        silent = [each for each in ranks if each not in answers and each not in failures]
        ready = wait(silent, max(0.0, end - time.monotonic()))
        if not ready:
            break
        for connection in (each for each in silent if each in ready):
            place = f"{what}: rank {ranks.index(connection)} of {len(ranks)}"
            match _receive(connection, processes[connection], place):
                case RankResult() as answer:
                    answers[connection] = answer
                case failure:
                    failures[connection] = failure
                    end = min(end, time.monotonic() + _ECHO_S)
    if failures:
        raise min(failures.values(), key=lambda failure: not failure.caused).error
    if len(answers) < len(ranks):
        raise WorkerDiedError(
            f"{what}: {len(answers)} of {len(ranks)} ranks answered within {limit_s:g} s; all were killed"
        )
    return [answers[each].given for each in ranks]


def _receive(connection: Connection, process: SpawnProcess, place: str) -> RankResult[Any] | Failure:
    try:
        said: RankResult[Any] | Failure = connection.recv()
    except (EOFError, OSError):
        return Failure(WorkerDiedError(f"{place}: its process died: {death_of(process)}"), caused=True)
    return said


def _serve(
    connection: Connection,
    what: str,
    work: Callable[..., Any],
    rank: int,
    ranks: int,
    backend: Backend,
    port: int,
    wait_s: float,
    arguments: Sequence[Any],
) -> None:
    """A rank's process: joins the group, works, answers."""
    enter_child()
    set_environment(ENVIRONMENT)
    place = f"{what}: rank {rank} of {ranks}"
    try:
        device = None
        if backend == "nccl":
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        store = TCPStore(HOST, port, ranks, False, timedelta(seconds=wait_s))
        init_process_group(
            backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=wait_s), device_id=device
        )
        connection.send(RankResult(work(rank, *arguments)))
    except FlywheelError as error:
        connection.send(Failure(error, caused=True))
    except RuntimeError as error:  # also torch.distributed's, when another rank has died
        full = is_exhausted(error)
        kind = GpuMemoryError if full else WorkerDiedError
        connection.send(Failure(kind(f"{place}: {asked(error)}"), caused=full))
    else:
        destroy_process_group()


