"""The cost of a GPU and of the kernel's inner loops: the constants of the prediction, in one table.

The H200's constants are fitted. `flywheel calibrate` moved them until predictions agreed with a part of the measured
campaigns: at most 50 configs of each model and format of weights, random and searched ones. All but three were fitted
to results/archive/h200/calibration.tsv, and after them `fp8_times`, `int8_times` and `int4_times` to
results/gpu/calibration.tsv. The two tables have the same bf16 rows; the first has quantised rows of older kernels.
results/calibration.txt has the errors of the configs that were held back. `sm_read_gbs` and `poll_us` are estimates.
The campaigns show:

- The loader fills `copies` slots of its ring at once, when all of them are free and the chunk `inflight_chunks` before
  the last has landed. So ring and bytes in flight count in whole rounds of copies: four copies of 16 KiB and 96 KiB in
  flight are one round of 64 KiB.
- A loader that stood still behind a full ring brings no bytes until slots are freed and new copies have landed.
- Few vector warps fetch activations, keys and values in many rounds of loads (`fetch_us`, `attend_us`).
- Activations that many SMs read at once arrive slower, by the number of readers (`shared_gbs`): merging partials in 128
  tiles of o costs more than in 64.
- A hand-off takes longer while the memory is busy (`crowd_us`).
- Keys, values and norms' weights are loaded while a task waits (`ahead_us`, `cache_us`). If a task comes late, these
  loads are not hidden.

Constants that can stand for each other are not separated: a hand-off by the data, for example, is `data_visibility_us`
and `crowd_us`. A task, a step, a norm, a merge of partials and an attention have no time of their own: every fit set it
to 0. `read_gbs` is the rest of the card's own read rate when everything else goes on. The
other GPUs are scaled from the H200, and not measured:

- `read_gbs` is the same share of the datasheet's bandwidth as on the H200, and 96 % of that share on architectures
  without bulk copies (before sm_90), where every thread of the loader issues its own 16-byte copies.
- Rates of one SM scale with its clock.
- Latencies, hand-offs, barriers and launches keep the H200's times, since round trips dominate them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType
from typing import Final, Literal

from flywheel.cost_model.links import NVLINK, Link
from flywheel.ir.dtype import DType
from flywheel.ir.target import TARGETS, GpuTarget
from flywheel.plan import KernelVariant
from flywheel.plan.kernels import BULK_COPY_ARCH


@dataclass(frozen=True, slots=True)
class Consumer:
    """The loop that turns streamed bytes into outputs, on `warps` warps of one SM.

    Groups of matrix warps take chunks in turn, each in `chunk_us` besides its bytes. The byte rate saturates with the
    number of warps: it is half of `bytes_per_us` at `half_warps`. Arithmetic outside the tensor cores runs at
    `flops_per_warp_us` per warp, at the same time as the bytes. A warp decodes quantised weights before it multiplies
    them. For these, the part of the time that more warps shorten is `fp8_times`, `int8_times` or `int4_times` that of
    BF16's bytes.
    """

    chunk_us: float
    bytes_per_us: float
    half_warps: float
    flops_per_warp_us: float
    fp8_times: float
    int8_times: float
    int4_times: float

    def chunks_us(self, nbytes: int, variant: KernelVariant, codes: Sequence[DType] = ()) -> float:
        """The time for the chunks of `nbytes` bytes of matrices, quantised to `codes`."""
        rounds = ceil(nbytes / variant.chunk_bytes / variant.chunk_groups)
        own = min(nbytes, rounds * variant.chunk_bytes) * self.half_warps / variant.chunk_warps
        own *= max([self._times(each) for each in codes], default=1.0)
        return rounds * self.chunk_us + (nbytes + own) / self.bytes_per_us

    def _times(self, codes: DType) -> float:
        return {DType.F8E4M3: self.fp8_times, DType.I8: self.int8_times, DType.I4: self.int4_times}[codes]


_FLOPS_PER_WARP_US: Final = 36e3
"""Rate of one warp of an H200 in an attention: 0.45 us for 16 more tokens of 64 values and 4 heads, all FMAs."""

VM: Final = Consumer(0.3798, 207.9e3, 0.7718, _FLOPS_PER_WARP_US, 5.967, 3.938, 11.86)
"""The matrix warps of the CUDA VM: weights packed in fragment order as the A operand of `mma.m16n8k16`."""


@dataclass(frozen=True, slots=True)
class Vector:
    """The time that the vector warps add to a task, in us."""

    ahead_us: float = 0.0
    """Work of a task that does not need others' results, done while it waits: fetching its words and its norms'
    weights."""
    fetch_us: float = 0.0
    """A round of activations that a task's warps load at once."""
    slice_us: float = 0.0
    """A further slice of a multiplied input."""
    attend_us: float = 0.0
    """A round of keys and values that its warps attend to at once."""
    cache_us: float = 0.0
    """A thousand bytes of keys and values, on their way to L2 before the queries are there."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The constants of one GPU. Rates are in GB/s, times in us. `source` is measured on such a card, scaled from
    another card, or calibrated from programs' times."""

    name: str
    source: Literal["measured", "scaled", "calibrated"]
    num_sms: int
    read_gbs: float
    """Best rate at which all SMs together read HBM."""
    sm_read_gbs: float
    """Rate at which one SM alone can read."""
    shared_gbs: float
    """Rate at which all SMs together read the same activations, which are in few places."""
    copy_us: float
    """Time of the loader to issue a copy of a chunk and recycle its slot. It makes small chunks slow."""
    more_copies_us: float
    """Additional time for each further copy that it issues at once."""
    round_trip_us: float
    """Time from a copy's issue until it has landed. It limits the rate when few copies are in flight. A loader that has
    stopped brings no bytes for this time."""
    visibility_us: float
    """Time from the last signal until its waiters go on."""
    data_visibility_us: float
    """The same time without a counter, where the waiters poll the data."""
    crowd_us: float
    """How much longer both hand-offs take while all of the memory's bandwidth is in use."""
    poll_us: float
    """Time of a wait that finds its counter complete."""
    launch_us: float
    """Launch, the first bytes and the final drain."""
    consumer: Consumer
    vector: Vector = Vector()
    restage_share: float = 1.0
    """Share of the time of staging an operand that remains for a task with the same operand as the task before it."""
    link: Link | None = None
    """The link to another such GPU, as probed; None where none was, and NVLINK stands for it."""

    @property
    def assumed_link(self) -> Link:
        """The link that predictions of several GPUs have."""
        return self.link or NVLINK

    @property
    def share(self) -> float:
        """Bytes per us of one SM when all SMs read."""
        return self.read_gbs * 1e3 / self.num_sms

    def loader_rate(self, variant: KernelVariant) -> float:
        """The largest bytes per us of one SM's loader.

        It fills `copies` slots at once, and only when the chunk `inflight_chunks` before the last of them has landed.
        """
        at_once, rounds = variant.copies * variant.chunk_bytes, variant.inflight_chunks // variant.copies
        issue_us = self.copy_us + (variant.copies - 1) * self.more_copies_us
        return min(self.sm_read_gbs * 1e3, at_once / issue_us, rounds * at_once / (issue_us + self.round_trip_us))

    def restart_us(self, variant: KernelVariant) -> float:
        """The time from when consumers free slots of a full ring until new bytes arrive."""
        freed_us = self.consumer.chunks_us(variant.copies * variant.chunk_bytes, variant)
        return freed_us + self.round_trip_us


_H200: Final = Machine(
    name="h200",
    source="measured",
    num_sms=132,
    read_gbs=4341.0,
    sm_read_gbs=100.0,
    shared_gbs=28650.0,
    copy_us=0.5332,
    more_copies_us=0.05566,
    round_trip_us=0.6159,
    visibility_us=3.143,
    data_visibility_us=1.261,
    crowd_us=0.7538,
    poll_us=0.1,
    launch_us=1.0,
    restage_share=0.1905,
    consumer=VM,
    vector=Vector(
        ahead_us=2.094,
        fetch_us=0.8958,
        slice_us=0.7291,
        attend_us=0.8726,
        cache_us=0.04105,
    ),
)

_H200_TARGET: Final = TARGETS["h200"]
_READ_SHARE: Final = _H200.read_gbs / _H200_TARGET.hbm_bandwidth_gbs
_READ_SHARE_WITHOUT_BULK_COPIES: Final = 0.96 * _READ_SHARE


def _scaled(target: GpuTarget) -> Machine:
    clock = target.clock_ghz / _H200_TARGET.clock_ghz if target.clock_ghz else 1.0
    bulk = target.sm_arch >= BULK_COPY_ARCH
    consumer = replace(VM, bytes_per_us=VM.bytes_per_us * clock, flops_per_warp_us=VM.flops_per_warp_us * clock)
    return replace(
        _H200,
        name=target.name,
        source="scaled",
        num_sms=target.num_sms,
        read_gbs=target.hbm_bandwidth_gbs * (_READ_SHARE if bulk else _READ_SHARE_WITHOUT_BULK_COPIES),
        sm_read_gbs=_H200.sm_read_gbs * clock,
        shared_gbs=_H200.shared_gbs * clock,
        consumer=consumer,
    )


MACHINES: Final = MappingProxyType(
    {name: _H200 if name == _H200.name else _scaled(target) for name, target in TARGETS.items()}
)
"""Constants of every built-in GPU by name."""


def machine_for(target: GpuTarget) -> Machine:
    """The constants of `target`: the table's for an unchanged built-in GPU, otherwise scaled from its numbers."""
    return MACHINES[target.name] if TARGETS.get(target.name) == target else _scaled(target)


@dataclass(frozen=True, slots=True)
class Free:
    """A constant that a fit may move from `low` to `high`: a field of Machine, or of a part of it by `part.field`."""

    name: str
    low: float
    high: float


FREE: Final = (
    Free("read_gbs", 50.0, 20000.0),
    Free("shared_gbs", 50.0, 50000.0),
    Free("copy_us", 0.05, 2.0),
    Free("more_copies_us", 0.0, 0.5),
    Free("round_trip_us", 0.2, 6.0),
    Free("visibility_us", 0.2, 5.0),
    Free("data_visibility_us", 0.0, 3.0),
    Free("crowd_us", 0.0, 4.0),
    Free("launch_us", 1.0, 60.0),
    Free("restage_share", 0.0, 1.0),
    Free("consumer.chunk_us", 0.0, 1.0),
    Free("consumer.bytes_per_us", 2e3, 5e5),
    Free("consumer.half_warps", 0.0, 20.0),
    Free("consumer.fp8_times", 0.5, 40.0),
    Free("consumer.int8_times", 0.5, 40.0),
    Free("consumer.int4_times", 0.5, 40.0),
    Free("vector.ahead_us", 0.0, 4.0),
    Free("vector.fetch_us", 0.0, 3.0),
    Free("vector.slice_us", 0.0, 2.0),
    Free("vector.attend_us", 0.0, 1.0),
    Free("vector.cache_us", 0.0, 4.0),
)
"""The constants that a fit moves, in us, GB/s or bytes per us."""
