"""What a card itself was measured to do: the bounds that its schedules run against."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flywheel.ir.show import show
from flywheel.measure.columns import fault_of


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One probing of a GPU. `read_gbs` is the best rate at which any plain kernel read its memory, `read_kernel` says
    which, `hand_off_us` the time from a signal on one SM to the SM that waits for it having seen it.

    `gpu` is the name by its driver, `created_at` ISO 8601 in UTC. Raises ValueError where a value is none that its
    column can hold (`columns.fault_of`).
    """

    gpu: str
    gpu_driver: str | None
    host: str
    read_gbs: float
    read_kernel: str
    hand_off_us: float
    created_at: str

    def __post_init__(self) -> None:
        for field in fields(self):
            kind = float if field.type == "float" else str
            fault = fault_of(field.name, kind, field.name == "gpu_driver", getattr(self, field.name))
            if fault is not None:
                raise ValueError(f"ceiling of {show(self.gpu)}: {field.name} {fault}")
