"""A program on an emulated GPU as the judge wants it: a CudaSession over memory of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
from emulator.gpu import EmulatedGpu, build_variant
from torch import Tensor

from flywheel.decode.caches import KvCaches
from flywheel.decode.cuda import CudaModel, CudaSession
from flywheel.decode.interface import as_whole, find_taps, read_interface
from flywheel.decode.prompts import Prefill
from flywheel.ir import MegakernelProgram
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind
from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu.driver import load_variant
from flywheel.vm.gpu.granules import Granules
from flywheel.vm.gpu.loader import LoadedProgram
from flywheel.vm.gpu.weights import ResidentWeights, put_weights
from flywheel.vm.pack import pack


@contextmanager
def emulated_session(
    gpu: EmulatedGpu, program: MegakernelProgram, spec: DecoderSpec, weights: Mapping[str, Tensor],
    granules: Granules | None = None,
) -> Iterator[CudaSession]:  # fmt: skip
    """The program need not be proved."""
    packed, interface = pack(program), read_interface(program, spec)
    caches = KvCaches(spec, interface.dtype, interface.context, "cpu", interface.batch, granules, interface.lanes)
    variant = packed.variant
    kernel = build_variant(
        arch_name(gpu.sm_arch), variant.threads, interface.dtype, matrix_warps=variant.matrix_warps, rows=variant.rows,
        formats=variant.formats, features=variant.features,
    )
    bound = bind(program, weights)
    with (
        patch("flywheel.vm.gpu.weights.compile_variant", build_variant),
        ResidentWeights(gpu, interface.dtype) as resident,  # type: ignore[arg-type]
    ):
        put_weights(packed, resident, lambda buffer: bound[buffer.name].data_ptr())
        load = partial(
            LoadedProgram,
            gpu,  # type: ignore[arg-type]
            kernel=load_variant(gpu, kernel),  # type: ignore[arg-type]
            weights=resident,
            caches={name: rows.data_ptr() for name, rows in caches.by_name(interface).items()},
        )
        model = SimpleNamespace(
            spec=spec, dtype=interface.dtype, context=interface.context, batch=interface.batch, caches=caches,
            prefill=Prefill(spec, weights, interface.context), weights=weights, finish_torch=lambda: None,
        )  # fmt: skip
        taps = find_taps(program, spec, interface)
        whole = as_whole(program, spec)
        with (
            patch("flywheel.decode.cuda.torch_device", lambda gpu: torch.device("cpu")),
            CudaSession(model, load(packed), whole, taps, lambda: load(packed.apart())) as session,  # type: ignore[arg-type]
        ):
            yield session


@contextmanager
def emulated_ranks(
    gpus: Sequence[EmulatedGpu], program: MegakernelProgram, spec: DecoderSpec, weights: Mapping[str, Tensor],
    granules: Granules | None = None, trace: bool = False,
) -> Iterator[CudaSession]:  # fmt: skip
    """A proved program of several emulated GPUs, by the model that holds one on real ones."""
    interface = read_interface(program, spec)
    with ExitStack() as stack:
        for place, made in (
            ("flywheel.decode.cuda.prepare_torch", lambda: None),
            ("flywheel.decode.cuda.torch_device", lambda gpu: torch.device("cpu")),
            ("flywheel.decode.on_gpu.torch_device", lambda gpu: torch.device("cpu")),
            ("flywheel.decode.on_gpu.compile_variant", build_variant),
            ("flywheel.vm.gpu.weights.compile_variant", build_variant),
        ):
            stack.enter_context(patch(place, made))
        model = stack.enter_context(
            CudaModel(
                gpus[0], spec, interface.dtype, interface.context, weights, interface.batch, granules, gpus[1:]  # type: ignore[arg-type]
            )
        )
        yield stack.enter_context(model.load(program, trace=trace))
