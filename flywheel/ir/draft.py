"""Building tasks by the ten thousand. The only mutable record of the IR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.records import Task, Wait


@dataclass(slots=True)
class TaskDraft:
    """A task before it is frozen: the same slots, but plain assignment where a frozen dataclass pays for a guard."""

    id: int
    op: InstructionKind
    inputs: Sequence[int]
    outputs: Sequence[int]
    out_counter: int
    waits: Sequence[Wait]
    params: Mapping[str, Any]
    sm: int | None
    est_bytes: int
    est_flops: int
    label: str

    def freeze(self) -> Task:
        """This object, from now on a Task; the draft is gone."""
        self.__class__ = Task  # type: ignore[assignment]
        return cast(Task, self)
