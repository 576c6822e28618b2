"""What a card itself was measured to do: the bounds that its schedules run against."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One probing of a GPU. `read_gbs` is the best rate at which any plain kernel read its memory, `read_kernel` says
    which, `hand_off_us` the time from a signal on one SM to the SM that waits for it having seen it.

    `gpu` is the name by its driver, `created_at` ISO 8601 in UTC. Raises ValueError unless both numbers are finite and
    positive.
    """

    gpu: str
    gpu_driver: str | None
    host: str
    read_gbs: float
    read_kernel: str
    hand_off_us: float
    created_at: str

    def __post_init__(self) -> None:
        for name in ("read_gbs", "hand_off_us"):
            value = getattr(self, name)
            if not (value > 0.0 and isfinite(value)):
                raise ValueError(f"ceiling of {self.gpu}: {name} {value} is not finite and positive")
