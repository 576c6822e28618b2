"""The kernel variant of a program: what is compiled into the kernel instead of being written into its tasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir.config import ScheduleConfig
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task
from flywheel.ir.target import GpuTarget

RESERVED_BYTES: Final = 8 * 1024
"""Shared memory for barriers, instruction words and reductions."""

MAX_STAGED_BYTES: Final = 64 * 1024
"""A longer activation vector is staged in slices."""

MIN_RING_SLOTS: Final = 2

CHUNK_BYTES: Final = (32768, 16384, 8192, 4096)
"""Bytes of one bulk copy, in order of preference where the config names none."""

WARP: Final = 32


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """Compile-time choices: block size, and the shared-memory ring that weights stream through."""

    sm_arch: int
    threads: int
    smem_bytes: int
    staged_bytes: int
    chunk_bytes: int
    ring_slots: int
    prefetch_depth: int

    @property
    def ring_bytes(self) -> int:
        """Bytes of weights that can wait in shared memory."""
        return self.chunk_bytes * self.ring_slots

    @property
    def consumer_warps(self) -> int:
        """Warps that compute; one more streams."""
        return self.threads // WARP - 1


def staged_bytes(tasks: Sequence[Task], buffers: Sequence[Buffer]) -> int:
    """Bytes of the longest vector that a matrix task keeps in shared memory, at most MAX_STAGED_BYTES."""
    widest = 0
    bits = {buffer.id: buffer.dtype.bits for buffer in buffers}
    for task in {id(task.params): task for task in tasks}.values():  # tiles share their params
        steps = task.params["recipe"]["steps"] if task.op is InstructionKind.FUSED else ()
        depths = [task.params.get("K", 0), *(step.get("params", {}).get("K", 0) for step in steps)]
        if any(depths):
            element = max(bits[buffer] for buffer in task.inputs)
            widest = max(widest, max(depths) * element // 8)
    return min(widest, MAX_STAGED_BYTES)


def kernel_variant(config: ScheduleConfig, target: GpuTarget, staged: int) -> KernelVariant:
    """The variant that `config` asks for on `target`, with `staged` bytes of activations kept on chip.

    `smem_bytes_per_block = 0` takes all that the GPU lets a block opt into. Raises ConfigError on a broken bound.
    """
    limit = target.smem_bytes_per_block_optin
    smem = config.smem_bytes_per_block or limit
    if not 0 < smem <= limit:
        raise ConfigError(f"smem_bytes_per_block={smem} is not in 0..{limit} ({target.name})")
    threads = config.threads_per_block
    if threads % WARP or not 2 * WARP <= threads <= min(1024, target.max_threads_per_sm):
        raise ConfigError(f"threads_per_block={threads} is not a multiple of {WARP} in {2 * WARP}..1024")
    if not 0 <= config.pipelining_depth <= 1024:
        raise ConfigError(f"pipelining_depth={config.pipelining_depth} is not in 0..1024")
    room = smem - staged - RESERVED_BYTES
    asked = config.tiling.get("stream", {}).get("chunk_bytes")
    fitting = [chunk for chunk in CHUNK_BYTES if chunk * MIN_RING_SLOTS <= room]
    chunk = asked if asked is not None else (fitting[0] if fitting else CHUNK_BYTES[-1])
    if chunk <= 0 or chunk % 1024:
        raise ConfigError(f"tiling.stream.chunk_bytes={chunk} is not a positive multiple of 1024")
    slots = room // chunk
    if slots < MIN_RING_SLOTS:
        raise ConfigError(
            f"smem_bytes_per_block={smem}: {room} bytes are left for the weight ring, "
            f"which needs {MIN_RING_SLOTS} chunks of {chunk}"
        )
    return KernelVariant(target.sm_arch, threads, smem, staged, chunk, slots, config.pipelining_depth)


def variant_of(program: MegakernelProgram) -> KernelVariant:
    """The variant of a program. Raises ConfigError where it has no target or an impossible config."""
    if program.target is None:
        raise ConfigError("program: no target, so no kernel variant")
    return kernel_variant(
        program.config or ScheduleConfig(), program.target, staged_bytes(program.tasks, program.buffers)
    )
