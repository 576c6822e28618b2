"""The kernel variant of a program: what is compiled into the kernel instead of being written into its tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Final, NamedTuple

from flywheel.errors import ConfigError
from flywheel.ir.access import MATRIX_OPS
from flywheel.ir.config import ScheduleConfig
from flywheel.ir.dtype import DType
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Task
from flywheel.ir.target import GpuTarget

RESERVED_BYTES: Final = 16 * 1024
"""Shared memory for barriers, instruction words, partial sums and reductions."""

MIN_STAGED_BYTES: Final = 16 * 1024
"""Least size of the staging area, where the values between a task's steps live too."""

MAX_STAGED_BYTES: Final = 64 * 1024
"""Most that the staging area grows to for an operand of one row. The VM stages a longer input in slices of K, and
refuses a longer result of a task's own steps."""

MAX_STAGED_ROWS_BYTES: Final = 132 * 1024
"""The same for several rows that a task makes itself: eight of 8192 halves and their padding."""

MAX_INPUT_ROWS_BYTES: Final = 36 * 1024
"""The same for an input of several rows: what a longer one took would be missed more by the weight ring."""

MAX_X_SLICES: Final = 4
"""Slices of an operand that are staged side by side: each has a barrier of its own."""

WORK_BYTES: Final = 8 * 1024
"""End of the staging area that kernels without a matrix operand take for themselves."""

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

FRAGMENT_K: Final = 16
"""Weights are multiplied in blocks of 16 x 16; operands are padded to whole ones."""

SLICE_K: Final = 2 * FRAGMENT_K
"""Columns of K that slices are multiples of: an even number of fragments, behind which several rows lie in different
banks."""


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
    x_slices: int = field(default=1, repr=False)
    """Slices of K in which an input is multiplied, each as soon as it is there; 1 without `data_hand_offs`."""
    rows: int = field(default=0, repr=False)
    """Rows of every operand that is multiplied, for which there is a kernel; 0, any, where they differ."""

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


def operand_stride(rows: int, depth: int) -> int:
    """Elements from one row of a staged operand [rows, depth] to the next; several rows must not meet in one bank."""
    return FRAGMENT_K * (-(-depth // FRAGMENT_K) + (rows > 1))


class Slices(NamedTuple):
    """How an operand [rows, K] is staged: `depth` columns at a time, `beside` such slices side by side."""

    depth: int
    beside: int


def slices_of(dtype: DType, rows: int, depth: int) -> Slices:
    """All of an input [rows, depth], or an even share of the fewest slices that fit, one at a time.

    A share is a multiple of SLICE_K.
    """
    most = MAX_STAGED_BYTES if rows == 1 else MAX_INPUT_ROWS_BYTES
    if _bytes_of(dtype, rows, depth) <= most:
        return Slices(depth, 1)
    pairs = -(-depth // SLICE_K)
    fitting = (most // dtype.nbytes(rows * FRAGMENT_K) - (rows > 1)) // 2
    slices = -(-pairs // max(1, fitting))
    return Slices(SLICE_K * -(-pairs // slices), 1)


def operand_bytes(dtype: DType, rows: int, depth: int, made: bool = False) -> int:
    """Bytes that the staging area has for an operand [rows, depth] that is multiplied: all of what the task itself has
    `made`, a slice of an input; what the area may have at most where not even that fits, which the VM refuses."""
    each = depth if made else slices_of(dtype, rows, depth).depth
    return min(_bytes_of(dtype, rows, each), _most_staged(rows))


def _bytes_of(dtype: DType, rows: int, depth: int) -> int:
    return dtype.nbytes(rows * operand_stride(rows, depth))


def _most_staged(rows: int) -> int:
    return MAX_STAGED_BYTES if rows == 1 else MAX_STAGED_ROWS_BYTES


def staged_bytes(tasks: Sequence[Task], buffers: Sequence[Buffer]) -> int:
    """Bytes of the largest operand that a matrix task keeps in shared memory, in its weight's type; at least
    MIN_STAGED_BYTES. An input takes what `operand_bytes` says, a result of the task's own steps at most what the area
    may grow to."""
    largest = MIN_STAGED_BYTES
    for operand in _operands(tasks, buffers):
        made = operand.buffer is None
        largest = max(largest, operand_bytes(operand.dtype, operand.rows, operand.depth, made))
    return largest


class _Operand(NamedTuple):
    """What a matrix task multiplies, [rows, depth]: a buffer, or None where its own steps make it."""

    dtype: DType
    rows: int
    depth: int
    buffer: int | None


def _operands(tasks: Sequence[Task], buffers: Sequence[Buffer]) -> Iterator[_Operand]:
    """The operands of matrix tasks, once for tiles that follow each other; of an input in its weight's type."""
    known = {buffer.id: buffer for buffer in buffers}
    recipes: dict[int, list[_Product]] = {}
    before: tuple[object, object, object] = (None, None, None)
    for task in tasks:
        params = task.params
        recipe = params.get("recipe")
        inputs, made_by, depth = before
        if task.inputs is inputs and recipe is made_by and (recipe is not None or params.get("K") == depth):
            continue  # one more tile of the same
        before = task.inputs, recipe, params.get("K")
        for product in _products(task, recipes):
            dtype, depth = known[task.inputs[product.weight]].dtype, product.depth
            number = task.inputs[product.x] if product.numel is None else None
            numel = known[number].numel if number is not None else product.numel or 0
            yield _Operand(dtype, max(1, numel // depth), depth, number)


class _Product(NamedTuple):
    """A matrix step: inputs that x and the weight are, elements of an x made by the recipe, and K."""

    x: int
    weight: int
    numel: int | None
    depth: int


def _products(task: Task, recipes: dict[int, list[_Product]]) -> list[_Product]:
    """The matrix steps of a task; of its recipe, read once for all tasks that share it."""
    if task.op in MATRIX_OPS:
        depth = task.params.get("K", 0)
        return [_Product(0, 1, None, depth)] if depth > 0 else []
    if task.op is not InstructionKind.FUSED:
        return []
    recipe = task.params["recipe"]
    if id(recipe) not in recipes:
        products = recipes[id(recipe)] = []
        made: dict[int, int] = {}
        for step in recipe["steps"]:
            depth = step.get("params", {}).get("K", 0)
            if InstructionKind[step["op"]] in MATRIX_OPS and depth > 0:
                x, weight = step["args"][:2]
                if "in" in weight:
                    numel = made[x["s"]] if "s" in x else None
                    products.append(_Product(x.get("in", 0), weight["in"], numel, depth))
            if type(step["out"]) is int:
                made[step["out"]] = prod(step["out_shape"])
    return recipes[id(recipe)]


def kernel_variant(config: ScheduleConfig, target: GpuTarget, staged: int) -> KernelVariant:
    """The variant that `config` asks for on `target`, with `staged` bytes of activations kept on chip, or the least.

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


def variant_of(program: MegakernelProgram) -> KernelVariant:
    """The variant of a program. Raises ConfigError where it has no target or an impossible config."""
    if program.target is None:
        raise ConfigError("program: no target, so no kernel variant")
    staged = staged_bytes(program.tasks, program.buffers)
    variant = kernel_variant(program.config or ScheduleConfig(), program.target, staged)
    return replace(variant, rows=_rows_of(program.tasks, program.buffers))


def _rows_of(tasks: Sequence[Task], buffers: Sequence[Buffer]) -> int:
    found = {operand.rows for operand in _operands(tasks, buffers)}
    return found.pop() if len(found) == 1 else 0
