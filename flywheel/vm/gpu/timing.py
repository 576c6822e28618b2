"""Times launches on the GPU by CUDA events, and records the clocks that they ran at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from math import ceil
from typing import Any, Final, TypeVar

import numpy as np

from flywheel.errors import NonFiniteError
from flywheel.measure.dismissal import STAGES, is_dismissed
from flywheel.measure.latency import GpuState, L2State, MeasuredLatency
from flywheel.vm.gpu.driver import Gpu
from flywheel.vm.gpu.flush import Flush
from flywheel.vm.gpu.nvml import read_state
from flywheel.vm.gpu.ranked import AnyProgram

_HEAD_START: Final = 10
"""Flushes before a batch. They keep the GPU busy while the host enqueues, so that no launch waits for the host."""

_BATCH_US: Final = 30_000.0
"""Time in us that a batch should last. NVML is asked while it runs, and then shows the clocks under load."""

_MOST_TIMES: Final = 10
"""Most launches of a batch, as a multiple of the number of samples."""

_IN_A_ROW: Final = 2
"""Launches of one program before the next one's turn."""

_N = TypeVar("_N", int, float)

Launch = Callable[[], None]
"""Enqueues one launch on the stream of a Gpu."""


def time_launches(
    loaded: AnyProgram,
    pos: int | None,
    *,
    samples: int = 30,
    warmup: int = 3,
    l2: L2State = "clean",
    limit_s: float = 10.0,
) -> MeasuredLatency:
    """Time `samples` launches one by one, and at least as many back to back, after `warmup` launches that do not count.

    All run at position `pos`; each overwrites the KV rows of that position. The clocks are those of the back-to-back
    batch. `throttle` has every reason that held clocks down at any time. `limit_s` is the time limit, in seconds, of
    each group of launches. Raises LaunchTimeoutError, GpuFaultError and TensorError as `LoadedProgram.sync` does.
    """
    with Flush(*_gpus_of(loaded)) as flush:
        singles = _time_singles(loaded, pos, samples, warmup, flush if l2 == "clean" else None, limit_s)
    return time_batch(loaded, pos, summarise(singles, warmup, l2), limit_s)


def time_in_turn(
    loaded: Sequence[AnyProgram],
    pos: int | None,
    *,
    samples: int,
    warmup: int,
    limit_s: float = 10.0,
    dismissing: bool = False,
) -> list[list[float]]:
    """Samples in us of each program, taken in turn: sample i of one comes near sample i of the others.

    In a turn each program is launched twice in a row (`_order`), and the L2 cache is emptied before each launch. Each
    program gets `warmup` launches that do not count. Sampling ends early where `is_dismissed` gives up the first
    program beside the second: after the first samples or, with `dismissing`, at any stage. Raises as `time_launches`
    does.
    """
    gpu, peers = _gpus_of(loaded[0])
    launches = [partial(program.launch, pos) for program in loaded]

    def finish() -> None:
        for program in loaded:
            program.sync(limit_s)

    with Flush(gpu, peers) as flush:
        times = _time_turns(gpu, launches, finish, warmup + 1, flush, skipped=warmup)
        stages = [count for count in STAGES if 1 < count < samples] if dismissing else []
        for count in (*stages, samples):
            if len(times) > 1 and is_dismissed(times[0], times[1]):
                break
            more = _time_turns(gpu, launches, finish, count - len(times[0]), flush)
            times = [first + rest for first, rest in zip(times, more, strict=True)]
    return times


def time_contestants(
    gpu: Gpu, launches: Sequence[Launch], finish: Launch, *, samples: int, warmup: int, peers: Sequence[Gpu] = ()
) -> list[list[float]]:
    """As `time_in_turn`, for any launches on the GPU's stream, and without an early end.

    `peers` are the other GPUs of the launches, whose L2 caches are emptied too. `finish` waits for all launches so far.
    The GPU is kept busy while the host enqueues, so that no sample contains the host's time. Raises as `finish` does.
    """
    with Flush(gpu, peers) as flush:
        _keep_busy(flush)
        return _time_turns(gpu, launches, finish, warmup + samples, flush, skipped=warmup)


def time_back_to_back(
    gpu: Gpu, launch: Launch, finish: Launch, latency: MeasuredLatency, peers: Sequence[Gpu] = ()
) -> MeasuredLatency:
    """As `time_batch`, for any launch on the GPU's stream, which `peers` take part in. Raises as `finish` does."""
    gpus = (gpu, *peers)
    before = _state_of(gpus)
    with Flush(gpu, peers) as flush:
        count = min(max(latency.samples, ceil(_BATCH_US / latency.median_us)), _MOST_TIMES * latency.samples)
        batch_us, under_load = _time_batch(gpus, launch, finish, count, flush)
    return replace(latency, batch_us=batch_us, gpu_state=_both(before, under_load))


def time_batch(
    loaded: AnyProgram, pos: int | None, latency: MeasuredLatency, limit_s: float = 10.0
) -> MeasuredLatency:
    """`latency` with the mean time of launches that run back to back, and the GPU's state before and during them.

    Raises as `time_launches` does.
    """
    gpu, peers = _gpus_of(loaded)
    return time_back_to_back(gpu, partial(loaded.launch, pos), partial(loaded.sync, limit_s), latency, peers)


def summarise(samples_us: Sequence[float], warmup: int, l2: L2State = "clean") -> MeasuredLatency:
    """The latency that samples in us give. Raises NonFiniteError for a sample that is not finite, which percentiles may
    hide."""
    if not np.isfinite(samples_us).all():
        raise NonFiniteError(f"latency: one of {len(samples_us)} samples is not finite")
    p10, median, p90 = (float(value) for value in np.percentile(samples_us, (10, 50, 90)))
    return MeasuredLatency(median, p10, p90, len(samples_us), warmup, l2)


def _order(programs: int, samples: int) -> Iterator[int]:
    """The program of each launch, where each gets `samples`: twice the first, twice the next, and so on, from the first
    again.

    A launch behind one of the same program takes less time, even if the L2 cache is emptied between them
    (results/gpu/versions.md). In this order, either sample i of every program is such a launch, or of none.
    """
    for done in range(0, samples, _IN_A_ROW):
        for place in range(programs):
            yield from repeat(place, min(_IN_A_ROW, samples - done))


def _time_turns(
    gpu: Gpu, launches: Sequence[Launch], finish: Launch, turns: int, flush: Flush, skipped: int = 0
) -> list[list[float]]:
    events: list[list[tuple[Any, Any]]] = [[] for _ in launches]
    for place in _order(len(launches), turns):
        flush()
        start = gpu.record()
        launches[place]()
        events[place].append((start, gpu.record()))
    finish()
    return [[gpu.elapsed_us(start, end) for start, end in noted[skipped:]] for noted in events]


def _time_singles(
    loaded: AnyProgram, pos: int | None, samples: int, warmup: int, flush: Flush | None, limit_s: float
) -> list[float]:
    gpu = loaded.gpu
    events = []
    for _ in range(warmup + samples):
        if flush is not None:
            flush()
        start = gpu.record()
        loaded.launch(pos)
        events.append((start, gpu.record()))
    loaded.sync(limit_s)
    return [gpu.elapsed_us(start, end) for start, end in events[warmup:]]


def _time_batch(
    gpus: Sequence[Gpu], launch: Launch, finish: Launch, count: int, flush: Flush
) -> tuple[float, GpuState]:
    """(mean time of a launch in us, state of the GPUs while they run)."""
    gpu = gpus[0]
    _keep_busy(flush)
    start = gpu.record()
    for _ in range(count):
        launch()
    end = gpu.record()
    state = _state_of(gpus)
    finish()
    return gpu.elapsed_us(start, end) / count, state


def _keep_busy(flush: Flush) -> None:
    for _ in range(_HEAD_START):
        flush()


def _gpus_of(loaded: AnyProgram) -> tuple[Gpu, list[Gpu]]:
    """The GPU whose stream orders a program's launches, and the others that take part in them."""
    gpu, *peers = [part.gpu for part in loaded.parts]
    return gpu, peers


def _state_of(gpus: Sequence[Gpu]) -> GpuState:
    """Of several GPUs, the lowest clocks, the highest power and temperature, and all that holds clocks down."""
    first, *others = [read_state(gpu.pci_bus_id) for gpu in gpus]
    for other in others:
        first = replace(
            _both(first, other),
            sm_clock_mhz=_known(min, first.sm_clock_mhz, other.sm_clock_mhz),
            mem_clock_mhz=_known(min, first.mem_clock_mhz, other.mem_clock_mhz),
            power_w=_known(max, first.power_w, other.power_w),
            temperature_c=_known(max, first.temperature_c, other.temperature_c),
        )
    return first


def _known(choose: Callable[[list[_N]], _N], *numbers: _N | None) -> _N | None:
    """`choose` (min or max) of the numbers that are not None; None if all are."""
    known = [number for number in numbers if number is not None]
    return choose(known) if known else None


def _both(before: GpuState, after: GpuState) -> GpuState:
    """`after`, with the throttle reasons of both states and the larger number of strangers."""
    strangers = [state.strangers for state in (before, after) if state.strangers is not None]
    after = replace(after, strangers=max(strangers, default=None))
    if before.throttle is None or after.throttle is None:
        return after
    reasons = dict.fromkeys(f"{before.throttle},{after.throttle}".split(","))
    named = [reason for reason in reasons if reason != "none"]
    return replace(after, throttle=",".join(named) or "none")
