"""Programs of several ranks on emulated GPUs of one memory: all ranks at once, each at its own pace."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from emulator.gpu import WHY_BYTES, EmulatedGpu, build_variant
from torch import Tensor

from flywheel.errors import GpuFaultError
from flywheel.ir import BufferKind, DType, MegakernelProgram
from flywheel.models.weights import bind
from flywheel.plan.kernels import arch_name
from flywheel.vm.gpu.driver import load_variant
from flywheel.vm.gpu.loader import LoadedProgram, ResidentWeights
from flywheel.vm.gpu.ranked import RankedProgram
from flywheel.vm.gpu.weights import needed_weights
from flywheel.vm.pack import PackedProgram, pack_ranks


class HostCopy(ctypes.Structure):
    _fields_ = (("to", ctypes.c_void_p), ("source", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class Span(ctypes.Structure):
    _fields_ = (("first", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


@dataclass
class Peer(EmulatedGpu):
    """One GPU of several, `queues`, each with the launches given to it. When all have one, they run at once.

    `absent` makes it forget its launch. So the others, when they are told to stop, run without it. `failing` makes its
    launch an error.
    """

    queues: list[list[tuple[Any, ...]]] = field(default_factory=list)
    absent: bool = False
    failing: bool = False
    order: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rank = len(self.queues)
        self.queues.append([])

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
        if not cooperative:
            super().launch(kernel, grid, block, args, smem_bytes=smem_bytes)
            return
        if self.failing:
            raise KeyboardInterrupt
        self.order.append(f"launch {self.rank}")
        if not self.absent:
            self.queues[self.rank].append((kernel, grid, block, args, smem_bytes))
        if all(self.queues):
            firsts = [queue.pop(0) for queue in self.queues]
            ranks, (pos, *_) = len(firsts), args[1:]
            why = ctypes.create_string_buffer(WHY_BYTES)
            ended = self._library.emulate_ranks(
                (ctypes.c_void_p * ranks)(*(each[3][0] for each in firsts)), (ctypes.c_int * 1)(pos.value),
                (ctypes.c_void_p * ranks)(*(each[3][2] for each in firsts)) if args[2] else None, None, None,
                ctypes.c_int(0), (Span * ranks)(), ctypes.c_int(ranks), ctypes.c_int(1), ctypes.c_int(grid),
                ctypes.c_int(block), ctypes.c_size_t(smem_bytes), ctypes.c_uint(self.seed),
                ctypes.c_double(self.limit_s), why, ctypes.c_size_t(WHY_BYTES),
            )  # fmt: skip
            if ended:
                raise GpuFaultError(why.value.decode() or f"launch: not over after {self.limit_s:g} s")

    def load(self, unit: Any) -> dict[str, Any]:
        if unit.ranked:
            self._library = ctypes.CDLL(unit.cubin.decode())
        return super().load(unit)

    def record(self) -> Any:
        return self.rank

    def follow(self, other: Peer) -> None:
        self.order.append(f"{self.rank} follows {other.rank}")

    def wait(self, event: Any, limit_s: float) -> bool:
        """Whether nothing is queued; what is queued behind a flag runs to its end."""
        if self.abort_flag.value:
            for kernel, grid, block, args, smem_bytes in self.queues[self.rank]:
                super().launch(kernel, grid, block, args, smem_bytes=smem_bytes)
            self.queues[self.rank].clear()
        return not any(self.queues) or bool(self.abort_flag.value)


class Ranks:
    """A program's ranks in memory; close it. Caches begin with zeros. Ranks have `gpus`, or all have `gpu`."""

    def __init__(
        self, gpu: EmulatedGpu, program: MegakernelProgram, weights: Mapping[str, Tensor], dtype: DType,
        gpus: Sequence[EmulatedGpu] = (),
    ) -> None:  # fmt: skip
        self.gpu, self.packed = gpu, pack_ranks(program)
        self._stack = ExitStack()
        variant = self.packed[0].variant
        self._kernel = build_variant(
            arch_name(gpu.sm_arch), variant.threads, dtype, matrix_warps=variant.matrix_warps, rows=variant.rows,
            formats=variant.formats, ranked=True, features=variant.features,
        )
        bound = bind(program, weights)
        homes = gpus or [gpu] * len(self.packed)
        self.loaded = [self._load(home, each, bound, dtype) for home, each in zip(homes, self.packed, strict=True)]
        self.ranked = RankedProgram(self.loaded)
        self._library = ctypes.CDLL(self._kernel.cubin.decode())

    def _load(
        self, gpu: EmulatedGpu, packed: PackedProgram, bound: Mapping[str, Tensor], dtype: DType
    ) -> LoadedProgram:
        resident = self._stack.enter_context(ResidentWeights(gpu, dtype))  # type: ignore[arg-type]
        for name, buffer, layout in needed_weights(packed):
            resident.put(name, bound[buffer.name].float().numpy(), buffer.shape, buffer.dtype, layout)
        caches = {}
        for buffer in packed.program.buffers:
            if buffer.kind is BufferKind.KV_CACHE:
                memory = gpu.alloc(buffer.nbytes)
                gpu.fill(memory, 0)
                caches[buffer.name] = memory.address
        kernel = load_variant(gpu, self._kernel)  # type: ignore[arg-type]
        return self._stack.enter_context(
            LoadedProgram(gpu, packed, kernel, resident, caches)  # type: ignore[arg-type]
        )

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def launch(self, tokens: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """(logits [launch, rank, ...], tokens [launch, rank, row]) of launches from position 0 on, on fresh memory.
        The host looks when all are over. Raises GpuFaultError."""
        ranks, count, batch = len(self.packed), len(tokens), len(tokens[0])
        shape = next(buffer.shape for buffer in self.packed[0].program.buffers if buffer.name.startswith("logits@0"))
        logits = np.zeros((count, ranks, *shape), np.float32)
        chosen = np.zeros((count, ranks, batch), np.int32)
        given = np.array(tokens, np.int32)
        places = np.repeat(np.arange(count, dtype=np.int32)[:, None], batch, 1)
        before, after = [], []
        for number in range(count):
            for rank, each in enumerate(self.loaded):
                second = number % 2 * each.packed.arena.nbytes
                before += [(each.address(f"token_id@{rank}"), given[number]),
                           (each.address(f"position@{rank}"), places[number])]
                after += [(each.address(f"logits@{rank}") + second, logits[number, rank]),
                          (each.address(f"next_token@{rank}"), chosen[number, rank])]  # fmt: skip
        ins = [HostCopy(to, array.ctypes.data, array.nbytes) for to, array in before]
        outs = [HostCopy(array.ctypes.data, source, array.nbytes) for source, array in after]
        bytes_of = [each.packed.arena.nbytes + each.packed.arena.awaited_bytes for each in self.loaded]
        arenas = [Span(each.memory.arena, nbytes) for each, nbytes in zip(self.loaded, bytes_of, strict=True)]
        assert all(each._program is not None for each in self.loaded)
        programs = [each._program.address for each in self.loaded if each._program is not None]
        why = ctypes.create_string_buffer(WHY_BYTES)
        variant = self.packed[0].variant
        ended = self._library.emulate_ranks(
            (ctypes.c_void_p * ranks)(*programs), (ctypes.c_int * count)(*range(count)), None,
            (HostCopy * len(ins))(*ins), (HostCopy * len(outs))(*outs), ctypes.c_int(2), (Span * ranks)(*arenas),
            ctypes.c_int(ranks), ctypes.c_int(count), ctypes.c_int(len(self.packed[0].queues) - 1),
            ctypes.c_int(variant.threads),
            ctypes.c_size_t(variant.smem_bytes), ctypes.c_uint(self.gpu.seed), ctypes.c_double(self.gpu.limit_s), why,
            ctypes.c_size_t(WHY_BYTES),
        )  # fmt: skip
        if ended:
            raise GpuFaultError(why.value.decode() or f"launch: not over after {self.gpu.limit_s:g} s")
        return logits, chosen


