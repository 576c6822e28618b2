"""The kernel variant of a program: choices that are compiled into the kernel instead of written into its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import Buffer, BufferKind, DType, GpuTarget, MegakernelProgram, ScheduleConfig
from flywheel.ir.compressed import Run, Use, brief_of, uses_by_recipe
from flywheel.ir.program import once
from flywheel.plan.features import features_of
from flywheel.plan.formats import Coding, slot_bytes
from flywheel.plan.staging import MIN_STAGED_BYTES, codings_of, operands_of, rows_of, staged_bytes

RESERVED_BYTES: Final = 16 * 1024
"""Shared memory for barriers, instruction words, partial sums and reductions."""

MIN_RING_SLOTS: Final = 2

MAX_RING_SLOTS: Final = 64
"""Most ring slots: their barriers fit into the reserved bytes, and 64 of the smallest useful chunks outlast any
stall."""

CHUNK_BYTES: Final = (32768, 16384, 8192, 4096)
"""Sizes of a bulk copy in bytes, in order of preference, for a config that names none."""

INFLIGHT_BYTES: Final = 96 * 1024
"""Bytes in flight from memory to one SM, for a config that names none. About 64 KiB saturate an H200. More would only
queue up, and delay all other accesses to memory."""

COPIES: Final = 2
"""Chunks that the loader fills at once, for a config that names none. One is too slow: a thread needs about half a
microsecond for a copy and the wait before it."""

MAX_COPIES: Final = 8


WARP: Final = 32

MIN_WARPS: Final = 4
"""Fewest warps of a block: the loader, the control warp (which waits and fetches tasks), one matrix and one vector
warp."""

MAX_THREADS: Final = 1024


@dataclass(frozen=True, slots=True)
class KernelVariant:
    """Compile-time choices: block size, and the shared-memory ring of streamed weights."""

    sm_arch: int
    threads: int
    matrix_warps: int
    """Warps that multiply streamed weights."""
    chunk_warps: int
    """How many matrix warps share a chunk. Warps left over multiply nothing."""
    smem_bytes: int
    staged_bytes: int
    chunk_bytes: int
    ring_slots: int
    inflight_chunks: int
    """Copies in flight at once, at most `ring_slots - chunk_groups`. The other chunks of a full ring have landed."""
    copies: int
    """Chunks that the loader fills at once."""
    prefetch_depth: int
    data_hand_offs: bool
    """Whether readers poll activations themselves where possible, instead of counters."""
    rows: int = 0
    """Rows of all multiplied operands, for which a kernel is compiled; 0 (any number) where they differ."""
    formats: tuple[int, ...] = ()
    """Numbers of the formats (`Coding`) of quantised matrices in products."""
    ranked: bool = False
    """Whether the program pushes data to other GPUs and adds data that they push."""
    streams_past: bool = field(default=False, repr=False)
    """Whether the loader also streams the rows of KV caches that attentions read and no task writes (plan/past.py)."""
    features: tuple[str, ...] = field(default=(), repr=False)
    """What it asks for that most programs do without, some of `plan.features.FEATURES`."""

    def __post_init__(self) -> None:
        """Raises ConfigError if a warp that waits for its slot's chunk could mistake the previous chunk for it."""
        if not 0 < self.inflight_chunks <= self.ring_slots - self.chunk_groups:
            raise ConfigError(
                f"inflight_chunks={self.inflight_chunks} is not in 1..{self.ring_slots - self.chunk_groups}: "
                f"{self.ring_slots} ring slots, {self.chunk_groups} groups of warps"
            )

    @property
    def chunk_groups(self) -> int:
        """Groups of matrix warps. Chunks are dealt out to them in turn."""
        return chunk_groups(self.matrix_warps, self.chunk_warps, self.ring_slots)

    @property
    def vector_warps(self) -> int:
        """Warps that do all other work."""
        return self.threads // WARP - 2 - self.matrix_warps


def chunk_groups(matrix_warps: int, chunk_warps: int, ring_slots: int) -> int:
    """The number of groups of `chunk_warps` warps, at most half of the ring's slots."""
    return min(matrix_warps // chunk_warps, max(1, ring_slots // 2))


def kernel_variant(
    config: ScheduleConfig, target: GpuTarget, staged: int, codings: Sequence[Coding] = ()
) -> KernelVariant:
    """The variant that `config` asks for on `target`, with `staged` bytes of activations on chip, or the minimum.

    The ring has room for chunks of the formats `codings`, with as many bytes of codes as the config says.
    `smem_bytes_per_block = 0` takes the maximum that the GPU allows per block. Raises ConfigError if a bound is broken.
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
    by_data = _by_data(config)
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
    past = stream.get("past", 0)
    if past not in (0, 1):
        raise ConfigError(f"tiling.stream.past={past} is not 0 or 1")
    pause = stream.get("pause_cycles", 0)
    if pause != 0:
        raise ConfigError(f"tiling.stream.pause_cycles={pause}: no loader pauses since 2026-11-28; leave it out")
    return KernelVariant(
        target.sm_arch, threads, matrix_warps, chunk_warps, smem, staged, chunk, slots, inflight_chunks,
        min(copies, inflight_chunks), config.pipelining_depth, by_data,
        formats=tuple([coding.number for coding in codings]), streams_past=bool(past),
    )  # fmt: skip


def _by_data(config: ScheduleConfig) -> bool:
    """Whether hand-offs poll the data. Raises ConfigError."""
    asked = config.tiling.get("hand_off", {})
    by_data, slices = asked.get("data", 0), asked.get("slices", 1)
    if by_data not in (0, 1):
        raise ConfigError(f"tiling.hand_off.data={by_data} is not 0 or 1")
    if slices != 1:
        why = "no product begins with a part of its input since 2026-11-28; leave it out"
        raise ConfigError(f"tiling.hand_off.slices={slices}: {why}")
    return bool(by_data)


def _warps(config: ScheduleConfig) -> tuple[int, int]:
    """(warps that multiply, warps that share a chunk). Raises ConfigError."""
    asked = config.tiling.get("warps", {})
    warps = config.threads_per_block // WARP - 2  # without the loader and the control warp
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
        raise ConfigError("program: has no target, so no kernel variant")
    brief = brief_of(program)  # alike layers have alike operands
    uses = list(uses_by_recipe(brief.runs))
    operands = operands_of(uses, brief.buffers)
    config = program.config or ScheduleConfig()
    variant = kernel_variant(config, program.target, staged_bytes(operands), codings_of(operands))
    streams_past = variant.streams_past and any(map(_may_stream, brief.buffers))
    features = features_of([*uses, *_moving(brief.runs)], streams_past)
    return replace(variant, rows=rows_of(operands), streams_past=streams_past, features=features)


def _may_stream(buffer: Buffer) -> bool:
    """Whether the loader can stream a buffer's rows: those of a cache, and not of F32, which has no tensor cores."""
    return buffer.kind is BufferKind.KV_CACHE and buffer.dtype is not DType.F32


def _moving(runs: Sequence[Run]) -> Iterator[Use]:
    """The uses of tasks whose window moves, which may share a recipe with others."""
    for run in runs:
        for each in run.tiles.stretches[1:]:  # uses_by_recipe has the first
            if "window" in each.params:
                yield Use(run.op, run.inputs, each.params)
