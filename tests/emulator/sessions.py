"""A program on an emulated GPU as the judge wants it: a CudaSession over memory of this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

from emulator.gpu import EmulatedGpu, build_variant
from torch import Tensor

from flywheel.decode.caches import KvCaches
from flywheel.decode.cuda import CudaSession
from flywheel.decode.interface import read_interface
from flywheel.decode.prefill import Prefill
from flywheel.decode.taps import find_taps
from flywheel.ir import MegakernelProgram
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import bind
from flywheel.vm.gpu.driver import load_variant
from flywheel.vm.gpu.granules import Granules
from flywheel.vm.gpu.loader import LoadedProgram, put_weights
from flywheel.vm.gpu.nvrtc import arch_name
from flywheel.vm.gpu.weights import ResidentWeights
from flywheel.vm.pack import pack


@contextmanager
def emulated_session(
    gpu: EmulatedGpu, program: MegakernelProgram, spec: DecoderSpec, weights: Mapping[str, Tensor],
    granules: Granules | None = None,
) -> Iterator[CudaSession]:  # fmt: skip
    """The program need not be proved."""
    packed, interface = pack(program), read_interface(program, spec)
    caches = KvCaches(spec, interface.dtype, interface.context, "cpu", interface.batch, granules)
    variant = packed.variant
    kernel = build_variant(
        arch_name(gpu.sm_arch), variant.threads, interface.dtype, matrix_warps=variant.matrix_warps, rows=variant.rows,
        formats=variant.formats,
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
            prefill=Prefill(spec, weights),
        )  # fmt: skip
        taps = find_taps(program, spec, interface)
        with CudaSession(model, load(packed), taps, lambda: load(packed.apart())) as session:  # type: ignore[arg-type]
            yield session
