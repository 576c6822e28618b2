"""Several GPUs of one process, on a driver that only keeps account."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flywheel.cli.exits import NO_GPU, exit_code
from flywheel.errors import GpuFaultError, GpuMemoryError, NoGpuError
from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu import driver
from flywheel.vm.gpu.driver import Gpu, open_gpus
from flywheel.vm.gpu.nvrtc import CompiledUnit, EntryUsage

OK = SimpleNamespace(name="CUDA_SUCCESS")
ENABLED = SimpleNamespace(name="CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED")
FULL = SimpleNamespace(name="CUDA_ERROR_OUT_OF_MEMORY")
GONE = SimpleNamespace(name="CUDA_ERROR_CONTEXT_IS_DESTROYED")


class Machine:
    """cuda.core and cuda.bindings.driver of some GPUs; `stack` are the contexts of this thread, innermost last.

    `enabled` are pairs of contexts with peer access, `allocated` the contexts in which memory was given out.
    """

    CU_MEMHOSTALLOC_DEVICEMAP = 2
    CU_MEMHOSTALLOC_PORTABLE = 1
    CUresult = SimpleNamespace(
        CUDA_SUCCESS=OK, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED=ENABLED, CUDA_ERROR_OUT_OF_MEMORY=FULL
    )

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.stack = ["none"]
        self.enabled: list[tuple[str, str]] = []
        self.allocated: list[str] = []
        self.loaded: list[str] = []
        self.unlinked: set[tuple[int, int]] = set()
        self.full = self.gone = False
        self.words: list[Any] = []

    def Device(self, index: int) -> Any:
        def set_current() -> None:
            self.stack[-1] = f"context {index}"

        return SimpleNamespace(
            set_current=set_current,
            create_stream=lambda: SimpleNamespace(handle=index, sync=lambda: self.check(index)),
            properties=SimpleNamespace(
                multiprocessor_count=132, max_shared_memory_per_block_optin=232448, l2_cache_size=1 << 20
            ),
            compute_capability=SimpleNamespace(major=9, minor=0),
            name=self.names[index],
        )

    def check(self, index: int) -> None:
        assert self.stack[-1] == f"context {index}"

    def cuDeviceGet(self, index: int) -> tuple[Any, int]:
        return OK, index

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[Any, bytes]:
        return OK, f"0000:0{device}:00.0".encode() + b"\0"

    def cuCtxGetCurrent(self) -> tuple[Any, str]:
        return OK, self.stack[-1]

    def cuCtxPushCurrent(self, context: str) -> tuple[Any]:
        if self.gone:
            return (GONE,)
        self.stack.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, str]:
        return OK, self.stack.pop()

    def cuMemGetInfo(self) -> tuple[Any, int, int]:
        return OK, 1 << 20, 1 << 30

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return OK, 13000

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, int]:
        import ctypes

        self.words.append((ctypes.c_uint32 * nbytes)())
        return OK, ctypes.addressof(self.words[-1])

    def cuMemHostGetDevicePointer(self, host: int, flags: int) -> tuple[Any, int]:
        return OK, host

    def cuDeviceCanAccessPeer(self, one: int, other: int) -> tuple[Any, int]:
        return OK, int((one, other) not in self.unlinked)

    def cuCtxEnablePeerAccess(self, other: str, flags: int) -> tuple[Any]:
        pair = self.stack[-1], other
        if pair in self.enabled:
            return (ENABLED,)
        self.enabled.append(pair)
        return (OK,)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, int]:
        self.allocated.append(self.stack[-1])
        return (FULL, 0) if self.full else (OK, 4096)


    # Code: kernels of one unit, `loaded` in the context in which each was.

    ObjectCode = SimpleNamespace(
        from_cubin=lambda cubin: SimpleNamespace(get_kernel=lambda name: SimpleNamespace(handle=name))
    )
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES=8)

    def cuKernelSetAttribute(self, attribute: int, value: int, kernel: str, device: int) -> tuple[Any]:
        return (OK,)

    def cuKernelGetFunction(self, kernel: str) -> tuple[Any, str]:
        return OK, f"{kernel} of {self.stack[-1]}"

    def cuFuncLoad(self, function: str) -> tuple[Any]:
        self.loaded.append(function)
        return (OK,)


Open = Callable[..., tuple[Machine, Callable[[int], tuple[Gpu, ...]]]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """A machine of GPUs of these names, and what opens them."""

    def make(*names: str) -> tuple[Machine, Callable[[int], tuple[Gpu, ...]]]:
        machine = Machine(list(names))
        made: dict[int, Gpu] = {}

        def open_gpu(index: int = 0) -> Gpu:
            if index not in made:
                made[index] = Gpu(index, machine, machine, KeyError)  # type: ignore[arg-type]
            return made[index]

        monkeypatch.setattr(driver, "open_gpu", open_gpu)
        monkeypatch.setattr(driver, "count_gpus", lambda: len(names))
        return machine, open_gpus

    return make


def test_gpus_of_one_kind_reach_each_other_both_ways_and_the_first_is_current(opened: Open) -> None:
    machine, open_all = opened("H200", "H200", "H200")
    gpus = open_all(3)
    assert [gpu.index for gpu in gpus] == [0, 1, 2]
    named = [f"context {index}" for index in range(3)]
    assert sorted(machine.enabled) == sorted((a, b) for a in named for b in named if a != b)
    assert machine.stack == ["context 0"]
    assert open_all(3) == gpus  # access that is there already is none of CUDA's errors
    assert len(machine.enabled) == 6


def test_each_gpu_works_in_its_own_context_whatever_is_current(opened: Open) -> None:
    machine, open_all = opened("H200", "H200")
    gpus = open_all(2)
    machine.stack[-1] = "torch's"
    for gpu in (gpus[1], gpus[0], gpus[1]):
        gpu.alloc(64)
        gpu.sync()
    assert machine.allocated == ["context 1", "context 0", "context 1"]
    assert machine.stack == ["torch's"]


def test_a_call_that_fails_leaves_the_thread_its_context(opened: Open) -> None:
    machine, open_all = opened("H200", "H200")
    gpus = open_all(2)
    machine.full = True
    with pytest.raises(GpuMemoryError):
        gpus[1].alloc(64)
    assert machine.stack == ["context 0"]
    machine.gone = True
    with pytest.raises(GpuFaultError, match=r"^GPU: cuCtxPushCurrent: CUDA_ERROR_CONTEXT_IS_DESTROYED$"):
        gpus[1].sync()


def test_code_of_several_gpus_is_loaded_before_any_launch_and_of_one_when_it_is_launched(opened: Open) -> None:
    machine, open_all = opened("H200", "H200")
    unit = CompiledUnit(arch_name(90), "", b"", "", {"megakernel": EntryUsage(32, 0, 0, 0)})
    for gpu in open_all(2):
        gpu.load(unit)
    assert machine.loaded == ["megakernel of context 0", "megakernel of context 1"]
    machine, open_all = opened("H200")
    open_all(1)[0].load(unit)
    assert not machine.loaded


def test_one_gpu_is_opened_as_ever(opened: Open) -> None:
    machine, open_all = opened("H200", "L4")
    (gpu,) = open_all(1)
    machine.stack[-1] = "torch's"
    gpu.alloc(64)
    assert machine.allocated == ["torch's"]
    assert not machine.enabled


@pytest.mark.parametrize(
    ("names", "count", "unlinked", "line"),
    [
        (["H200"], 2, None, "2 ranks need 2 GPUs: 1 is here"),
        (["H200"] * 3, 4, None, "4 ranks need 4 GPUs: 3 are here"),
        ([], 2, None, "2 ranks need 2 GPUs: none are here"),
        (["H200", "H200", "L4"], 3, None,
         "GPU 2 is L4 with 132 SMs, GPU 0 H200 with 132 SMs: ranks need GPUs of one kind"),
        (["H200"] * 3, 3, (2, 1),
         "GPU 2 (0000:02:00.0) has no access to the memory of GPU 1 (0000:01:00.0): 3 ranks need links or PCIe peer "
         "access between all pairs"),
    ],
)  # fmt: skip
def test_gpus_that_cannot_share_a_program_are_one_line_and_code_4(
    opened: Open, names: list[str], count: int, unlinked: tuple[int, int] | None, line: str
) -> None:
    machine, open_all = opened(*names)
    machine.unlinked = set() if unlinked is None else {unlinked}
    with pytest.raises(NoGpuError) as caught:
        open_all(count)
    assert str(caught.value) == line
    assert exit_code(caught.value) == NO_GPU
    assert not machine.enabled


@pytest.fixture
def two_gpus() -> Iterator[tuple[Gpu, ...]]:
    """Two linked GPUs; skips where there are none."""
    try:
        yield open_gpus(2)
    except NoGpuError as error:
        pytest.skip(str(error))


@pytest.mark.gpu
def test_two_gpus_copy_into_each_other_s_memory(two_gpus: tuple[Gpu, ...]) -> None:
    import numpy as np

    first, second = two_gpus
    source, target = first.alloc(4096), second.alloc(4096)
    first.upload(source, np.arange(1024, dtype=np.int32))
    first.copy(target.address, source.address, 4096)
    first.sync()
    assert np.array_equal(second.download(target, np.int32, (1024,)), np.arange(1024))
    first.free(source)
    second.free(target)
