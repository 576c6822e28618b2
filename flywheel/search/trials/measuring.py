"""Evaluating on a GPU. The coordinator imports this before the worker starts, so heavy imports wait for the worker."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Final

from flywheel.errors import ConfigError, InvalidProgramError, KernelCompileError, NoGpuError, UsageError
from flywheel.installing import install_line
from flywheel.ir import DType, GpuTarget, MegakernelProgram
from flywheel.measure.device import is_target
from flywheel.measure.environment import Environment, capture_environment, list_gpus
from flywheel.measure.record import TrialRecord
from flywheel.measure.tenants import Attendant
from flywheel.models.decoder import DTYPES
from flywheel.models.formats import parse_formats
from flywheel.plan import variant_of
from flywheel.plan.kernels import arch_name
from flywheel.process import usable_cores
from flywheel.search.trials.device import missing_modules
from flywheel.vm.gpu.devices import describe_gpu
from flywheel.vm.gpu.nvml import attendant_of
from flywheel.vm.gpu.nvrtc import compile_variant, nvrtc_version
from flywheel.vm.gpu.sources import kernels_id
from flywheel.vm.worker import Bench, Parcel, WorkerProgram, enter_phase

if TYPE_CHECKING:
    from flywheel.store.sql import Store

_IMPORT_S: Final = 180.0
"""Wall seconds that a worker's imports may take, torch's above all, from a slow file system, too."""

_COMPILING: Final[dict[tuple[int, int, int, int, DType, tuple[int, ...], bool, tuple[str, ...]], Lock]] = {}


def look(store: Store, gpu: str, dtype: str, program_id: str, environment: Environment) -> TrialRecord | None:
    """The earlier measurement of a program with the same kernels, NVRTC and driver on the same kind of GPU, if any."""
    machine = {
        "gpu_name": environment.gpu,
        "gpu_driver": environment.driver,
        "nvrtc": environment.nvrtc,
        "kernels": environment.kernels,
    }
    return store.seen(program_id, gpu=gpu, dtype=dtype, measure="cuda", machine=machine)


def capture(target: GpuTarget) -> Environment:
    """The environment in which a station measures.

    Raises NoGpuError where its GPU is not `target`, UsageError where packages are missing, and KernelCompileError
    without a compiler.
    """
    environment = capture_environment()
    present = environment.device
    missing = missing_modules()
    if present is not None and not missing:
        present, _ = describe_gpu()  # nvidia-smi knows no number of SMs, and may order GPUs differently
    if present is None or not is_target(present, target):
        raise NoGpuError(f"--measure cuda needs an {target.name}: {environment.host} has {present or 'no GPU'}")
    if missing:
        raise UsageError(f"{environment.host}: {' and '.join(missing)} missing: {install_line('cuda', 'torch')}")
    return replace(environment, gpu=present.name, nvrtc=nvrtc_version(), kernels=kernels_id())


def attendant(ranks: int, pause: Callable[[float], bool] | None = None) -> Attendant:
    """What waits until this process's first `ranks` GPUs are quiet."""
    return attendant_of([gpu for gpu, _ in list_gpus()][:ranks], pause)


def make_bench(
    model: str, dtype: str, context: int, batch: int = 1, weights: str | None = None, ranks: int = 1
) -> Bench:
    """The bench of a model, which is a name or a directory, on the first `ranks` GPUs that CUDA shows this process.

    `dtype` is a key of DTYPES, and `weights` names the format in which matrices are stored. Raises as CudaBench and
    open_source do.
    """
    enter_phase("imports its packages", _IMPORT_S)
    from flywheel.decode.source import open_source
    from flywheel.judge.bench import CudaBench

    formats = parse_formats(weights or dtype, dtype)
    source = open_source(model, any_weights=True)  # random ones take the same time
    return CudaBench(source, DTYPES[dtype], context, batch=batch, formats=formats, ranks=ranks)


def compile_ahead(dtype: str, program: MegakernelProgram) -> None:
    """Compile a program's kernel into the cache. Errors are left to the measurement, which will meet them again."""
    assert program.target is not None
    with suppress(ConfigError, KernelCompileError):
        variant = variant_of(program)
        threads, matrix_warps, rows = variant.threads, variant.matrix_warps, variant.rows
        kind = variant.formats, program.ranks > 1, variant.features
        _compile(program.target.sm_arch, threads, matrix_warps, rows, DTYPES[dtype], *kind)


def wrap(program: MegakernelProgram) -> WorkerProgram:
    """The program, packed before its turn. A program that cannot be packed stays as it is; the worker reports why."""
    from flywheel.vm.pack import pack_any

    try:
        return Parcel(pickle.dumps(pack_any(program), protocol=pickle.HIGHEST_PROTOCOL))
    except (ConfigError, InvalidProgramError):
        return program


def compile_all(
    dtype: str,
    sm_arch: int,
    kernels: Sequence[tuple[int, int, int]],
    stopped: Callable[[], bool],
    formats: tuple[int, ...] = (),
    side: int | None = None,
    ranked: bool = False,
    features: tuple[str, ...] = (),
) -> None:
    """Compile `kernels`, each (threads, warps that multiply, rows), into the cache, in order, until `stopped()`.

    `formats` are the formats of the quantised matrices; `ranked` kernels are for several GPUs, and those with
    `features` for programs that ask for them. `side` kernels are
    compiled side by side, by default one on each of half the cores; the other cores predict meanwhile.
    """

    def compile_next(kernel: tuple[int, int, int]) -> None:
        if stopped():
            return
        with suppress(ConfigError, KernelCompileError):
            _compile(sm_arch, *kernel, DTYPES[dtype], formats, ranked, features)

    with ThreadPoolExecutor(side or max(1, usable_cores() // 2)) as pool:
        for done in [pool.submit(compile_next, kernel) for kernel in kernels]:
            done.result()


def _compile(
    sm_arch: int, threads: int, matrix_warps: int, rows: int, dtype: DType, formats: tuple[int, ...], ranked: bool,
    features: tuple[str, ...],
) -> None:  # fmt: skip
    """Compile a kernel once: a thread that wants what another thread compiles waits for it."""
    kernel = sm_arch, threads, matrix_warps, rows, dtype, formats, ranked, features
    with _COMPILING.setdefault(kernel, Lock()):
        _compile_once(*kernel)


@cache
def _compile_once(
    sm_arch: int, threads: int, matrix_warps: int, rows: int, dtype: DType, formats: tuple[int, ...], ranked: bool,
    features: tuple[str, ...],
) -> None:  # fmt: skip
    compile_variant(
        arch_name(sm_arch), threads, dtype, matrix_warps=matrix_warps, rows=rows, formats=formats, ranked=ranked,
        features=features,
    )  # fmt: skip
