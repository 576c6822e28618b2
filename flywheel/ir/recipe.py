"""Building FUSED recipes step by step. Grammar: docs/ir.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flywheel.ir.dtype import DType
from flywheel.ir.opcodes import InstructionKind

Arg = dict[str, int]


class RecipeBuilder:
    """Collects the steps of one recipe and the names of its operands, in order of first use."""

    __slots__ = ("_slots", "inputs", "steps")

    def __init__(self, inputs: Sequence[str] = ()) -> None:
        self.inputs: list[str] = list(inputs)
        self.steps: list[dict[str, Any]] = []
        self._slots = 0

    def operand(self, name: str) -> Arg:
        """The arg that reads operand `name`."""
        if name not in self.inputs:
            self.inputs.append(name)
        return {"in": self.inputs.index(name)}

    def step(
        self,
        op: InstructionKind,
        args: Sequence[Arg],
        width: int,
        dtype: DType,
        params: Mapping[str, Any] | None = None,
        out: str | Mapping[str, int] | None = None,
        rows: int = 1,
    ) -> Arg:
        """Append a step with a `[rows, width]` result. Returns the arg that reads the result.

        `out` is "final", {"out": k}, or None for scratch.
        """
        self.steps.append(
            {
                "op": op.name,
                "args": list(args),
                "out": self._slots if out is None else out,
                "params": dict(params or {}),
                "out_shape": [rows, width],
                "out_dtype": dtype.name,
            }
        )
        self._slots += out is None
        return {"s": self._slots - 1}

    def columns(self, name: str, start: int, width: int, dtype: DType) -> Arg:
        """The arg that reads columns `start`..`start + width` of operand `name`."""
        params = {"n_off": start, "N_tile": width}
        return self.step(InstructionKind.COPY, [self.operand(name)], width, dtype, params)

    def build(self) -> dict[str, Any]:
        """The recipe."""
        return {"steps": self.steps}
