"""Opens a lowered model on a device, with its weights."""

from __future__ import annotations

from contextlib import ExitStack

from flywheel.decode.growing import HostGranules
from flywheel.decode.interface import read_interface
from flywheel.decode.memory import within_memory
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.session import DecodeSession
from flywheel.decode.source import Source, Weights
from flywheel.ir import MegakernelProgram
from flywheel.models.quantise import formats_of_program


def open_session(
    program: MegakernelProgram, source: Source, seed: int, device: str, undo: ExitStack, order: str = "list"
) -> tuple[DecodeSession, Weights]:
    """A session of a program on `reference` or `cuda`, and the model's weights there, in the program's dtype and
    formats. The caches' memory grows with use. `undo` frees the device's memory; `order` is the firing order of the
    reference VM.

    Raises as ReferenceSession or CudaModel and its `load` do, and GpuMemoryError if torch has no memory for weights and
    caches.
    """
    interface = read_interface(program, source.spec)
    dtype, formats = interface.dtype, formats_of_program(program, interface.dtype)
    if device != "cuda":
        weights = source.weights(dtype, seed, formats=formats)
        return ReferenceSession(program, source.spec, weights, order=order, seed=seed, granules=HostGranules()), weights
    from flywheel.decode.cuda import CudaModel, prepare_torch
    from flywheel.decode.on_gpu import weights_for
    from flywheel.vm.gpu.driver import open_gpus

    prepare_torch()

    def load() -> tuple[DecodeSession, Weights]:
        gpu, *peers = open_gpus(program.ranks)
        weights = weights_for(source, dtype, seed, formats, [gpu, *peers])
        model = CudaModel(
            gpu, source.spec, dtype, interface.context, weights, interface.batch, gpu.granules(), peers,
            lanes=interface.lanes,
        )
        undo.enter_context(model)
        return undo.enter_context(model.load(program)), weights

    batch, context = interface.batch, interface.context
    return within_memory(f"{source.name}: its weights and {batch} caches of {context} positions", load)
