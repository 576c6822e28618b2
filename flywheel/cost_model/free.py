"""The constants of a machine that a fit may move, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


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
    Free("consumer.warp_us", 0.0, 0.4),
    Free("consumer.chunk_us", 0.0, 1.0),
    Free("consumer.bytes_per_us", 2e3, 5e5),
    Free("consumer.half_warps", 0.0, 20.0),
    Free("consumer.fp8_times", 0.5, 40.0),
    Free("consumer.int8_times", 0.5, 40.0),
    Free("consumer.int4_times", 0.5, 40.0),
    Free("vector.task_us", 0.0, 3.0),
    Free("vector.ahead_us", 0.0, 4.0),
    Free("vector.fetch_us", 0.0, 3.0),
    Free("vector.slice_us", 0.0, 2.0),
    Free("vector.step_us", 0.0, 2.0),
    Free("vector.norm_us", 0.0, 4.0),
    Free("vector.merge_us", 0.0, 1.0),
    Free("vector.attention_us", 0.0, 8.0),
    Free("vector.attend_us", 0.0, 1.0),
    Free("vector.cache_us", 0.0, 4.0),
)
"""The constants that a fit moves, in us, GB/s or bytes per us."""
