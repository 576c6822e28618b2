"""One program on the GPU: whether its kernel can run it, its memory and tables, its launches, and the reports of
launches that failed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from flywheel.errors import ConfigError, GpuFaultError, LaunchTimeoutError, TensorError
from flywheel.ir import ABI_MAX_ROWS, Buffer, BufferKind
from flywheel.plan.checks import CACHE_ALIGNMENT
from flywheel.plan.step import ABSENT
from flywheel.vm.abi import COUNTER_STRIDE, Anchor, Fault, Layout, Stamp, Tie, numpy_struct
from flywheel.vm.elements import stored, stored_type, values
from flywheel.vm.gpu.driver import Gpu, LoadedKernel, Memory, check_fit
from flywheel.vm.gpu.stamps import stamps_ns
from flywheel.vm.gpu.weights import WEIGHT_KINDS, ResidentWeights, weight_key
from flywheel.vm.pack import PackedProgram, RankMemory, images_table, ranks_table
from flywheel.vm.pack.ranks import WORDS_BYTES

__all__ = ["LoadedProgram", "ResidentWeights"]

_GRACE_S: Final = 2.0
"""Wall seconds that a launch may take to see the abort flag and to end."""
_QUEUED_S: Final = 0.1
"""Wall seconds more for each launch queued behind it. A launch that waits for nothing does not look at the flag; the
slowest take a sixth of this, and several programs may be queued in turn."""


def grace_s(queued: int) -> float:
    """Wall seconds that `queued` launches may take to end after they were told to."""
    return _GRACE_S + _QUEUED_S * max(0, queued - 1)


_POISON: Final = 0xFF
"""A float of any type whose bytes all have this value is a NaN."""

"""Alignment of KV caches in bytes: the width of the kernels' loads."""

_PROGRAM: Final = numpy_struct("amk_program_t")
_REPORT: Final = numpy_struct("amk_report_t")
_TRACE: Final = numpy_struct("amk_trace_t")
POSITIONS: Final = ABI_MAX_ROWS
"""Number of positions that a launch reads, whatever the number of sequences."""

STATE_BYTES: Final = 2 * 4 + 2 * 8 * ABI_MAX_ROWS
_WRITTEN_KINDS: Final = (BufferKind.ACTIVATION, BufferKind.IO_OUTPUT)


class LoadedProgram:
    """A packed program with its memory, ready for any number of launches. Close it, or use `with`.

    `caches` are the device addresses of its KV caches by buffer name. `weights` must hold its `needed_weights`.
    Raises ConfigError where `check_kernel` does, WeightsError for a missing weight, TensorError for a cache that is
    missing or not aligned to 16 bytes, and GpuMemoryError.
    """

    def __init__(
        self,
        gpu: Gpu,
        packed: PackedProgram,
        kernel: LoadedKernel,
        weights: ResidentWeights,
        caches: Mapping[str, int],
    ) -> None:
        check_kernel(gpu, packed, kernel)
        self.gpu: Final = gpu
        self.packed: Final = packed
        self.kernel: Final = kernel
        self._grid = len(packed.queues) - 1
        self._rows = {buffer.name: row for row, buffer in enumerate(packed.program.buffers)}
        self._written_bytes = max(
            (self._offset(row) + buffer.nbytes
             for row, buffer in enumerate(packed.program.buffers)
             if buffer.kind in _WRITTEN_KINDS and row in packed.arena.offsets),
            default=0,
        )  # fmt: skip
        self._owned: list[Memory] = []
        self.queued = 0  # launches since the last that was waited for
        with ExitStack() as undo:
            undo.callback(self.close)
            self._arena = self._take(packed.arena.nbytes + packed.arena.awaited_bytes)
            self._addresses = self._find_buffers(weights, caches)
            self._counters = self._take(2 * packed.n_counters * COUNTER_STRIDE)
            self._state = self._take(STATE_BYTES)
            self._report = self._take(_REPORT.itemsize)
            traced = len(packed.instructions) + self._grid if kernel.variant.trace else 0
            self._trace = self._take(traced * _TRACE.itemsize) if traced else None
            self._words = self._take(WORDS_BYTES) if packed.part is not None else None
            self.reset()
            self._program = self._upload_program([]) if packed.part is None else None
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back the program's own memory. Weights and caches stay."""
        while self._owned:
            self.gpu.free(self._owned.pop())

    @property
    def memory(self) -> RankMemory:
        """The memory that the program's other GPUs write. Raises ConfigError where one GPU runs the program alone."""
        if self._words is None:
            raise ConfigError("program: of one GPU, which no other one writes to")
        return RankMemory(self._arena.address, self._words.address)

    @property
    def parts(self) -> tuple[LoadedProgram, ...]:
        """What runs on each GPU: this alone, as a RankedProgram says of several."""
        return (self,)

    def spread_inputs(self) -> None:
        """See `RankedProgram.spread_inputs`. The only GPU already has the inputs."""

    def connect(self, packed: Sequence[PackedProgram], memories: Sequence[RankMemory]) -> None:
        """Connect this rank to the other ranks, once before the first launch of a program of several GPUs.

        `packed` and `memories` are the tables and memories of all ranks, in order. This GPU must have access to all.
        """
        part = self.packed.part
        if part is None or self._program is not None:
            raise ConfigError("program: of one GPU, or connected already")
        images = self._put(images_table(packed, part.rank, memories))
        self._program = self._upload_program([ranks_table(self.packed, memories, images.address)])

    def address(self, name: str) -> int:
        """The device address of a buffer. Raises TensorError for an unknown name."""
        return self._addresses[self._row(name)]

    def last_address(self, name: str) -> int:
        """The device address where the last launch that was enqueued leaves an output. Raises TensorError."""
        row, _ = self._own(name)
        return self._addresses[row] + self._last_set() * int(self._is_awaited(row))

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a buffer. Raises TensorError for an unknown name."""
        return tuple(self.packed.program.buffers[self._row(name)].shape)

    def poison(self) -> None:
        """Fill the memory that launches write with NaN, so that a read of an earlier launch's values shows."""
        self.gpu.fill(Memory(self._arena.address, self._written_bytes), _POISON)
        self._forget(1)

    def _forget(self, number: int) -> None:
        """Mark every element of a set of awaited buffers as not yet written."""
        start = self._arena.address + number * self.packed.arena.nbytes
        self.gpu.fill(Memory(start, self.packed.arena.awaited_bytes), _POISON)

    def write_input(self, name: str, array: npt.NDArray[Any]) -> None:
        """Set an input or an activation to an array that `elements.stored` takes. Raises TensorError."""
        row, buffer = self._own(name)
        self.gpu.upload(self._arena, stored(array, buffer.dtype, tuple(buffer.shape), name), self._offset(row))

    def read_output(self, name: str) -> npt.NDArray[Any]:
        """An output, or an activation that nothing has overwritten. BF16 comes as float32. Raises TensorError."""
        _, buffer = self._own(name)
        offset = self.last_address(name) - self._arena.address
        array = self.gpu.download(self._arena, stored_type(buffer.dtype), tuple(buffer.shape), offset)
        return values(array, buffer.dtype)

    def transient_starts(self) -> dict[str, int]:
        """The byte offset in the arena of each activation and output, by name."""
        return {
            buffer.name: self._offset(row)
            for row, buffer in enumerate(self.packed.program.buffers)
            if buffer.kind in _WRITTEN_KINDS and row in self.packed.arena.offsets
        }

    def copy_transients(self, target: int) -> None:
        """Copy the arena, as the last launch left it, to the device address `target`, in stream order."""
        arena = self.packed.arena
        self.gpu.copy(target, self._arena.address, arena.nbytes)
        # Awaited buffers lie first in the arena, and their second set behind it.
        self.gpu.copy(target, self._arena.address + self._last_set(), arena.awaited_bytes)

    def _is_awaited(self, row: int) -> bool:
        return bool(self.packed.buffers["layout"][row] == Layout.AWAITED)

    def _last_set(self) -> int:
        """The byte offset, from the first set of awaited buffers, of the set that the last launch wrote."""
        return (self._launches + 1) % 2 * self.packed.arena.nbytes

    def launch(self, pos: int | None = None, positions: int = 0) -> None:
        """Enqueue one launch at position `pos`; with None, at the position that the program was lowered for.

        `positions` is the device address of POSITIONS int32, the position of each row, no lane 0 behind `pos`. With 0,
        all sequences are at `pos`. `sync` waits. Raises ConfigError for a position that the program cannot move to.
        """
        if pos is not None:
            self.packed.check_position(pos)
            if self.packed.lanes > 1 and not positions:
                raise ConfigError(f"program: of {self.packed.lanes} lanes; a launch takes the position of each row")
        if self._program is None:
            raise ConfigError("program: one of several GPUs, which are not connected")
        self._launches += 1
        self.queued += 1
        self.gpu.launch(
            self.kernel.megakernel,
            self._grid,
            self.kernel.variant.threads,
            (self._program.address, ctypes.c_int32(ABSENT if pos is None else pos), positions),
            smem_bytes=self.packed.variant.smem_bytes,
            cooperative=True,
        )

    def read_trace(self) -> npt.NDArray[np.uint64]:
        """Stamps [instruction, Stamp] of the last launch, in ns of the GPU's global timer; 0 where a task set none.

        Raises ConfigError where the kernel keeps no trace.
        """
        rows, anchors = self.read_rows()
        return stamps_ns(rows[:, : len(Stamp)], rows[:, Tie.TIMER_NS], anchors, self.packed.instructions["sm"])

    def read_waits(self) -> npt.NDArray[np.float64]:
        """[SM, 3]: shares of the last launch's time in which the loader stalled, in which matrix warps starved, and in
        which they awaited an operand.

        Raises ConfigError where the kernel keeps no trace.
        """
        anchors = self.read_rows()[1].astype(np.float64)
        took = anchors[:, Anchor.LAST_CYCLES] - anchors[:, Anchor.FIRST_CYCLES]
        return anchors[:, [Anchor.STALLED, Anchor.STARVED, Anchor.AWAITING]] / np.maximum(took, 1.0)[:, None]

    def read_rows(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """([instruction, Stamp or Tie], [SM, Anchor]) of the last launch, stamps in cycles of each SM's clock.

        Raises ConfigError where the kernel keeps no trace.
        """
        if self._trace is None:
            raise ConfigError("kernel: compiled without trace")
        count = len(self.packed.instructions)
        rows = self.gpu.download(self._trace, np.uint64, (count + self._grid, *_TRACE["at"].shape))
        return rows[:count], rows[count:, : len(Anchor)]

    def sync(self, limit_s: float) -> None:
        """Wait for all launches so far, and check their report.

        Raises LaunchTimeoutError where they do not end within `limit_s` seconds. They were then stopped, and the
        program can be launched again. Raises TensorError for an input that the program could not use. Raises
        GpuFaultError where a launch broke the GPU or could not be stopped; then this process must end.
        """
        self.wait(self.gpu.record(), limit_s)
        report = self.read_report()
        if report["fault"] != Fault.NONE:
            self.reset()
            raise TensorError(self.refusal(report))

    def refusal(self, report: npt.NDArray[np.void]) -> str:
        """Why a launch stopped by itself."""
        if report["fault"] == Fault.BAD_TOKEN:
            return f"{self._label(report)}: id {report['counter']} is no row of its table"
        return f"{self._label(report)}: stopped with fault {report['fault']}"

    def wait(self, event: Any, limit_s: float) -> None:
        """Wait until the stream passes an event of `Gpu.record`, for `limit_s` seconds at most.

        Raises LaunchTimeoutError and GpuFaultError as `sync` does. A launch behind the event may be the cause.
        """
        if not self.gpu.wait(event, limit_s):
            self._stop(self.gpu.record(), limit_s)
        self.queued = 0

    def _stop(self, done: Any, limit_s: float) -> None:
        self.gpu.abort_flag.value = 1
        grace, self.queued = grace_s(self.queued), 0
        if not self.gpu.wait(done, grace):
            self.gpu.broken = True
            raise GpuFaultError(f"launch: not over after {limit_s:g} s, nor {grace:g} s after it was told to stop")
        self.gpu.abort_flag.value = 0
        report = self.read_report()
        self.reset()
        raise LaunchTimeoutError(f"launch: not over after {limit_s:g} s; {self.culprit(report)}", limit_s)

    def culprit(self, report: npt.NDArray[np.void]) -> str:
        """What a launch that was told to stop waited for."""
        if report["fault"] != Fault.ABORTED:
            return "no task waits for a counter"
        where = f"{self._label(report)} on SM {report['sm']}"
        if report["counter"] < 0 < report["threshold"]:  # no counter, but who has not begun
            return f"{where}: rank {-1 - report['counter']} had not begun"
        if report["counter"] == ABSENT:
            return f"{where}{self._sum_behind(report)} is not over"
        return f"{where} waits for counter {report['counter']} >= {report['threshold']}, at {report['value']}"

    def _label(self, report: npt.NDArray[np.void]) -> str:
        task = int(report["task"])
        return self.packed.label(task) if 0 <= task < len(self.packed.program.tasks) else f"task at {task}"

    def _sum_behind(self, report: npt.NDArray[np.void]) -> str:
        """The sum that a product adds up to, for messages."""
        tasks = self.packed.instructions["task"]
        found = [total for row, total in self.packed.sums.items() if tasks[row] == report["task"]]
        return f", or what it is to add, {self.packed.label(found[0])}," if found else ""

    def read_report(self) -> npt.NDArray[np.void]:
        return self.gpu.download(self._report, _REPORT, (1,))[0]  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Set counters, launches, faults, stamps and awaited buffers as they are before the first launch."""
        self._launches = 0
        for memory in (self._counters, self._state, self._report, self._trace, self._words):
            if memory is not None:
                self.gpu.fill(memory, 0)
        for number in range(2):
            self._forget(number)

    def _upload_program(self, behind: Sequence[npt.NDArray[np.void]]) -> Memory:
        """Upload the program's struct and, directly behind it, the arrays `behind`."""
        packed, variant = self.packed, self.packed.variant
        buffers, segments = packed.buffers.copy(), packed.segments.copy()
        buffers["ptr"] = self._addresses
        segments["src"] += buffers["ptr"][packed.segment_buffers]
        tables = {
            "buffers": buffers, "instructions": packed.instructions, "queues": packed.queues, "steps": packed.steps,
            "segments": segments, "streams": packed.streams, "floats": packed.floats,
        }  # fmt: skip
        program = np.zeros(1, _PROGRAM)
        for name, table in tables.items():
            program[name] = self._put(table).address
        program["counters"], program["state"] = self._counters.address, self._state.address
        program["awaited"], program["set_stride"] = self._arena.address, packed.arena.nbytes
        program["awaited_bytes"] = packed.arena.awaited_bytes
        program["report"], program["abort_flag"] = self._report.address, self.gpu.abort_flag.address
        program["trace"] = 0 if self._trace is None else self._trace.address
        program["workspace"] = self._take(self._grid * packed.workspace_stride).address
        for name in ("ring_slots", "chunk_bytes", "staged_bytes", "prefetch_depth", "inflight_chunks", "chunk_warps",
                     "copies"):  # fmt: skip
            program[name] = getattr(variant, name)
        for name in ("n_counters", "workspace_stride", "pass_blocks"):
            program[name] = getattr(packed, name)
        return self._put(np.concatenate([table.view(np.uint8) for table in (program, *behind)]))

    def _find_buffers(self, weights: ResidentWeights, caches: Mapping[str, int]) -> list[int]:
        """The address of each buffer."""
        addresses = []
        for row, buffer in enumerate(self.packed.program.buffers):
            if buffer.kind in WEIGHT_KINDS:
                name, layout = weight_key(self.packed, row)
                addresses.append(0 if layout is Layout.IN_UNITS else weights.get(name, layout))
            elif buffer.kind is BufferKind.KV_CACHE:
                if buffer.name not in caches:
                    raise TensorError(f"cache {buffer.name}: not given")
                if caches[buffer.name] % CACHE_ALIGNMENT:
                    raise TensorError(f"cache {buffer.name}: starts at no multiple of {CACHE_ALIGNMENT} bytes")
                addresses.append(caches[buffer.name])
            elif row not in self.packed.arena.offsets:
                addresses.append(0)  # on another GPU: `images_table` says where
            else:
                addresses.append(self._arena.address + self._offset(row))
        return addresses

    def _offset(self, row: int) -> int:
        return self.packed.arena.offsets[row]

    def _own(self, name: str) -> tuple[int, Buffer]:
        """(row, buffer) of a buffer in the arena."""
        row = self._row(name)
        if row not in self.packed.arena.offsets:
            raise TensorError(f"{name}: is no input, activation or output")
        return row, self.packed.program.buffers[row]

    def _row(self, name: str) -> int:
        if name not in self._rows:
            raise TensorError(f"{name}: the program has no buffer of that name")
        return self._rows[name]

    def _put(self, table: npt.NDArray[Any]) -> Memory:
        memory = self._take(table.nbytes)
        self.gpu.upload(memory, table)
        return memory

    def _take(self, nbytes: int) -> Memory:
        memory = self.gpu.alloc(nbytes)
        self._owned.append(memory)
        return memory


def check_kernel(gpu: Gpu, packed: PackedProgram, kernel: LoadedKernel) -> None:
    """Check that a kernel can run a packed program.

    Raises ConfigError where the kernel's block size, float type, rows or formats are not the program's, where one of
    the two is for several GPUs and the other is not, and where `check_fit` does.
    """
    variant, target = kernel.variant, packed.program.target
    if target is None:
        raise ConfigError("program: no target, so no grid")
    has = (variant.threads, variant.matrix_warps, variant.dtype.name)
    needs = (packed.variant.threads, packed.variant.matrix_warps, packed.dtype.name)
    if has != needs:
        raise ConfigError(
            "kernel for {} threads, {} matrix warps and {}: the program needs {}, {} and {}".format(*has, *needs)
        )
    if variant.ranked is not packed.variant.ranked:
        raise ConfigError("kernel and program: one is of several GPUs, the other of one")
    if variant.features != packed.variant.features:
        has_features, needed = (" and ".join(each.features) or "none" for each in (variant, packed.variant))
        raise ConfigError(f"kernel with features {has_features}: the program needs {needed}")
    if variant.rows not in (0, packed.variant.rows):
        has_rows = packed.variant.rows or "various numbers of"
        raise ConfigError(f"kernel for products of {variant.rows} rows: the program's have {has_rows}")
    if not set(packed.variant.formats) <= set(variant.formats):
        raise ConfigError(
            f"kernel for quantised formats {list(variant.formats)}: the program has {list(packed.variant.formats)}"
        )
    check_fit(kernel, gpu, target, packed.variant.smem_bytes)
