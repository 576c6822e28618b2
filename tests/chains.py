"""Programs of nothing but products: the matrices of a decoder in order, with a number of hand-offs a layer."""

from __future__ import annotations

from dataclasses import dataclass

from flywheel.ir import (
    TARGETS,
    Buffer,
    BufferKind,
    Counter,
    DType,
    InstructionKind,
    MegakernelProgram,
    ScheduleConfig,
    Task,
    Wait,
)
from flywheel.plan.staging import MIN_STAGED_BYTES
from flywheel.plan.variant import RESERVED_BYTES

KIB = 1024
H200 = TARGETS["h200"]
BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class Chain:
    """Matrix-vector products of a decoder: (rows, K) of one layer in order, then the head."""

    name: str
    layer: tuple[tuple[int, int], ...]
    n_layers: int
    head: tuple[int, int]


LLAMA_1B = Chain("llama3.2-1b", ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)), 16, (128256, 2048))
LLAMA_8B = Chain("llama3-8b", ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), 32, (128256, 4096))

WAITING_OPS = {0: (), 3: (0, 2, 3), 4: (0, 1, 2, 3), 5: (0, 1, 2, 3), 6: (0, 1, 2, 3)}
"""Per number of hand-offs a layer: which of its four operations wait for what came before."""

EMPTY_OPS = {5: 1, 6: 2}
"""Hand-offs beyond four are tasks without bytes on every SM, behind the first operation, where attention would be."""


@dataclass(frozen=True, slots=True)
class Block:
    """The block of a kernel: its matrix warps, and its ring."""

    warps: int
    chunk_bytes: int
    ring_slots: int


DEEP = Block(8, 16 * KIB, 12)
WIDE = Block(8, 32 * KIB, 5)


def chain_program(chain: Chain, block: Block, handoffs: int, depth: int = 8) -> MegakernelProgram:
    """`chain` with one task an operation and SM, rows split evenly; remainder rows move from operation to operation."""
    draft = _Draft(block, depth)
    for _ in range(chain.n_layers):
        for number, (rows, k) in enumerate(chain.layer):
            draft.add(rows, k, waits=number in WAITING_OPS[handoffs])
            if number == 0:
                for _ in range(EMPTY_OPS.get(handoffs, 0)):
                    draft.add(0, k, waits=True)
    draft.add(*chain.head, waits=handoffs > 0)
    return draft.program()


class _Draft:
    def __init__(self, block: Block, depth: int) -> None:
        self._config = ScheduleConfig(
            tiling={
                "stream": {
                    "chunk_bytes": block.chunk_bytes,
                    "copies": 1,
                    "inflight_bytes": block.chunk_bytes * block.ring_slots,
                },
                "warps": {"matrix": block.warps, "chunk": block.warps},
            },
            pipelining_depth=depth,
            threads_per_block=32 * (2 * block.warps + 2),
            smem_bytes_per_block=RESERVED_BYTES + MIN_STAGED_BYTES + block.chunk_bytes * block.ring_slots,
        )
        self._buffers: list[Buffer] = []
        self._tasks: list[Task] = []
        self._counters = 0
        self._rotation = 0

    def _buffer(self, kind: BufferKind, *shape: int) -> int:
        self._buffers.append(Buffer(len(self._buffers), f"b{len(self._buffers)}", kind, DType.BF16, shape))
        return len(self._buffers) - 1

    def add(self, rows: int, k: int, waits: bool) -> None:
        """One operation over all SMs; without rows it only waits and signals."""
        awaited = (Wait(self._counters - 1, H200.num_sms),) if waits and self._counters else ()
        op = InstructionKind.GEMV_TILE if rows else InstructionKind.NOP
        inputs = (self._buffer(BufferKind.ACTIVATION, 1, k), self._buffer(BufferKind.WEIGHT, rows, k)) if rows else ()
        outputs = (self._buffer(BufferKind.ACTIVATION, 1, rows),) if rows else ()
        for sm in range(H200.num_sms):
            turn = (sm + self._rotation) % H200.num_sms
            start = turn * rows // H200.num_sms
            share = (turn + 1) * rows // H200.num_sms - start
            self._tasks.append(
                Task(
                    id=len(self._tasks),
                    op=op,
                    inputs=inputs,
                    outputs=outputs,
                    out_counter=self._counters,
                    waits=awaited,
                    params={"K": k, "n_off": start, "N_tile": share} if rows else {},
                    sm=sm,
                    est_bytes=share * k * BF16_BYTES,
                    est_flops=2 * share * k,
                )
            )
        self._counters += 1
        self._rotation += 53

    def program(self) -> MegakernelProgram:
        """What was added so far."""
        counters = tuple(Counter(number) for number in range(self._counters))
        return MegakernelProgram(
            target=H200, buffers=self._buffers, counters=counters, tasks=self._tasks, config=self._config
        )
