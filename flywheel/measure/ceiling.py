"""Measured limits of a card and of the links between a machine's GPUs, which bound its schedules."""

from __future__ import annotations

from dataclasses import dataclass, fields

from flywheel.ir.show import show
from flywheel.measure.columns import fault_of


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One probe of a GPU.

    `read_gbs` is the best rate at which a plain kernel read its memory, and `read_kernel` names that kernel.
    `hand_off_us` is the time from a signal on one SM until a waiting SM sees it. `gpu` is the driver's name, and
    `created_at` is ISO 8601 in UTC. Raises ValueError where a column cannot hold its value (`columns.fault_of`).
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


@dataclass(frozen=True, slots=True)
class PeerLink:
    """One probe of the link between GPU 0 and GPU `peer` of a machine, by CUDA's numbers; both are of the kind `gpu`.

    `one_way_us` is the time from a store of 512 bytes until the other GPU, which polls them, has them all, and
    `same_gpu_us` that time between two SMs of GPU 0. `to_gbs` and `from_gbs` are the rates of copies to the peer and
    from it, both at once. Raises ValueError where a column cannot hold its value (`columns.fault_of`).
    """

    gpu: str
    gpu_driver: str | None
    host: str
    peer: int
    one_way_us: float
    same_gpu_us: float
    to_gbs: float
    from_gbs: float
    created_at: str

    def __post_init__(self) -> None:
        kinds = {"float": float, "int": int}
        for field in fields(self):
            kind = kinds.get(str(field.type), str)
            fault = fault_of(field.name, kind, field.name == "gpu_driver", getattr(self, field.name))
            if fault is not None:
                raise ValueError(f"link of {show(self.gpu)}: {field.name} {fault}")
