"""What the programs of one model share on one GPU: compiled kernels, and weights in the kernels' layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from flywheel.decode.source import Source, Weights
from flywheel.ir import Buffer, DType
from flywheel.models.formats import PLAIN, WeightFormats
from flywheel.models.quantise import is_part, kept_bytes
from flywheel.models.weights import WeightsOnRequest
from flywheel.plan import KernelVariant
from flywheel.plan.kernels import arch_name
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.abi import Layout
from flywheel.vm.gpu.driver import Gpu, LoadedKernel, load_variant
from flywheel.vm.gpu.granules import Granules
from flywheel.vm.gpu.loader import LoadedProgram
from flywheel.vm.gpu.nvrtc import compile_variant
from flywheel.vm.gpu.sources import SOURCES
from flywheel.vm.gpu.weights import ResidentWeights, needed_weights, put_weights
from flywheel.vm.pack import PackedProgram

_ALIGNMENT: Final = 16
"""Alignment of weights that are used in torch's memory: the width of the kernels' loads."""

_PARTS: Final = 3
"""Tensors that make up one weight: a quantised matrix, its scales and its zero points."""


_ROOM: Final = 0.9
"""The part of a GPU's memory that weights may take; caches, activations and kernels share the rest."""


def weights_for(source: Source, dtype: DType, seed: int, formats: WeightFormats, gpus: Sequence[Gpu]) -> Weights:
    """A model's weights on the first of its GPUs, whole if they fit there beside the packed part that each GPU holds.
    Otherwise they are made on request, if they are not quantised. Raises as `Source.weights`."""
    nbytes = kept_bytes(source.spec, formats, dtype)
    if source.scheme is None and formats == PLAIN and nbytes + nbytes / len(gpus) > _ROOM * gpus[0].total_bytes:
        return source.weights_on_request(dtype, seed, "cuda")
    return source.weights(dtype, seed, "cuda", formats)


def moved(weights: Weights, device: torch.device, dtype: DType) -> Weights:
    """Weights on a device, and converted to `dtype`, but for parts of quantised matrices; weights that are made on
    request as they are."""
    if isinstance(weights, WeightsOnRequest):
        return weights
    wanted = TORCH_DTYPES[dtype]
    return {
        key: tensor.detach().to(device, tensor.dtype if is_part(key) else wanted).contiguous()
        for key, tensor in weights.items()
    }


def granules_of(first: Granules | None, peers: Sequence[Gpu]) -> list[Granules]:
    """The granules of each GPU; empty for None."""
    found = [first, *[peer.granules() for peer in peers]] if first is not None else []
    known = [each for each in found if each is not None]
    return known if len(known) == len(found) else []


def torch_device(gpu: Gpu) -> torch.device:
    """The GPU as a torch device."""
    return torch.device("cuda", gpu.index)


class ModelOnGpu:
    """Kernels and weights of one model on one GPU, for its programs in `dtype`; of one rank's part of them, if there
    are several GPUs. Close it.

    Matrices are packed once, by the first program that multiplies by them.
    """

    def __init__(self, gpu: Gpu, dtype: DType) -> None:
        self.gpu: Final = gpu
        self.device: Final = torch_device(gpu)
        self.resident: Final = ResidentWeights(gpu, dtype)
        self._dtype = dtype
        self._kernels: dict[tuple[int, int, int, tuple[int, ...], bool, bool, tuple[str, ...], Path], LoadedKernel] = {}

    def close(self) -> None:
        """Free the packed weights."""
        self.resident.close()

    def finish_torch(self) -> None:
        """Wait for torch's pending operations, since the VM's stream does not wait for torch's."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def load(
        self,
        packed: PackedProgram,
        bound: Mapping[str, Tensor],
        caches: Mapping[str, int],
        *,
        trace: bool,
        sources: Path = SOURCES,
    ) -> LoadedProgram:
        """Load a program, for the kernel in `sources`. Its weights are `bound` by buffer, on any device; its `caches`
        are on this GPU. Raises ConfigError, WeightsError, KernelCompileError, GpuMemoryError and GpuFaultError as
        LoadedProgram and its weights do."""
        kernel = self._kernel(packed.variant, trace, sources)
        self._place_weights(packed, bound)
        return LoadedProgram(self.gpu, packed, kernel, self.resident, caches)

    def _kernel(self, variant: KernelVariant, trace: bool, sources: Path) -> LoadedKernel:
        sizes = variant.threads, variant.matrix_warps, variant.rows
        key = *sizes, variant.formats, trace, variant.ranked, variant.features, sources
        if key not in self._kernels:
            compiled = compile_variant(
                arch_name(self.gpu.sm_arch), variant.threads, self._dtype, matrix_warps=variant.matrix_warps,
                rows=variant.rows, formats=variant.formats, trace=trace, ranked=variant.ranked,
                features=variant.features, sources=sources,
            )  # fmt: skip
            self._kernels[key] = load_variant(self.gpu, compiled)
        return self._kernels[key]

    def _place_weights(self, packed: PackedProgram, bound: Mapping[str, Tensor]) -> None:
        """Place the weights. Row-major ones stay torch's if they are aligned and on this GPU; matrices are packed if
        they are not yet."""
        for name, buffer, layout in needed_weights(packed):
            if layout is not Layout.ROWS or isinstance(bound, WeightsOnRequest):
                continue
            tensor = bound[buffer.name]
            here = tensor.device == self.device and tensor.is_contiguous()
            if here and tensor.data_ptr() % _ALIGNMENT == 0:
                self.resident.borrow(name, tensor.data_ptr())
        held: deque[Tensor] = deque(maxlen=_PARTS)  # keeps them alive until they are put

        def find(buffer: Buffer) -> int:
            tensor = bound[buffer.name].to(self.device).contiguous()
            held.append(tensor)
            self.finish_torch()
            return tensor.data_ptr()

        put_weights(packed, self.resident, find)
