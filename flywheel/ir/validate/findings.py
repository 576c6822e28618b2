"""The result of validation: findings with a code, a message and the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from flywheel.ir.show import one_line

CODES: Final = MappingProxyType(
    {
        "not-a-program": "the object is not a MegakernelProgram, or a field of it has the wrong type",
        "duplicate-id": "two records of one kind have the same id",
        "bad-id": "an id is not a non-negative int",
        "bad-enum": "a code that is not a member of its enumeration",
        "bad-shape": "rank or dims that are not 1..4 positive ints",
        "counter-init": "a counter that does not start at zero",
        "unknown-buffer": "an operand that names no buffer",
        "unknown-counter": "a wait or signal that names no counter",
        "arity": "more or fewer operands than the opcode takes",
        "abi-limit": "more operands, waits or dims than the on-device structs hold",
        "missing-param": "a required param is absent",
        "bad-param": "a param of the wrong type, NaN, or outside its range",
        "bad-recipe": "a FUSED recipe that cannot be interpreted",
        "readonly-write": "a task writes a WEIGHT, CONST or IO_INPUT",
        "operand-size": "an operand or a result that is not as large as its operation has it",
        "operand-type": "an operand or a result of a dtype or kind that its operation does not take",
        "tile-bounds": "a tile reaches past its buffer",
        "kv-bounds": "a KV window or append reaches past its cache",
        "kv-sequence": "a KV cache whose tasks move with the positions of several sequences",
        "kv-lane": "a KV cache of several lanes that a task does not append one row to, or read up to its own row",
        "kv-window": "a task with a window that does not stand at the program's position, or that reads no KV cache",
        "kv-target": "a KV_APPEND whose cache operand is not the output that it writes",
        "smem-limit": "a config whose block has more shared memory than a block can opt into on the target",
        "sm-range": "an SM index outside the target",
        "rank-range": "a rank that the program does not have, or that has no task",
        "remote-access": "an operand on another GPU that is no push's output, or a push to its own",
        "remote-counter": "a counter that several GPUs await, or that another GPU signals and not by a push",
        "push-again": "an element that a peer pushes and that is written more than once a launch",
        "push-unread": "an element that is pushed and that nothing on its GPU awaits and reads",
        "collective": "GPUs that do not run the same exchanges, or shards that are not added in the order of ranks",
        "unsatisfiable-wait": "a threshold that its producers can never reach",
        "partial-join": "a wait for some but not all producers of a counter",
        "cycle": "tasks that wait for each other",
        "queue-deadlock": "serial SM queues that block for ever",
        "unwritten-read": "a read of a buffer that nothing else writes",
        "race-read": "a read that is in no order with a write of the same columns, or before all of them",
        "race-write": "two writes of the same columns that are not ordered",
        "missing-output": "an IO_OUTPUT that nothing writes",
        "per-sm-buffer": "an SMEM or REGISTER buffer used from more than one SM",
        "bad-page": "a page that is missing, too small or not for this buffer",
        "page-alias": "a page reused while a task may still use its former buffer",
        "partial-write": "columns of a buffer that are read but never written",
        "unknown-param": "a param that the on-device struct does not hold",
        "gpu-label": "meta.gpu is not the target's name",
    }
)
"""Code of a finding -> its meaning."""

STRICT_CODES: Final = frozenset({"page-alias", "partial-write", "unknown-param"})
"""Warnings that strict validation turns into errors."""

MAX_FINDINGS: Final = 100
"""Errors after which a family of rules stops looking."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken rule. `task` is the id of the task that breaks it; None where no single task does."""

    code: str
    message: str
    task: int | None = None

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The verdict on a program. A program that is not `ok` must not be launched."""

    ok: bool
    errors: tuple[Finding, ...] = ()
    warnings: tuple[Finding, ...] = ()
    stats: Mapping[str, int] = field(default_factory=dict)

    def report(self) -> str:
        """The result as text: verdict, stats, errors, warnings."""
        stats = ", ".join(f"{name} {value}" for name, value in self.stats.items())
        lines = ["ACCEPTED" if self.ok else "REJECTED", *([f"  {stats}"] if stats else [])]
        lines += [f"  error {finding}" for finding in self.errors]
        lines += [f"  warning {finding}" for finding in self.warnings]
        return "\n".join(lines)


class Findings:
    """Collects findings from the rules."""

    __slots__ = ("_warned", "errors", "strict", "warnings")

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.errors: list[Finding] = []
        self.warnings: list[Finding] = []
        self._warned: dict[str, int] = {}

    def error(self, code: str, message: str, task: int | None = None) -> None:
        """Record a broken rule."""
        self.errors.append(Finding(code, one_line(message), task))

    def warn(self, code: str, message: str, task: int | None = None) -> None:
        """Record a warning; with strict validation, an error for some codes. Of each code, the first MAX_FINDINGS are
        kept."""
        self._warned[code] = self._warned.get(code, 0) + 1
        if self._warned[code] <= MAX_FINDINGS:
            found = self.errors if self.strict and code in STRICT_CODES else self.warnings
            found.append(Finding(code, one_line(message), task))

    def enough(self, code: str) -> bool:
        """Whether warnings of this code are no longer recorded."""
        return self._warned.get(code, 0) >= MAX_FINDINGS

    @property
    def full(self) -> bool:
        """Whether a family of rules should stop."""
        return len(self.errors) >= MAX_FINDINGS
