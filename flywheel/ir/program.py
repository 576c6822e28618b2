"""MegakernelProgram: a complete schedule, ready to run once validated. Source: docs/ir.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flywheel.ir.config import ScheduleConfig
from flywheel.ir.dtype import BufferKind
from flywheel.ir.records import Buffer, Counter, PageAllocation, Task
from flywheel.ir.target import GpuTarget
from flywheel.ir.version import ABI_VERSION, IR_VERSION


@dataclass(frozen=True, slots=True)
class MegakernelProgram:
    """Buffers, counters and tasks of one decode step; the list order of `tasks` is each SM's queue order."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    target: GpuTarget | None = None
    buffers: Sequence[Buffer] = ()
    counters: Sequence[Counter] = ()
    tasks: Sequence[Task] = ()
    pages: PageAllocation | None = None
    config: ScheduleConfig | None = None
    ir_version: str = IR_VERSION
    abi_version: str = ABI_VERSION

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready dict, enums by name."""
        from flywheel.ir.serde import program_to_dict

        return program_to_dict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """The on-disk format; the same program always gives the same text."""
        from flywheel.ir.serde import dump_json

        return dump_json(self.to_dict(), indent)

    def save(self, path: str | Path) -> None:
        """Write the JSON to `path`, replacing it atomically."""
        from flywheel.ir.serde import write_atomically

        write_atomically(Path(path), self.to_json() + "\n")

    @staticmethod
    def from_dict(data: object) -> MegakernelProgram:
        """Read a program; unknown fields are dropped. Raises IrFormatError."""
        from flywheel.ir.serde import program_from_dict

        return program_from_dict(data)

    @staticmethod
    def from_json(text: str | bytes) -> MegakernelProgram:
        """Read a program from JSON text. Raises IrFormatError."""
        from flywheel.ir.serde import parse_json

        return MegakernelProgram.from_dict(parse_json(text))

    @staticmethod
    def load(path: str | Path) -> MegakernelProgram:
        """Read a program file. Raises IrFormatError that names the file, also where it cannot be read."""
        from flywheel.ir.serde import read_program

        return read_program(Path(path))

    def total_weight_bytes(self) -> int:
        """Bytes of all WEIGHT buffers, whether this step reads them whole or not."""
        return sum(buffer.nbytes for buffer in self.buffers if buffer.kind is BufferKind.WEIGHT)

    def dependency_edges(self) -> set[tuple[int, int]]:
        """(producer, consumer) task ids: each producer of a counter precedes each task that waits on it."""
        from flywheel.ir.dag import dependency_edges

        return dependency_edges(self)

    def topological_order(self) -> list[int] | None:
        """Task ids in an order that respects every wait, or None where there is none."""
        from flywheel.ir.dag import topological_order

        return topological_order(self)

    def simulate_counters(self) -> tuple[list[int], list[int]]:
        """(ids in firing order, ids that never fire), ignoring SM queues."""
        from flywheel.ir.simulate import simulate_counters

        return simulate_counters(self)

    def simulate_adversarial(self, seeds: int = 16) -> list[str]:
        """Race violations seen over `seeds` worst-case firing orders."""
        from flywheel.ir.simulate import simulate_adversarial

        return simulate_adversarial(self, seeds)
