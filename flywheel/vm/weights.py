"""Weights on the GPU, in the orders that kernels read them in, once each however many programs share them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import numpy.typing as npt

from flywheel.errors import WeightsError
from flywheel.ir import DType
from flywheel.vm.abi import FRAGMENT_ROWS, Layout
from flywheel.vm.driver import Gpu, Memory
from flywheel.vm.elements import stored
from flywheel.vm.nvrtc import arch_name, compile_variant

FRAGMENT_ELEMENTS: Final = FRAGMENT_ROWS * FRAGMENT_ROWS

_PACK_THREADS: Final = 320
"""Threads of the variant whose `pack_matrix` packs, and of its blocks: the commonest one, so that it is at hand."""

_PACK_BLOCKS_PER_SM: Final = 6


def fragments_bytes(shape: Sequence[int], dtype: DType) -> int:
    """Bytes of a matrix, all dimensions but the last being rows, in Layout.FRAGMENTS."""
    rows, width = prod(shape[:-1]), shape[-1]
    return dtype.nbytes(-(-rows // FRAGMENT_ROWS) * -(-width // FRAGMENT_ROWS) * FRAGMENT_ELEMENTS)


class ResidentWeights:
    """Device addresses of weights by name and layout, for programs whose float type is `dtype`."""

    def __init__(self, gpu: Gpu, dtype: DType, cache_dir: Path | None = None) -> None:
        self._gpu, self._dtype, self._cache_dir = gpu, dtype, cache_dir
        self._addresses: dict[tuple[str, Layout], int] = {}
        self._owned: list[Memory] = []
        self._pack: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back the memory that `put` took."""
        while self._owned:
            self._gpu.free(self._owned.pop())
        self._addresses.clear()

    def borrow(self, name: str, address: int) -> None:
        """Use a row-major tensor where it lies on the device; its owner keeps it there until `close`."""
        self._addresses[name, Layout.ROWS] = address

    def put(self, name: str, source: int | npt.NDArray[Any], shape: Sequence[int], dtype: DType, layout: Layout) -> int:
        """Copy a row-major tensor, at a device address or in an array as `elements.stored` takes it, into `layout`.

        Returns its address; nothing moves where it is there already. Raises WeightsError for fragments of another
        element type than the programs', TensorError for another array than `shape` and `dtype` say, GpuMemoryError and,
        where the packing kernel cannot be compiled, KernelCompileError.
        """
        if (name, layout) in self._addresses:
            return self._addresses[name, layout]
        array = None if isinstance(source, int) else stored(source, dtype, tuple(shape), name)
        if layout is Layout.FRAGMENTS:
            address = self._put_fragments(name, source if array is None else array, shape, dtype)
        else:
            memory = self._take(dtype.nbytes(prod(shape)))
            address = memory.address
            if array is None:
                assert isinstance(source, int)
                self._gpu.copy(address, source, memory.nbytes)
                self._gpu.sync()
            else:
                self._gpu.upload(memory, array)
        self._addresses[name, layout] = address
        return address

    def get(self, name: str, layout: Layout) -> int:
        """The address of a weight. Raises WeightsError where it was not put there in that layout."""
        if (name, layout) not in self._addresses:
            raise WeightsError(f"weight {name}: not on the GPU as {layout.name}")
        return self._addresses[name, layout]

    def _put_fragments(self, name: str, source: int | npt.NDArray[Any], shape: Sequence[int], dtype: DType) -> int:
        if dtype is not self._dtype:
            raise WeightsError(f"weight {name}: {dtype.name} cannot be multiplied in programs of {self._dtype.name}")
        packed = self._take(fragments_bytes(shape, dtype))
        if isinstance(source, int):
            self._run_pack(source, packed, shape)
            return packed.address
        rows = self._gpu.alloc(source.nbytes)
        try:
            self._gpu.upload(rows, source)
            self._run_pack(rows.address, packed, shape)
        finally:
            self._gpu.free(rows)
        return packed.address

    def _run_pack(self, source: int, packed: Memory, shape: Sequence[int]) -> None:
        if self._pack is None:
            variant = compile_variant(arch_name(self._gpu.sm_arch), _PACK_THREADS, self._dtype, self._cache_dir)
            self._pack = self._gpu.load(variant)["pack_matrix"]
        rows, width = prod(shape[:-1]), shape[-1]
        args = (source, packed.address, ctypes.c_int32(rows), ctypes.c_int32(width))
        self._gpu.launch(self._pack, _PACK_BLOCKS_PER_SM * self._gpu.num_sms, _PACK_THREADS, args)
        self._gpu.sync()  # the source's owner may take it back

    def _take(self, nbytes: int) -> Memory:
        memory = self._gpu.alloc(nbytes)
        self._owned.append(memory)
        return memory
