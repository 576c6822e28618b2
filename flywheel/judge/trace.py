"""Traces one decode step: checks the program against the oracle, then reads the time stamps of one launch of its traced
variant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from flywheel.decode.cuda import CudaModel, CudaSession, prepare_torch
from flywheel.decode.interface import read_interface
from flywheel.decode.memory import memory_named
from flywheel.decode.on_gpu import weights_for
from flywheel.decode.source import Source
from flywheel.errors import MismatchError, UsageError
from flywheel.ir import MegakernelProgram
from flywheel.judge.verdicts import Examined, Judge, default_positions, judge_repeated
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.verdict import Verdict
from flywheel.models.oracle import OracleWeights
from flywheel.models.quantise import formats_of_program
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import open_gpus
from flywheel.vm.gpu.trace import LaunchTrace

_SAMPLES: Final = 30
_WARMUP: Final = 3


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A traced step of `batch` sequences at `position` on the named GPU. `verdict` is that of the traced variant.

    `latency` was measured without tracing; `traced_us` is the time of the traced launch by CUDA events.
    """

    gpu_name: str
    batch: int
    position: int
    verdict: Verdict
    latency: MeasuredLatency
    traced_us: float
    trace: LaunchTrace


def trace_step(program: MegakernelProgram, source: Source, position: int | None = None, seed: int = 0) -> TracedStep:
    """Trace a program of a model at a position, by default the last one, on the judge's caches.

    Raises MismatchError if the program, with or without tracing, is wrong at any default position or this one;
    UsageError for position 0 and for one outside the context; TraceError; NoGpuError; and as `CudaModel.load` and
    `CudaSession.step` do.
    """
    if position == 0:
        raise UsageError("trace: position 0 has nothing to attend to, so its logits prove nothing; at least 1")
    interface = read_interface(program, source.spec)
    place = interface.context - 1 if position is None else position
    prepare_torch()
    gpu, *peers = open_gpus(program.ranks)
    with memory_named(source.name):
        formats = formats_of_program(program, interface.dtype)
        weights = weights_for(source, interface.dtype, seed, formats, [gpu, *peers])
        own = OracleWeights(source.spec, weights, TORCH_DTYPES[interface.dtype], "cuda")
        positions = (*default_positions(interface.context), place)
        made = Judge(own, interface.dtype, interface.context, positions, interface.batch, seed)
        torch.cuda.empty_cache()  # the VM allocates memory outside torch
        model = CudaModel(
            gpu, source.spec, interface.dtype, interface.context, weights, interface.batch, peers=peers
        )
        with model:
            with model.load(program) as plain:
                _check(plain, made)
                tokens = made.prepare(plain, place)
                latency = plain.time(tokens, place, samples=_SAMPLES, warmup=_WARMUP)
            with model.load(program, trace=True) as session:
                verdict = _check(session, made).verdict
                tokens = made.prepare(session, place)
                judged = session.step_rows(tokens, place)
                traced_us, trace = session.trace(tokens, place, warmup=_WARMUP)
                logits = torch.stack([step.logits for step in judged])
                _refuse(judge_repeated(session.read_rows(), logits, place, session.dtype), ", while traced")
    name = f"{program.ranks} x {gpu.name}" if peers else gpu.name
    return TracedStep(name, interface.batch, place, verdict, latency, traced_us, trace)


def _check(session: CudaSession, made: Judge) -> Examined:
    """The examination of a program that passes. Raises MismatchError for one that does not."""
    examined = made.examine(session)
    _refuse(examined.verdict, "")
    return examined


def _refuse(verdict: Verdict, where: str) -> None:
    if not verdict.passed:
        raise MismatchError(f"program: is wrong{where}: {verdict.reason}")
