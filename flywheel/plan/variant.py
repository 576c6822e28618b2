"""The kernel variant of a program: what is compiled into the kernel instead of being written into its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import GpuTarget, MegakernelProgram, Runs, ScheduleConfig
from flywheel.ir.latest import once
from flywheel.ir.layers import Layered
from flywheel.ir.repeating import layers_of
from flywheel.ir.runs import uses_by_recipe
from flywheel.plan.formats import Coding, slot_bytes
from flywheel.plan.staging import MIN_STAGED_BYTES, Operand, codings_of, operands_of, rows_of, staged_bytes

RESERVED_BYTES: Final = 16 * 1024
"""Shared memory for barriers, instruction words, partial sums and reductions."""

MAX_X_SLICES: Final = 4
"""Slices of an operand that are staged side by side: each has a barrier of its own."""

MIN_RING_SLOTS: Final = 2

MAX_RING_SLOTS: Final = 64
"""Slots whose barriers fit the reserved bytes; 64 of the smallest useful chunk outlast any stall."""

CHUNK_BYTES: Final = (32768, 16384, 8192, 4096)
"""Bytes of one bulk copy, in order of preference where the config names none."""

INFLIGHT_BYTES: Final = 96 * 1024
"""Bytes that one SM has on their way from memory at once, where the config does not say. About 64 KiB saturate an H200;
more only queue up, and everything else that goes to memory queues behind them."""

COPIES: Final = 2
"""Chunks that the loader fills at once, where the config does not say. One alone is too slow: a thread needs about half
a microsecond for a copy and what it waits for before it."""

MAX_COPIES: Final = 8

WARP: Final = 32

MIN_WARPS: Final = 4
"""One to stream, one to wait and to fetch tasks, and at least one each that multiplies and that does the rest."""

MAX_THREADS: Final = 1024


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """Compile-time choices: block size, and the shared-memory ring that weights stream through."""

    sm_arch: int
    threads: int
    matrix_warps: int
    """Warps that multiply streamed weights."""
    chunk_warps: int
    """How many of them share a chunk; those left over multiply nothing."""
    smem_bytes: int
    staged_bytes: int
    chunk_bytes: int
    ring_slots: int
    inflight_chunks: int
    """Copies on their way at once, at most `ring_slots - chunk_groups`; the others of a full ring have landed."""
    copies: int
    """Chunks that the loader fills at once."""
    prefetch_depth: int
    data_hand_offs: bool
    """Readers wait for activations themselves where they can, not for counters."""
    x_slices: int = 1
    """Slices of K in which an input is multiplied, each as soon as it is there; 1 without `data_hand_offs`."""
    rows: int = 0
    """Rows of every operand that is multiplied, for which there is a kernel; 0, any, where they differ."""
    formats: tuple[int, ...] = ()
    """Numbers of the formats of quantised matrices (`Coding`) that there are products of."""
    ranked: bool = False
    """It pushes to other GPUs and adds what they push."""

    def __post_init__(self) -> None:
        """Raises ConfigError where a warp that waits for a slot could take the chunk before its own for it."""
        if not 0 < self.inflight_chunks <= self.ring_slots - self.chunk_groups:
            raise ConfigError(
                f"inflight_chunks={self.inflight_chunks} is not in 1..{self.ring_slots - self.chunk_groups}: "
                f"{self.ring_slots} ring slots, {self.chunk_groups} groups of warps"
            )

    @property
    def ring_bytes(self) -> int:
        """Bytes of weights that can wait in shared memory."""
        return self.chunk_bytes * self.ring_slots

    @property
    def chunk_groups(self) -> int:
        """Groups of matrix warps, among which chunks are dealt out in turn."""
        return chunk_groups(self.matrix_warps, self.chunk_warps, self.ring_slots)

    @property
    def vector_warps(self) -> int:
        """Warps that do everything else."""
        return self.threads // WARP - 2 - self.matrix_warps


def chunk_groups(matrix_warps: int, chunk_warps: int, ring_slots: int) -> int:
    """As many groups of `chunk_warps` warps as there are, but no more than half of the ring's slots."""
    return min(matrix_warps // chunk_warps, max(1, ring_slots // 2))


def kernel_variant(
    config: ScheduleConfig, target: GpuTarget, staged: int, codings: Sequence[Coding] = ()
) -> KernelVariant:
    """The variant that `config` asks for on `target`, with `staged` bytes of activations kept on chip, or the least.
    The ring has room for chunks of the formats `codings`, whose codes are as many bytes as the config says.

    `smem_bytes_per_block = 0` takes all that the GPU lets a block opt into. Raises ConfigError on a broken bound.
    """
    limit = target.smem_bytes_per_block_optin
    smem = config.smem_bytes_per_block or limit
    if not 0 < smem <= limit:
        raise ConfigError(f"smem_bytes_per_block={smem} is not in 0..{limit} ({target.name})")
    threads = config.threads_per_block
    least, most = MIN_WARPS * WARP, min(MAX_THREADS, target.max_threads_per_sm)
    if threads % WARP or not least <= threads <= most:
        raise ConfigError(f"threads_per_block={threads} is not a multiple of {WARP} in {least}..{most}")
    if not 0 <= config.pipelining_depth <= 1024:
        raise ConfigError(f"pipelining_depth={config.pipelining_depth} is not in 0..1024")
    by_data, x_slices = _hand_off(config)
    staged = max(staged, MIN_STAGED_BYTES)
    room = smem - staged - RESERVED_BYTES
    matrix_warps, chunk_warps = _warps(config)
    stream = config.tiling.get("stream", {})
    asked = stream.get("chunk_bytes")
    fitting = [chunk for chunk in CHUNK_BYTES if chunk * MIN_RING_SLOTS <= room]
    chunk = asked if asked is not None else (fitting[0] if fitting else CHUNK_BYTES[-1])
    if chunk <= 0 or chunk % 1024:
        raise ConfigError(f"tiling.stream.chunk_bytes={chunk} is not a positive multiple of 1024")
    chunk = slot_bytes(chunk, codings)
    slots = min(room // chunk, MAX_RING_SLOTS)
    if slots < MIN_RING_SLOTS:
        raise ConfigError(
            f"smem_bytes_per_block={smem}: {room} bytes are left for the weight ring, "
            f"which needs {MIN_RING_SLOTS} chunks of {chunk}"
        )
    inflight = stream.get("inflight_bytes", INFLIGHT_BYTES)
    if inflight <= 0:
        raise ConfigError(f"tiling.stream.inflight_bytes={inflight} is not positive")
    inflight_chunks = min(-(-inflight // chunk), slots - chunk_groups(matrix_warps, chunk_warps, slots))
    copies = stream.get("copies", COPIES)
    if not 1 <= copies <= MAX_COPIES:
        raise ConfigError(f"tiling.stream.copies={copies} is not in 1..{MAX_COPIES}")
    return KernelVariant(
        target.sm_arch, threads, matrix_warps, chunk_warps, smem, staged, chunk, slots, inflight_chunks,
        min(copies, inflight_chunks), config.pipelining_depth, by_data, x_slices,
        formats=tuple([coding.number for coding in codings]),
    )  # fmt: skip


def _hand_off(config: ScheduleConfig) -> tuple[bool, int]:
    """(whether by the data, slices of what is multiplied). Raises ConfigError."""
    asked = config.tiling.get("hand_off", {})
    by_data, slices = asked.get("data", 0), asked.get("slices", 1)
    if by_data not in (0, 1):
        raise ConfigError(f"tiling.hand_off.data={by_data} is not 0 or 1")
    if not 1 <= slices <= MAX_X_SLICES:
        raise ConfigError(f"tiling.hand_off.slices={slices} is not in 1..{MAX_X_SLICES}")
    if slices > 1 and not by_data:
        raise ConfigError(f"tiling.hand_off.slices={slices} without data=1: a counter says nothing of a part")
    return bool(by_data), slices


def _warps(config: ScheduleConfig) -> tuple[int, int]:
    """(warps that multiply, warps that share a chunk). Raises ConfigError."""
    asked = config.tiling.get("warps", {})
    warps = config.threads_per_block // WARP - 2  # beside the loader and the control warp
    matrix_warps = min(asked.get("matrix", -(-warps // 2)), warps - 1)
    if matrix_warps < 1:
        raise ConfigError(f"tiling.warps.matrix={matrix_warps} is not positive")
    chunk_warps = asked.get("chunk", 1)
    if not 1 <= chunk_warps <= matrix_warps:
        raise ConfigError(f"tiling.warps.chunk={chunk_warps} is not in 1..{matrix_warps}, the warps that multiply")
    return matrix_warps, chunk_warps


@once
def variant_of(program: MegakernelProgram) -> KernelVariant:
    """The variant of a program. Raises ConfigError where it has no target or an impossible config."""
    if program.target is None:
        raise ConfigError("program: no target, so no kernel variant")
    operands = _operands(program)
    config = program.config or ScheduleConfig()
    variant = kernel_variant(config, program.target, staged_bytes(operands), codings_of(operands))
    return replace(variant, rows=rows_of(operands))


def _operands(program: MegakernelProgram) -> frozenset[Operand]:
    tasks, buffers = program.tasks, program.buffers
    if not isinstance(tasks, Runs):
        return operands_of(tasks, buffers)
    if layers_of(program) is None or not isinstance(buffers, Layered):
        return operands_of(uses_by_recipe(tasks.runs), buffers)
    return operands_of(uses_by_recipe(tasks.spelled), buffers.spelled)  # alike layers have alike operands
