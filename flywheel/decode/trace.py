"""One decode step with a trace: a program's logits are right, then one launch of its traced variant is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from flywheel.decode.cuda import CudaModel, CudaSession, prepare_torch
from flywheel.decode.interface import read_interface
from flywheel.decode.source import Source
from flywheel.decode.verify import Expectation, compare_rows, default_positions, expect_rows, judge_steps
from flywheel.errors import GpuMemoryError, MismatchError, UsageError
from flywheel.ir import MegakernelProgram
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.verdict import Verdict
from flywheel.models.eager import EagerDecoder
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.driver import open_gpu
from flywheel.vm.trace import LaunchTrace

_SAMPLES: Final = 30
_WARMUP: Final = 3


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step of `batch` sequences at `position` on the GPU of that name. `verdict` is that of the variant with a trace.

    `latency` was measured without a trace; `traced_us` is what the traced launch took, by CUDA events.
    """

    gpu_name: str
    batch: int
    position: int
    verdict: Verdict
    latency: MeasuredLatency
    traced_us: float
    trace: LaunchTrace


def trace_step(program: MegakernelProgram, source: Source, position: int | None = None, seed: int = 0) -> TracedStep:
    """Trace a program of a model at a position, the last one unless given, behind the oracle's caches.

    Raises MismatchError where the logits, with a trace or without, are wrong at any of the default positions or this
    one; UsageError for position 0 and for one outside the context; TraceError; NoGpuError; and as `CudaModel.load` and
    `CudaSession.step` do.
    """
    if position == 0:
        raise UsageError("trace: position 0 has nothing to attend to, so its logits prove nothing; at least 1")
    interface = read_interface(program, source.spec)
    place = interface.context - 1 if position is None else position
    prepare_torch()
    gpu = open_gpu()
    try:
        weights = source.weights(interface.dtype, seed, "cuda")
        oracle = EagerDecoder(source.spec, weights, TORCH_DTYPES[interface.dtype], interface.context, "cuda")
        expected = expect_rows(oracle, (*default_positions(interface.context), place), interface.batch, seed)
        tokens = [each.tokens[place] for each in expected]
        del oracle
        torch.cuda.empty_cache()  # what the VM allocates is not torch's
        model = CudaModel(gpu, source.spec, interface.dtype, interface.context, weights, interface.batch)
        with model:
            with model.load(program) as plain:
                _check(plain, expected, place)
                latency = plain.time(tokens, place, samples=_SAMPLES, warmup=_WARMUP)
            with model.load(program, trace=True) as session:
                verdict = _check(session, expected, place)
                traced_us, trace = session.trace(tokens, place, warmup=_WARMUP)
                _check_last(session, expected, place)
    except torch.OutOfMemoryError as error:
        raise GpuMemoryError(f"{source.name}: {str(error).splitlines()[0]}") from error
    return TracedStep(gpu.name, interface.batch, place, verdict, latency, traced_us, trace)


def _check(session: CudaSession, expected: Sequence[Expectation], place: int) -> Verdict:
    """The verdict, a pass. Leaves the caches as they are before `place`."""
    verdict = compare_rows(session, expected)
    _refuse(verdict, "")
    for row, each in enumerate(expected):
        session.write_cache(each.cache_before(place), row)
    return verdict


def _check_last(session: CudaSession, expected: Sequence[Expectation], place: int) -> None:
    """What the traced launch itself has computed."""
    wanted = [each.logits[each.positions.index(place)] for each in expected]
    _refuse(judge_steps(session.read_rows(), wanted, [place], session.dtype), f" at position {place}, while traced")


def _refuse(verdict: Verdict, where: str) -> None:
    if not verdict.passed:
        raise MismatchError(f"program: logits are wrong{where}: {verdict.reason}")
