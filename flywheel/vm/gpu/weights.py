"""Weights on the GPU, in the layouts that kernels read. Each is stored once, however many programs share it.
And which of them a packed program needs, and how they get there."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final, Self

import numpy.typing as npt

from flywheel.errors import WeightsError
from flywheel.ir import Buffer, BufferKind, DType
from flywheel.plan.formats import coded_bytes
from flywheel.plan.kernels import arch_name
from flywheel.plan.staging import FRAGMENT_ROWS
from flywheel.plan.step import ABSENT, MatrixCoding
from flywheel.vm.abi import Layout
from flywheel.vm.elements import stored
from flywheel.vm.gpu.driver import Gpu, Memory
from flywheel.vm.gpu.nvrtc import CompiledVariant, compile_variant
from flywheel.vm.pack import PackedProgram

FRAGMENT_ELEMENTS: Final = FRAGMENT_ROWS * FRAGMENT_ROWS

_PACK_THREADS: Final = 320
"""Block size of the variant that packs. It is the commonest size, so the cache mostly has that variant."""

_PACK_BLOCKS_PER_SM: Final = 6


def fragments_bytes(shape: Sequence[int], dtype: DType) -> int:
    """Bytes of a matrix in Layout.FRAGMENTS. All dimensions of `shape` but the last count as rows."""
    rows, width = prod(shape[:-1]), shape[-1]
    return dtype.nbytes(-(-rows // FRAGMENT_ROWS) * -(-width // FRAGMENT_ROWS) * FRAGMENT_ELEMENTS)


class ResidentWeights:
    """Device addresses of weights by name and layout, for programs whose float type is `dtype`.

    Kernels of `packing` pack the weights. Without it, a variant is compiled for that, in `cache_dir`.
    """

    def __init__(
        self, gpu: Gpu, dtype: DType, cache_dir: Path | None = None, packing: CompiledVariant | None = None
    ) -> None:
        self._gpu, self._dtype, self._cache_dir, self._packing = gpu, dtype, cache_dir, packing
        self._addresses: dict[tuple[str, Layout], int] = {}
        self._owned: list[Memory] = []
        self._kernels: dict[str, Any] = {}
        self._threads = _PACK_THREADS if packing is None else packing.threads

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
        """Use a row-major tensor where it lies on the device. Its owner must keep it there until `close`."""
        self._addresses[name, Layout.ROWS] = address

    def holds(self, name: str, layout: Layout) -> bool:
        """Whether a weight is there in that layout."""
        return (name, layout) in self._addresses

    def put(self, name: str, source: int | npt.NDArray[Any], shape: Sequence[int], dtype: DType, layout: Layout) -> int:
        """Copy a row-major tensor into `layout`, and return its device address.

        `source` is a device address, or an array that `elements.stored` takes. A weight that is there already is not
        copied again. Raises WeightsError for fragments of another element type than the programs', TensorError for an
        array that is not of `shape` and `dtype`, GpuMemoryError, and KernelCompileError of the packing kernel.
        """
        if (name, layout) in self._addresses:
            return self._addresses[name, layout]
        array = None if isinstance(source, int) else stored(source, dtype, tuple(shape), name)
        if layout is Layout.FRAGMENTS:
            self._put_fragments(name, source if array is None else array, shape, dtype)
            return self._addresses[name, layout]
        with self._new(name, layout, dtype.nbytes(prod(shape))) as memory:
            if array is None:
                assert isinstance(source, int)
                self._gpu.copy(memory.address, source, memory.nbytes)
                self._gpu.sync()
            else:
                self._gpu.upload(memory, array)
        return memory.address

    def put_units(self, name: str, coded: MatrixCoding, parts: Sequence[tuple[int | npt.NDArray[Any], Buffer]]) -> int:
        """Put a quantised matrix, its scales and its zero points, if any, as Layout.UNITS; return the device address.

        `parts` are (source, buffer) pairs; `put` says what a source is. Raises as `put` does.
        """
        key = name, Layout.UNITS
        if key not in self._addresses:
            matrix, scales = parts[0][1], parts[1][1]
            nbytes = coded_bytes(coded.coding, tuple(matrix.shape))
            with self._new(*key, nbytes) as packed, ExitStack() as held:
                sources = [self._on_gpu(source, buffer, held) for source, buffer in parts]
                numbers = (
                    prod(matrix.shape[:-1]), matrix.shape[-1], coded.group, coded.rows_per_scale, int(scales.dtype),
                    coded.coding.number,
                )  # fmt: skip
                addresses = (*sources, *[0] * (3 - len(sources)), packed.address)
                self._run("pack_codes", (*addresses, *map(ctypes.c_int32, numbers)))
        return self._addresses[key]

    def put_row_scales(self, name: str, source: int | npt.NDArray[Any], buffer: Buffer, rows: int, shared: int) -> int:
        """Put scales as Layout.ROW_SCALES; return their device address. Each holds for `shared` of `rows` rows."""
        key = name, Layout.ROW_SCALES
        if key not in self._addresses:
            with self._new(*key, DType.F32.nbytes(rows)) as expanded, ExitStack() as held:
                numbers = map(ctypes.c_int32, (rows, shared, int(buffer.dtype)))
                self._run("expand_scales", (self._on_gpu(source, buffer, held), expanded.address, *numbers))
        return self._addresses[key]

    def _on_gpu(self, source: int | npt.NDArray[Any], buffer: Buffer, held: ExitStack) -> int:
        """The device address of a source. A copy made for it lives as long as `held`."""
        if isinstance(source, int):
            return source
        return self._staged(stored(source, buffer.dtype, tuple(buffer.shape), buffer.name), held)

    def _staged(self, array: npt.NDArray[Any], held: ExitStack) -> int:
        """The device address of a copy that lives as long as `held`."""
        memory = self._gpu.alloc(array.nbytes)
        held.callback(self._gpu.free, memory)
        self._gpu.upload(memory, array)
        return memory.address

    def get(self, name: str, layout: Layout) -> int:
        """The address of a weight. Raises WeightsError where it was not put there in that layout."""
        if (name, layout) not in self._addresses:
            raise WeightsError(f"weight {name}: not on the GPU as {layout.name}")
        return self._addresses[name, layout]

    def _put_fragments(self, name: str, source: int | npt.NDArray[Any], shape: Sequence[int], dtype: DType) -> None:
        if dtype is not self._dtype:
            raise WeightsError(f"weight {name}: {dtype.name} cannot be multiplied in programs of {self._dtype.name}")
        numbers = ctypes.c_int32(prod(shape[:-1])), ctypes.c_int32(shape[-1])
        with self._new(name, Layout.FRAGMENTS, fragments_bytes(shape, dtype)) as packed, ExitStack() as held:
            address = source if isinstance(source, int) else self._staged(source, held)
            self._run("pack_matrix", (address, packed.address, *numbers))

    def _run(self, name: str, args: tuple[Any, ...]) -> None:
        if not self._kernels:
            variant = self._packing or compile_variant(
                arch_name(self._gpu.sm_arch), _PACK_THREADS, self._dtype, self._cache_dir
            )
            self._kernels = dict(self._gpu.load(variant))
        self._gpu.launch(self._kernels[name], _PACK_BLOCKS_PER_SM * self._gpu.num_sms, self._threads, args)
        self._gpu.sync()  # from now on the source's owner may free it

    @contextmanager
    def _new(self, name: str, layout: Layout, nbytes: int) -> Iterator[Memory]:
        """Memory for a weight that the block fills. If the block fails, the memory is free again and the weight is not
        there, so that a retry takes no more than the first try."""
        memory = self._gpu.alloc(nbytes)
        with ExitStack() as undo:
            undo.callback(self._gpu.free, memory)
            yield memory
            undo.pop_all()
        self._owned.append(memory)
        self._addresses[name, layout] = memory.address


WEIGHT_KINDS: Final = (BufferKind.WEIGHT, BufferKind.CONST)


def needed_weights(packed: PackedProgram) -> Iterator[tuple[str, Buffer, Layout]]:
    """(name, buffer, layout) of each weight that a LoadedProgram looks up in its ResidentWeights."""
    for row, buffer in enumerate(packed.program.buffers):
        name, layout = weight_key(packed, row)
        if buffer.kind in WEIGHT_KINDS and layout is not Layout.IN_UNITS:
            yield name, buffer, layout


def put_weights(
    packed: PackedProgram, weights: ResidentWeights, find: Callable[[Buffer], int | npt.NDArray[Any]]
) -> None:
    """Put each weight that a LoadedProgram looks up into `weights`, unless it is there already.

    `find` returns a buffer's elements, row-major, in a form that `ResidentWeights.put` takes; it is asked only for
    what is not there. Raises as `put` does.
    """
    buffers = packed.program.buffers
    scaled = {coded.scales: row for row, coded in packed.coded.items()}
    for row, buffer in enumerate(buffers):
        if buffer.kind not in WEIGHT_KINDS:
            continue
        name, layout = weight_key(packed, row)
        if layout is Layout.IN_UNITS or weights.holds(name, layout):
            continue
        if layout is Layout.UNITS:
            coded = packed.coded[row]
            rows = [each for each in (row, coded.scales, coded.zeros) if each != ABSENT]
            weights.put_units(name, coded, [(find(buffers[each]), buffers[each]) for each in rows])
        elif layout is Layout.ROW_SCALES:
            matrix = scaled[row]
            count = prod(buffers[matrix].shape[:-1])
            weights.put_row_scales(name, find(buffer), buffer, count, packed.coded[matrix].rows_per_scale)
        else:
            weights.put(name, find(buffer), tuple(buffer.shape), buffer.dtype, layout)


def weight_key(packed: PackedProgram, row: int) -> tuple[str, Layout]:
    """The name and layout of a weight in ResidentWeights, by the row of its buffer."""
    buffer = packed.program.buffers[row]
    return buffer.source or buffer.name, Layout(int(packed.buffers["layout"][row]))
