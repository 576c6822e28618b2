"""What a GPU and the kernel's inner loops cost: the constants of the prediction, in one table.

The H200's come from microbenchmarks on one card: read rates by copy size and bytes in flight, and persistent kernels
that walk a Llama-shaped chain of matrix-vector products with and without hand-offs (experiments/cost_model_probes.py
holds the times). Measured as such are `read_gbs`, the 0.376 us of `copy_us` (2875 GB/s with 8 KiB copies), the 64 KiB
in flight behind `in_flight_us`, the 60 ns of `chunk_us` and the 2.2 us of `bubble_us`; `visibility_us`, `launch_us`
and the consumers are fitted to the chains. The fit cannot tell a consumer that is a little faster than this memory
from a memory that it disturbs, so what it says of a card with more bandwidth an SM (b200) is the least certain part.
`latency_us`, `poll_us`, `sm_read_gbs` and `activation_gbs` are estimates.

Those kernels had no vector steps. `step_us` and `merge_us` are fitted to what the VM took for llama3.2-1b with 1 to 8
KV blocks, other divisions of its warps, and llama3-8b, with counters: all within 4 %. `data_visibility_us` is set so
that llama3.2-1b without counters takes what it did, about 925 us with four KV blocks; a trace shows that a hand-off
takes 1.3 us less, of which a part was hidden before. What else those kernels did not have is free here until
`flywheel calibrate` fits it: norms, the arithmetic of attention, signals, copies limited to less than the ring,
operands that stay in place.

The other GPUs are scaled from it, not measured:

- `read_gbs` is 0.9606 of the datasheet, the H200's 4611 of 4800 GB/s; 0.92 on architectures without bulk copies
  (before sm_90), where every thread of the loader issues its own 16-byte copies.
- Rates of one SM scale with its clock.
- Latencies, hand-offs, barriers and launches keep the H200's times: they are dominated by round trips, not by width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, Literal

from flywheel.ir.target import TARGETS, GpuTarget

BULK_COPY_ARCH: Final = 90
"""First architecture whose loader can move a whole chunk with one instruction."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """The loop that turns streamed bytes into outputs, on `warps` warps of one SM.

    A task costs `warp_us * warps + stage_us / warps` (barriers and the last reduction grow with the warps, staging
    the vector is shared by them), `chunk_us` a chunk for its barrier, and its bytes at a rate that saturates with the
    warps: half of `bytes_per_us` at `half_warps`. Arithmetic that no tensor core does runs at `flops_per_warp_us` a
    warp, at the same time as the bytes.
    """

    warp_us: float
    stage_us: float
    chunk_us: float
    bytes_per_us: float
    half_warps: float
    flops_per_warp_us: float

    def task_us(self, warps: int, staged: float = 1.0) -> float:
        """Time of one task besides its bytes, where it stages that part of its operand."""
        return self.warp_us * warps + self.stage_us / warps * staged

    def rate(self, warps: int) -> float:
        """Bytes per us that `warps` warps consume."""
        return self.bytes_per_us * warps / (warps + self.half_warps)


_FLOPS_PER_WARP_US: Final = 36e3
"""Attention on one warp took 0.45 us for 16 more tokens of 64 values and 4 heads, all FMAs."""

MMA: Final = Consumer(0.077, 4.9, 0.06, 38.6e3, 0.4, _FLOPS_PER_WARP_US)
"""Weights packed in fragment order, 16-row blocks as the A operand of `mma.m16n8k16`."""

MMA_B: Final = Consumer(0.09, 5.1, 0.06, 38.6e3, 0.4, _FLOPS_PER_WARP_US)
"""The same with 8-row blocks as the B operand."""

CUDA_CORES: Final = Consumer(0.14, 6.5, 0.06, 33.4e3, 0.4, _FLOPS_PER_WARP_US)
"""K split over the warps, converts and shuffles per row."""

STREAM_ONLY: Final = Consumer(0.0, 0.8, 0.0, 1e6, 0.4, _FLOPS_PER_WARP_US)
"""Frees the ring without looking at it: what the memory and the hand-offs alone cost."""


@dataclass(frozen=True, slots=True)
class Vector:
    """What the warps that do not multiply add to a task, in us."""

    task_us: float = 0.0
    """Fetching a task and signalling its end."""
    step_us: float = 0.0
    """A step that is none of the following, and no product."""
    norm_us: float = 0.0
    """A norm."""
    merge_us: float = 0.0
    """One head of one partial of attention that is merged, on one warp."""
    attend_us: float = 0.0
    """A thousand operations of attention, on one warp."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Constants of one GPU. Rates are GB/s, times us; `source` says whether they were measured on such a card, scaled
    from one that was, or fitted to what programs took."""

    name: str
    source: Literal["measured", "scaled", "calibrated"]
    num_sms: int
    read_gbs: float
    """Best rate at which all SMs together read HBM."""
    sm_read_gbs: float
    """What one SM can draw alone."""
    activation_gbs: float
    """Rate at which one SM reads activations from L2."""
    copy_us: float
    """Time of the loader to issue one copy of a chunk and recycle its slot: what makes small chunks slow."""
    in_flight_us: float
    """Loaded latency: an SM draws at most its ring's bytes per `in_flight_us`."""
    latency_us: float
    """From issuing a copy to its first byte, where nothing was prefetched."""
    visibility_us: float
    """From the last signal until those who wait for it go on."""
    data_visibility_us: float
    """The same where no counter is between, and those who wait look at what is written."""
    bubble_us: float
    """Weight stream of an SM that a blocking wait loses, however full the ring is."""
    poll_us: float
    """Wait that finds its counter complete."""
    launch_us: float
    """Launch, the first bytes and the final drain."""
    consumer: Consumer
    vector: Vector = Vector()
    restage_share: float = 1.0
    """Of what staging an operand takes, the part for a task that multiplies the operand of the task before it."""
    round_trip_us: float = 0.0
    """An SM draws at most its copies under way per this time; 0: that is not what holds it back."""

    @property
    def share(self) -> float:
        """Bytes per us of one SM when all read."""
        return self.read_gbs * 1e3 / self.num_sms

    def loader_rate(self, chunk_bytes: int, ring_bytes: int, inflight_bytes: int | None = None) -> float:
        """Most bytes per us that the loader of one SM can bring in, with at most `inflight_bytes` under way at once."""
        rate = min(self.sm_read_gbs * 1e3, chunk_bytes / self.copy_us, ring_bytes / self.in_flight_us)
        if inflight_bytes is None or self.round_trip_us == 0.0:
            return rate
        return min(rate, inflight_bytes / self.round_trip_us)

    @property
    def in_flight_bytes(self) -> float:
        """Bytes in flight an SM that saturate the memory."""
        return self.share * self.in_flight_us


_H200: Final = Machine(
    name="h200",
    source="measured",
    num_sms=132,
    read_gbs=4611.0,
    sm_read_gbs=100.0,
    activation_gbs=100.0,
    copy_us=0.376,
    in_flight_us=1.876,
    latency_us=1.0,
    visibility_us=1.2,
    data_visibility_us=0.4,
    bubble_us=2.2,
    poll_us=0.1,
    launch_us=8.0,
    consumer=MMA,
    vector=Vector(step_us=0.35, merge_us=0.1),
)

_H200_TARGET: Final = TARGETS["h200"]
_READ_SHARE: Final = _H200.read_gbs / _H200_TARGET.hbm_bandwidth_gbs
_READ_SHARE_WITHOUT_BULK_COPIES: Final = 0.92


def _scaled(target: GpuTarget) -> Machine:
    clock = target.clock_ghz / _H200_TARGET.clock_ghz if target.clock_ghz else 1.0
    bulk = target.sm_arch >= BULK_COPY_ARCH
    consumer = replace(MMA, bytes_per_us=MMA.bytes_per_us * clock, flops_per_warp_us=MMA.flops_per_warp_us * clock)
    return replace(
        _H200,
        name=target.name,
        source="scaled",
        num_sms=target.num_sms,
        read_gbs=target.hbm_bandwidth_gbs * (_READ_SHARE if bulk else _READ_SHARE_WITHOUT_BULK_COPIES),
        sm_read_gbs=_H200.sm_read_gbs * clock,
        activation_gbs=_H200.activation_gbs * clock,
        consumer=consumer,
    )


MACHINES: Final = MappingProxyType(
    {name: _H200 if name == _H200.name else _scaled(target) for name, target in TARGETS.items()}
)
"""Constants of every built-in GPU by name."""


def machine_for(target: GpuTarget) -> Machine:
    """Constants of `target`: the table's where it is a built-in GPU unchanged, otherwise scaled from its numbers."""
    return MACHINES[target.name] if TARGETS.get(target.name) == target else _scaled(target)
