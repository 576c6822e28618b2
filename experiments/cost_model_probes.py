"""Predicted against measured times of persistent kernels that walk a Llama-shaped chain of matrix-vector products.

Measured on one H200 (132 SMs) at batch 1 in bf16, without attention: a loader warp, consumer warps and counters. Run
it with `python experiments/cost_model_probes.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from statistics import median
from time import perf_counter

from flywheel.cost_model import MACHINES, Consumer, Machine, Vector, predict
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
from flywheel.plan.variant import MAX_THREADS, RESERVED_BYTES

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
class Kernel:
    """A probe kernel: its consumers, their warps, the ring."""

    name: str
    consumer: Consumer
    warps: int
    chunk_bytes: int
    ring_slots: int


@dataclass(frozen=True, slots=True)
class Probe:
    """One measured row; times in ms a token for both chains."""

    kernel: Kernel
    handoffs: int
    measured_1b_ms: float
    measured_8b_ms: float


_FLOPS = MACHINES["h200"].consumer.flops_per_warp_us
MMA = Consumer(0.0385, 9.8, 0.06, 38.6e3, 0.4, _FLOPS)
"""Weights packed in fragment order, 16-row blocks as the A operand of `mma.m16n8k16`."""
MMA_B = Consumer(0.045, 10.2, 0.06, 38.6e3, 0.4, _FLOPS)
"""The same with 8-row blocks as the B operand."""
CUDA_CORES = Consumer(0.07, 13.0, 0.06, 33.4e3, 0.4, _FLOPS)
"""K split over the warps, converts and shuffles per row."""
STREAM_ONLY = Consumer(0.0, 1.6, 0.0, 1e6, 0.4, _FLOPS)
"""Frees the ring without looking at it: what the memory and the hand-offs alone cost."""

PROBED: Machine = replace(
    MACHINES["h200"],
    read_gbs=4611.0,
    shared_gbs=1e6,
    copy_us=0.376,
    round_trip_us=0.7258,
    visibility_us=1.2,
    crowd_us=0.0,
    bubble_us=2.2,
    launch_us=8.0,
    restage_share=1.0,
    ask_us=0.0,
    vector=Vector(fetch_us=0.1),
)
"""The same card under these kernels, which are not the VM: every warp waits for every chunk and does all work, their
loader reads 4611 GB/s, fills a slot at a time, and loses 2.2 us of its stream at every hand-off."""

CUDA_16 = Kernel("CUDA cores, 16 warps", CUDA_CORES, 16, 16 * KIB, 12)
MMA_8 = Kernel("mma, 8 warps, 5 x 32 KiB", MMA, 8, 32 * KIB, 5)
MMA_8_WIDE = Kernel("mma, 8 warps, 2 x 64 KiB", MMA, 8, 64 * KIB, 2)
B_4, B_8, B_16 = (Kernel(f"mma, weights as B, {w} warps", MMA_B, w, 32 * KIB, 5) for w in (4, 8, 16))
STREAM = Kernel("streaming only, 12 x 16 KiB", STREAM_ONLY, 8, 16 * KIB, 12)

PROBES = (
    Probe(CUDA_16, 0, 0.838, 4.270),
    Probe(CUDA_16, 4, 0.898, 4.412),
    Probe(CUDA_16, 6, 1.010, 4.642),
    Probe(MMA_8, 0, 0.633, 3.466),
    Probe(MMA_8, 4, 0.715, 3.638),
    Probe(MMA_8, 6, 0.785, 3.802),
    Probe(MMA_8_WIDE, 0, 0.642, 3.319),
    Probe(B_4, 0, 0.694, 3.632),
    Probe(B_8, 0, 0.648, 3.522),
    Probe(B_16, 0, 0.655, 3.417),
    Probe(B_16, 4, 0.737, 3.703),
    Probe(B_16, 6, 0.827, 3.905),
    Probe(STREAM, 0, 0.545, 3.230),
    Probe(STREAM, 3, 0.654, 3.439),
    Probe(STREAM, 4, 0.690, 3.522),
    Probe(STREAM, 5, 0.721, 3.581),
)


def chain_program(chain: Chain, kernel: Kernel, handoffs: int, depth: int = 8) -> MegakernelProgram:
    """`chain` with one task an operation and SM, rows split evenly; remainder rows move from operation to operation."""
    draft = _Draft(kernel, depth)
    for _ in range(chain.n_layers):
        for number, (rows, k) in enumerate(chain.layer):
            draft.add(rows, k, waits=number in WAITING_OPS[handoffs])
            if number == 0:
                for _ in range(EMPTY_OPS.get(handoffs, 0)):
                    draft.add(0, k, waits=True)
    draft.add(*chain.head, waits=handoffs > 0)
    return draft.program()


class _Draft:
    def __init__(self, kernel: Kernel, depth: int) -> None:
        self._config = ScheduleConfig(
            # As many matrix warps as the probe had consumers; the largest block has 15, of 16.
            tiling={
                "stream": {
                    "chunk_bytes": kernel.chunk_bytes,
                    "copies": 1,
                    "inflight_bytes": kernel.chunk_bytes * kernel.ring_slots,
                },
                "warps": {"matrix": min(kernel.warps, 15), "chunk": min(kernel.warps, 15)},
            },
            pipelining_depth=depth,
            threads_per_block=min(32 * (2 * kernel.warps + 2), MAX_THREADS),
            smem_bytes_per_block=RESERVED_BYTES + MIN_STAGED_BYTES + kernel.chunk_bytes * kernel.ring_slots,
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
            share = (turn + 1) * rows // H200.num_sms - turn * rows // H200.num_sms
            self._tasks.append(
                Task(
                    id=len(self._tasks),
                    op=op,
                    inputs=inputs,
                    outputs=outputs,
                    out_counter=self._counters,
                    waits=awaited,
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


def predicted_ms(chain: Chain, kernel: Kernel, handoffs: int) -> float:
    """Predicted time of a probe."""
    machine = replace(PROBED, consumer=kernel.consumer)
    return predict(chain_program(chain, kernel, handoffs), machine).latency_us / 1e3


def table() -> list[tuple[Probe, float, float]]:
    """(probe, predicted 1b ms, predicted 8b ms) of every row."""
    return [
        (
            probe,
            predicted_ms(LLAMA_1B, probe.kernel, probe.handoffs),
            predicted_ms(LLAMA_8B, probe.kernel, probe.handoffs),
        )
        for probe in PROBES
    ]


def main() -> None:
    """Print the table, the errors and what a prediction costs."""
    write = sys.stdout.write
    write("| kernel | hand-offs a layer | 1b measured / predicted ms (error) | 8b measured / predicted ms (error) |\n")
    write("|---|---|---|---|\n")
    errors = []
    for probe, small, large in table():
        cells = []
        for measured, predicted in ((probe.measured_1b_ms, small), (probe.measured_8b_ms, large)):
            errors.append(predicted / measured - 1)
            cells.append(f"{measured:.3f} / {predicted:.3f} ({errors[-1]:+.1%})")
        write(f"| {probe.kernel.name} | {probe.handoffs or 'none'} | {' | '.join(cells)} |\n")
    sizes = [abs(error) for error in errors]
    write(f"\nerror: median {median(sizes):.1%}, largest {max(sizes):.1%}\n\n")
    for chain, handoffs in ((LLAMA_1B, 4), (LLAMA_8B, 4), (LLAMA_8B, 6)):
        program = chain_program(chain, MMA_8, handoffs)
        seconds = []
        for _ in range(5):
            start = perf_counter()
            predict(program, PROBED)
            seconds.append(perf_counter() - start)
        write(f"predict {chain.name}, {len(program.tasks)} tasks: {min(seconds):.3f} s (best of 5)\n")


if __name__ == "__main__":
    main()
