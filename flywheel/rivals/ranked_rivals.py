"""PyTorch's tensor parallelism as a rival of multi-GPU programs: long-lived processes that run a round on request."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection
from typing import Final, Self

import torch
import torch.distributed
from torch import Tensor

from flywheel.decode.session import Step
from flywheel.decode.source import Source, open_source
from flywheel.errors import FlywheelError, MismatchError, WorkerDiedError
from flywheel.ir import DType
from flywheel.models.oracle import LayerCache
from flywheel.process import one_torch_thread, sums_as_shipped
from flywheel.rivals.contestants import capture
from flywheel.rivals.lineup import Rival
from flywheel.rivals.rank_processes import Backend, run_ranks
from flywheel.rivals.tensor_parallel import Shard, ShardedDecoder, shard_of
from flywheel.rivals.torch_decoder import FusedWeights, TorchDecoder, fuse, steps_of
from flywheel.vm.gpu.flush import FACTOR

WARMUP: Final = 3
LIFE_S: Final = 3600.0
"""Wall seconds after which the processes are killed. torch.compile takes minutes."""

_POLL_S: Final = 0.2
_BATCH: Final = 50
"""Launches of a back-to-back batch."""


@dataclass(frozen=True, slots=True)
class Behind:
    """The inputs of a step: a token of each sequence at `position`, and `caches` by sequence and layer, on the CPU."""

    tokens: tuple[int, ...]
    position: int
    caches: tuple[list[LayerCache], ...]


@dataclass(frozen=True, slots=True)
class RankedWork:
    """A rival's step of `ranks` GPUs; `model` is a name that `open_source` takes."""

    model: str
    dtype: DType
    context: int
    seed: int
    rival: Rival
    ranks: int
    behind: Behind


@dataclass(frozen=True, slots=True)
class RankedRound:
    """A rank's results: samples in us, the mean time of a batch of launches, and the last launch's `logits` and
    `tokens`. Only rank 0 sends its logits; every rank sends their `digest`."""

    times_us: tuple[float, ...]
    batch_us: float | None
    digest: str
    logits: Tensor | None
    tokens: Tensor | None


class RankedRival:
    """A rival's processes, one per GPU. Close it. Raises as `run_ranks`, KernelCompileError if torch does not compile
    the step, and MismatchError if the ranks' logits differ."""

    def __init__(self, work: RankedWork, backend: Backend = "nccl") -> None:
        pairs = [multiprocessing.get_context("spawn").Pipe() for _ in range(work.ranks)]
        self._pipes = [ours for ours, _ in pairs]
        self._name = work.rival.name
        self._thread = ThreadPoolExecutor(1)
        self._ranks = self._thread.submit(
            run_ranks, work.rival.name, take_part, work.ranks, backend, LIFE_S, [theirs for _, theirs in pairs], work
        )
        with ExitStack() as undo:
            undo.callback(self.close)
            self._hear()  # ready
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
            pipe.close()
        with suppress(FlywheelError):
            self._ranks.result()
        self._thread.shutdown()

    def take_turn(self, samples: int) -> tuple[RankedRound, list[Step]]:
        """Run a round of samples on all ranks. Returns the slowest rank's time for each sample, and the steps of the
        last launch."""
        for pipe in self._pipes:
            pipe.send(samples)
        found = self._hear()
        if len({each.digest for each in found}) > 1:
            raise MismatchError(f"rival {self._name}: the logits of {len(found)} ranks are not the same")
        first = found[0]
        times = tuple([max(each) for each in zip(*(each.times_us for each in found), strict=True)])
        batches = [each.batch_us for each in found if each.batch_us is not None]
        assert first.logits is not None
        assert first.tokens is not None
        steps = steps_of(first.logits, first.tokens)
        return RankedRound(times, max(batches, default=None), first.digest, first.logits, first.tokens), steps

    def _hear(self) -> list[RankedRound]:
        return [self._receive(pipe) for pipe in self._pipes]

    def _receive(self, pipe: Connection) -> RankedRound:
        while not pipe.poll(_POLL_S):
            if self._ranks.done():
                self._ranks.result()  # raises the error
                raise WorkerDiedError(f"rival {self._name}: its processes ended")
        try:
            given: RankedRound = pipe.recv()
        except (EOFError, OSError) as error:
            self._ranks.result()
            raise WorkerDiedError(f"rival {self._name}: its processes ended") from error
        return given


def take_part(rank: int, pipes: Sequence[Connection], work: RankedWork) -> None:
    """The main function of a rank: report that the step is ready, then measure a round at each request."""
    pipe = pipes[rank]
    on_gpu = torch.distributed.get_backend() == "nccl"
    with torch.no_grad(), one_torch_thread(), sums_as_shipped():
        launch, given = _make_step(rank, work, f"cuda:{rank}" if on_gpu else "cpu")
        timing = _RankTiming(launch, on_gpu)
        pipe.send(_round(rank, timing, given, 0))
        with suppress(EOFError):
            while (samples := pipe.recv()) is not None:
                pipe.send(_round(rank, timing, given, samples))


def _round(rank: int, timing: _RankTiming, given: Callable[[], tuple[Tensor, Tensor]], samples: int) -> RankedRound:
    times, batch_us = timing.take(samples)
    logits, tokens = (each.cpu() for each in given())
    logits = logits.float()
    digest = sha256(logits.numpy().tobytes()).hexdigest()
    shown = (logits, tokens) if rank == 0 else (None, None)
    return RankedRound(times, batch_us, digest, *shown)


def _make_step(
    rank: int, work: RankedWork, device: str
) -> tuple[Callable[[], object], Callable[[], tuple[Tensor, Tensor]]]:
    """(a function that launches the step once more, a function that returns the last launch's result). On a GPU the
    step is a CUDA graph."""
    source = open_source(work.model, any_weights=True)
    shard = shard_of(source.spec, rank, work.ranks)
    weights = _weights_of(source, shard, work, device)
    rival, behind = work.rival, work.behind
    decoder = ShardedDecoder(shard, weights, work.dtype, work.context, rival.inline_attention, len(behind.tokens))
    for row, layers in enumerate(behind.caches):
        decoder.write_cache([(keys.to(device), values.to(device)) for keys, values in layers], row)
    decoder.set_tokens(list(behind.tokens))
    if device == "cpu":
        kept: list[tuple[Tensor, Tensor]] = []
        return lambda: kept.insert(0, decoder.forward(behind.position)), lambda: kept[0]
    return captured(decoder, rival, behind.position)


def captured(
    decoder: TorchDecoder, rival: Rival, position: int
) -> tuple[Callable[[], object], Callable[[], tuple[Tensor, Tensor]]]:
    """As `_make_step`, of a decoder on a GPU. The first function holds the decoder: a graph reads the tensors that it
    was captured with, and holds none of them."""
    forward = decoder.forward
    if rival.compiled:
        forward = torch.compile(forward, mode="max-autotune-no-cudagraphs", fullgraph=True, dynamic=False)
    graph = torch.cuda.CUDAGraph()
    given = capture(rival.name, graph, forward, position, errors="thread_local")  # NCCL's threads call CUDA
    return partial(_replay, graph, decoder), lambda: given


def _replay(graph: torch.cuda.CUDAGraph, held: TorchDecoder) -> None:
    graph.replay()


def _weights_of(source: Source, shard: Shard, work: RankedWork, device: str) -> FusedWeights:
    weights = fuse(shard.spec, shard.of(source.weights_on_request(work.dtype, work.seed, device)))
    if device != "cpu":
        torch.cuda.empty_cache()  # whole matrices were there for a moment; other contestants share the GPU
    return weights


class _RankTiming:
    """Times launches of a step on all ranks, between two events, with the L2 cache emptied before each."""

    def __init__(self, launch: Callable[[], object], on_gpu: bool) -> None:
        self._launch, self._on_gpu = launch, on_gpu
        self._word = torch.zeros(1, device="cuda" if on_gpu else "cpu")
        size = FACTOR * torch.cuda.get_device_properties().L2_cache_size if on_gpu else 0
        self._cached = torch.zeros(size // 4, dtype=torch.int32, device=self._word.device)

    def take(self, samples: int) -> tuple[tuple[float, ...], float | None]:
        """(samples in us, mean us of launches back to back). Without samples, runs one launch untimed."""
        if not samples:
            self._launch()
            return (), None
        times = [self._time(1, empty=True) for _ in range(WARMUP + samples)][WARMUP:]
        return tuple(times), self._time(_BATCH, empty=False) / _BATCH

    def _time(self, count: int, *, empty: bool) -> float:
        if empty and self._on_gpu:
            self._cached.sum()
        torch.distributed.all_reduce(self._word)  # ranks begin together
        run = partial(self._run, count)
        return _time_on_gpu(run) if self._on_gpu else _time_here(run)

    def _run(self, count: int) -> None:
        for _ in range(count):
            self._launch()


def _time_on_gpu(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3


def _time_here(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e6
