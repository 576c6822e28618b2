"""A GPU of this machine, through cuda.core: its memory, pinned words of the host, launches on one stream, and the check
before a launch; and several GPUs whose kernels may access each other's memory.

Torch may use the same GPU in the same process, since both use its primary context. Call `torch.cuda.synchronize()`
before a launch here reads what torch wrote.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from types import ModuleType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from flywheel.errors import ConfigError, GpuFaultError, GpuMemoryError, NoGpuError, TensorError
from flywheel.ir import GpuTarget
from flywheel.measure.tenants import held_by
from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu.contexts import ContextDriver
from flywheel.vm.gpu.devices import count_gpus, no_package
from flywheel.vm.gpu.granules import DriverGranules, Granules
from flywheel.vm.gpu.nvml import read_presence
from flywheel.vm.gpu.nvrtc import CompiledUnit, CompiledVariant


@dataclass(frozen=True, slots=True)
class HostWords:
    """uint32 words of pinned host memory, valid until `Gpu.free_host`. The stream writes them asynchronously."""

    address: int
    array: npt.NDArray[np.uint32]


class HostWord:
    """A uint32 of pinned host memory that kernels can read while they run."""

    def __init__(self, host_address: int, address: int) -> None:
        self._word = ctypes.c_uint32.from_address(host_address)
        self.address: Final = address

    @property
    def value(self) -> int:
        """The word. Running kernels see a write."""
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value


_SPIN_S: Final = 0.02
"""Wall seconds that `Gpu.wait` polls without a pause: a launch takes a few ms."""

_NAP_S: Final = 0.001

_PCI_BUS_ID_BYTES: Final = 32


@cache
def open_gpu(index: int = 0) -> Gpu:
    """The GPU that CUDA numbers `index`, made current in this thread. Raises NoGpuError, and GpuMemoryError if it has
    too little free memory to be used at all."""
    try:
        from cuda import core
        from cuda.bindings import driver
        from cuda.core._utils.cuda_utils import CUDAError  # in no public module
    except ImportError as error:
        raise no_package("cuda.core") from error
    try:
        return Gpu(index, core, driver, CUDAError)
    except (RuntimeError, ValueError, CUDAError, GpuFaultError) as error:  # no driver library, no such index, no device
        if "OUT_OF_MEMORY" in str(error):
            raise GpuMemoryError(f"GPU {index}: {_line(error)}: no memory is free for a context") from error
        if isinstance(error, GpuFaultError):
            raise
        raise NoGpuError(f"GPU {index}: no such NVIDIA GPU is here: {_line(error)}") from error


@dataclass(frozen=True, slots=True)
class Memory:
    """A block of device memory, valid until `Gpu.free`."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class LoadedKernel:
    """A variant on the GPU, with its entries as cuda.core kernels."""

    variant: CompiledVariant
    megakernel: Any
    pack_matrix: Any
    advance_rows: Any


class Gpu:
    """A GPU and its one stream, which orders all work.

    Methods raise GpuFaultError where CUDA reports an error. After that, nothing on this GPU works in this process.
    """

    def __init__(self, index: int, core: ModuleType, driver: ModuleType, error: type[Exception]) -> None:
        self.index: Final = index
        self._core, self._error = core, error
        self._cuda: ModuleType | ContextDriver = driver
        device = core.Device(index)
        device.set_current()
        self._context = self._checked("cuCtxGetCurrent", driver.cuCtxGetCurrent())
        self._handle = self._checked("cuDeviceGet", driver.cuDeviceGet(index))
        self._stream = device.create_stream()
        properties, capability = device.properties, device.compute_capability
        self.name: Final[str] = device.name
        address = self._checked("cuDeviceGetPCIBusId", driver.cuDeviceGetPCIBusId(_PCI_BUS_ID_BYTES, self._handle))
        self.pci_bus_id: Final[str] = address.partition(b"\0")[0].decode()
        self.sm_arch: Final[int] = 10 * capability.major + capability.minor
        self.num_sms: Final[int] = properties.multiprocessor_count
        self.smem_optin_bytes: Final[int] = properties.max_shared_memory_per_block_optin
        self.l2_bytes: Final[int] = properties.l2_cache_size
        self.total_bytes: Final[int] = self._checked("cuMemGetInfo", driver.cuMemGetInfo())[1]
        major, minor = divmod(self._checked("cuDriverGetVersion", driver.cuDriverGetVersion()) // 10, 100)
        self.cuda_version: Final = f"{major}.{minor}"
        self.abort_flag: Final = self._host_word()
        self.uploaded_bytes = 0
        self.broken = False

    # Other GPUs.

    def reaches(self, other: Gpu) -> bool:
        """Whether kernels on this GPU can be given access to the other GPU's memory."""
        can = self._cuda.cuDeviceCanAccessPeer(self._handle, other._handle)
        return bool(self._checked("cuDeviceCanAccessPeer", can))

    def join(self, other: Gpu) -> None:
        """Give kernels on this GPU access to the other's memory.

        From then on, calls of this object do not depend on the thread's current context.
        """
        if not isinstance(self._cuda, ContextDriver):
            self._cuda = ContextDriver(self._cuda, self._context)
        returned = self._cuda.cuCtxEnablePeerAccess(other._context, 0)
        if returned[0] != self._cuda.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:  # torch may have enabled it
            self._checked("cuCtxEnablePeerAccess", returned)

    def make_current(self) -> None:
        """Make this GPU the thread's current one, for libraries that use the current GPU."""
        self._core.Device(self.index).set_current()

    def follow(self, other: Gpu) -> None:
        """Make all later work of the stream wait for all work so far of another GPU's stream."""
        with other._reported("record"):
            event = other._stream.record(options=self._core.EventOptions(timing_enabled=False))
        with self._reported("wait"):
            self._stream.wait(event)

    # Memory.

    def alloc(self, nbytes: int) -> Memory:
        """New memory of `nbytes`, aligned to 256 bytes, with arbitrary content. Raises GpuMemoryError."""
        result, pointer = self._cuda.cuMemAlloc(max(nbytes, 1))
        if result == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise GpuMemoryError(f"GPU memory: {nbytes:,} bytes requested, {self.room()}")
        return Memory(int(self._checked("cuMemAlloc", (result, pointer))), nbytes)

    def free(self, memory: Memory) -> None:
        """Give memory back once all work enqueued so far is done. Do nothing where the GPU is broken."""
        if not self.broken:
            self._checked("cuMemFree", self._cuda.cuMemFree(memory.address))

    def free_bytes(self) -> int:
        """Bytes of the GPU's memory that are free now."""
        return int(self._checked("cuMemGetInfo", self._cuda.cuMemGetInfo())[0])

    def room(self) -> str:
        """How much memory is free, and who holds the rest, in words."""
        return f"{self.free_bytes():,} of {self.total_bytes:,} are free{held_by(read_presence(self.pci_bus_id))}"

    def granules(self) -> Granules | None:
        """Memory to map to reserved addresses; None where the driver does not support that."""
        kind = self._cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._checked("cuDeviceGetAttribute", self._cuda.cuDeviceGetAttribute(kind, self._handle)):
            return None
        return DriverGranules(self._cuda, self._checked, self._handle, self.free_bytes)

    def upload(self, memory: Memory, array: npt.NDArray[Any], offset: int = 0) -> None:
        """Copy an array's elements, row-major, to byte `offset`. The copy is complete on return.

        Raises TensorError beyond the end of `memory`.
        """
        elements = np.ascontiguousarray(array)
        _check_range("upload", memory, offset, elements.nbytes)
        if elements.nbytes:
            copy = self._cuda.cuMemcpyHtoDAsync
            self._checked(
                "upload", copy(memory.address + offset, elements.ctypes.data, elements.nbytes, self._stream.handle)
            )
            self.sync()
            self.uploaded_bytes += elements.nbytes

    def download(
        self, memory: Memory, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0
    ) -> npt.NDArray[Any]:
        """The array at byte `offset`, read once all work enqueued so far is done.

        Raises TensorError beyond the end of `memory`.
        """
        array = np.empty(shape, dtype)
        _check_range("download", memory, offset, array.nbytes)
        if array.nbytes:
            copy = self._cuda.cuMemcpyDtoHAsync
            self._checked(
                "download", copy(array.ctypes.data, memory.address + offset, array.nbytes, self._stream.handle)
            )
            self.sync()
        return array

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Copy `nbytes` between device addresses, in stream order."""
        if nbytes:
            self._checked("copy", self._cuda.cuMemcpyDtoDAsync(target, source, nbytes, self._stream.handle))

    def fill(self, memory: Memory, byte: int) -> None:
        """Set every byte of `memory` to `byte`, in stream order."""
        if memory.nbytes:
            self._checked("fill", self._cuda.cuMemsetD8Async(memory.address, byte, memory.nbytes, self._stream.handle))

    def alloc_host(self, count: int) -> HostWords:
        """`count` new pinned words, with arbitrary content, for `fetch` and `send`."""
        nbytes = count * ctypes.sizeof(ctypes.c_uint32)
        address = int(self._checked("cuMemHostAlloc", self._cuda.cuMemHostAlloc(nbytes, 0)))
        words = (ctypes.c_uint32 * count).from_address(address)
        return HostWords(address, np.ctypeslib.as_array(words))

    def free_host(self, words: HostWords) -> None:
        """Give pinned words back. The stream must have finished with them. Do nothing where the GPU is broken."""
        if not self.broken:
            self._checked("cuMemFreeHost", self._cuda.cuMemFreeHost(words.address))

    def fetch(self, words: HostWords, index: int, source: int, count: int) -> None:
        """Copy `count` words from device address `source` to `words.array`, from `index` on, in stream order.

        An event that is recorded after this call says when they have arrived.
        """
        target = words.address + index * ctypes.sizeof(ctypes.c_uint32)
        size = count * ctypes.sizeof(ctypes.c_uint32)
        self._checked("fetch", self._cuda.cuMemcpyDtoHAsync(target, source, size, self._stream.handle))

    def send(self, target: int, words: HostWords, index: int, count: int) -> None:
        """Copy `count` words of `words.array`, from `index` on, to device address `target`, in stream order.

        The words must not change until the stream has made the copy.
        """
        size = ctypes.sizeof(ctypes.c_uint32)
        source = words.address + index * size
        self._checked("send", self._cuda.cuMemcpyHtoDAsync(target, source, count * size, self._stream.handle))

    def _host_word(self) -> HostWord:
        flags = self._cuda.CU_MEMHOSTALLOC_DEVICEMAP | self._cuda.CU_MEMHOSTALLOC_PORTABLE
        host = int(self._checked("cuMemHostAlloc", self._cuda.cuMemHostAlloc(ctypes.sizeof(ctypes.c_uint32), flags)))
        word = HostWord(
            host, int(self._checked("cuMemHostGetDevicePointer", self._cuda.cuMemHostGetDevicePointer(host, 0)))
        )
        word.value = 0
        return word

    # Launches and time.

    @property
    def stream_handle(self) -> int:
        """The stream as a CUstream, for libraries that enqueue on it."""
        return int(self._stream.handle)

    def load(self, unit: CompiledUnit) -> dict[str, Any]:
        """The entry functions of a compiled unit by name. Each may use all the shared memory that a block can have.

        Raises ConfigError where it was compiled for another architecture.
        """
        if unit.arch != arch_name(self.sm_arch):
            raise ConfigError(f"kernel for {unit.arch}: {self.name} needs {arch_name(self.sm_arch)}")
        with self._reported("load kernel"):
            code = self._core.ObjectCode.from_cubin(unit.cubin)
            kernels = {name: code.get_kernel(name) for name in unit.entries}
        attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        allow = self._cuda.cuKernelSetAttribute
        for name, kernel in kernels.items():
            room = self.smem_optin_bytes - unit.entries[name].static_shared_bytes
            self._checked("cuKernelSetAttribute", allow(attribute, room, kernel.handle, self._handle))
        if isinstance(self._cuda, ContextDriver):
            self._load_now(kernels)
        return kernels

    def _load_now(self, kernels: Mapping[str, Any]) -> None:
        """Load code before the first launch: CUDA may wait for running kernels while it loads, and a kernel of one GPU
        of several runs until those of the others do."""
        for kernel in kernels.values():
            function = self._checked("cuKernelGetFunction", self._cuda.cuKernelGetFunction(kernel.handle))
            with suppress(RuntimeError):  # drivers before CUDA 12.4 do not have it
                self._checked("cuFuncLoad", self._cuda.cuFuncLoad(function))

    def launch(
        self,
        kernel: Any,
        grid: int,
        block: int,
        args: tuple[Any, ...],
        *,
        smem_bytes: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Enqueue a kernel of `grid` blocks of `block` threads. In `args` ints are addresses, scalars are ctypes."""
        config = self._core.LaunchConfig(grid=grid, block=block, shmem_size=smem_bytes, is_cooperative=cooperative)
        with self._reported("launch"):
            self._core.launch(self._stream, config, kernel, *args)

    def coresident_blocks(self, kernel: Any, block: int, smem_bytes: int) -> int:
        """The number of a kernel's blocks, of `block` threads, that the whole GPU holds at once."""
        with self._reported("occupancy"):
            per_sm = kernel.occupancy.max_active_blocks_per_multiprocessor(block, smem_bytes)
        return int(per_sm) * self.num_sms

    def record(self) -> Any:
        """Enqueue an event behind all work so far, for `wait` and `elapsed_us`."""
        with self._reported("record"):
            return self._stream.record(options=self._core.EventOptions(timing_enabled=True))

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Time in us on the GPU between two events that it has passed."""
        with self._reported("elapsed time"):
            return float(end - start) * 1e3

    def wait(self, event: Any, limit_s: float) -> bool:
        """Wait until the GPU passes an event. Returns False where it does not within `limit_s` seconds."""
        with self._reported("launch"):
            return _poll(lambda: bool(event.is_done), limit_s)

    def sync(self) -> None:
        """Wait for all work on the stream, however long it takes."""
        with self._reported("synchronize"):
            self._stream.sync()

    def _checked(self, what: str, returned: tuple[Any, ...]) -> Any:
        """The value or values that a driver call returned behind its status."""
        result, *values = returned
        if result != self._cuda.CUresult.CUDA_SUCCESS:
            self.broken = True
            raise GpuFaultError(f"GPU: {what}: {result.name}")
        return values[0] if len(values) == 1 else tuple(values)

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        context: AbstractContextManager[None] = nullcontext()
        if isinstance(self._cuda, ContextDriver):
            context = self._cuda.current()
        try:
            with context:
                yield
        except self._error as error:
            self.broken = True
            raise GpuFaultError(f"GPU: {what}: {_line(error)}") from error


def load_variant(gpu: Gpu, variant: CompiledVariant) -> LoadedKernel:
    """Put a variant on the GPU. Raises ConfigError where it was compiled for another architecture."""
    kernels = gpu.load(variant)
    return LoadedKernel(variant, kernels["megakernel"], kernels["pack_matrix"], kernels["advance_rows"])


def check_fit(kernel: LoadedKernel, gpu: Gpu, target: GpuTarget, smem_bytes: int) -> None:
    """Check that a kernel can be launched with one block on each SM of `target`, all resident at once.

    Each block has `smem_bytes` of dynamic shared memory. Raises ConfigError, with the numbers, where they do not fit.
    """
    if target.sm_arch != gpu.sm_arch:
        raise ConfigError(f"target {target.name} has sm_arch {target.sm_arch}, {gpu.name} has {gpu.sm_arch}")
    static = kernel.variant.usage.static_shared_bytes
    if smem_bytes + static > gpu.smem_optin_bytes:
        raise ConfigError(
            f"shared memory: {smem_bytes} bytes and {static} static ones exceed the {gpu.smem_optin_bytes} "
            f"that a block can opt into on {gpu.name}"
        )
    room = gpu.coresident_blocks(kernel.megakernel, kernel.variant.threads, smem_bytes)
    if target.num_sms > room:
        raise ConfigError(
            f"grid of {target.num_sms} blocks: {gpu.name} runs {room} at once, of {kernel.variant.threads} threads "
            f"with {kernel.variant.usage.registers} registers and {smem_bytes} bytes of shared memory"
        )


def _poll(done: Callable[[], bool], limit_s: float) -> bool:
    start = time.monotonic()
    while not done():
        waited = time.monotonic() - start
        if waited > limit_s:
            return done()
        if waited > _SPIN_S:
            time.sleep(_NAP_S)
    return True


def _check_range(what: str, memory: Memory, offset: int, nbytes: int) -> None:
    if not 0 <= offset <= offset + nbytes <= memory.nbytes:
        raise TensorError(f"{what}: {nbytes} bytes at {offset} exceed {memory.nbytes} bytes of memory")


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def open_gpus(count: int) -> tuple[Gpu, ...]:
    """The GPUs that CUDA numbers from 0 to `count` - 1. The first one becomes current in this thread.

    Raises NoGpuError where there are fewer, where they are of different kinds, and where one cannot access another's
    memory; the message names the pair.
    """
    if count == 1:
        return (open_gpu(),)
    there = count_gpus()
    if there < count:
        raise NoGpuError(f"{count} ranks need {count} GPUs: {there or 'none'} {'is' if there == 1 else 'are'} here")
    gpus = tuple([open_gpu(index) for index in range(count)])
    check_alike(gpus)
    for one, other in permutations(gpus, 2):
        if not one.reaches(other):
            raise NoGpuError(
                f"GPU {one.index} ({one.pci_bus_id}) has no access to the memory of GPU {other.index} "
                f"({other.pci_bus_id}): {count} ranks need links or PCIe peer access between all pairs"
            )
    for one, other in permutations(gpus, 2):
        one.join(other)
    gpus[0].make_current()
    return gpus


def check_alike(gpus: Sequence[Gpu]) -> None:
    """Raise NoGpuError where a GPU is of another kind than the first: each rank's part is made for the same kind."""
    kinds = [(gpu.name, gpu.num_sms, gpu.smem_optin_bytes) for gpu in gpus]
    for gpu, kind in zip(gpus, kinds, strict=True):
        if kind != kinds[0]:
            first, other = (f"{name} with {sms} SMs" for name, sms, _ in (kinds[0], kind))
            raise NoGpuError(f"GPU {gpu.index} is {other}, GPU {gpus[0].index} {first}: ranks need GPUs of one kind")
