"""Checks types, ids and references. After this pass every field has exactly the type of its annotation.

Only plain types pass: a subclass of dict, list, int or a record could run its own code when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import isfinite, prod
from operator import attrgetter
from typing import Any, Final

from flywheel.ir.compressed import Runs, distinct_tasks
from flywheel.ir.config import ScheduleConfig
from flywheel.ir.dtype import BufferKind, DType, MemSpace
from flywheel.ir.opcodes import InstructionKind
from flywheel.ir.program import MegakernelProgram
from flywheel.ir.records import Buffer, Counter, Page, PageAllocation, Task, Wait
from flywheel.ir.show import show
from flywheel.ir.target import GpuTarget
from flywheel.ir.validate.findings import Findings
from flywheel.ir.version import ABI_MAX_RANK, MAX_RANKS

INT32: Final = 2**31
INT64: Final = 2**63
MAX_NUMEL: Final = 2**40
"""Most elements of a buffer; no GPU has so much memory."""
MAX_EST_BYTES: Final = 2**40
MAX_EST_FLOPS: Final = 2**50
"""Largest estimate of one task's bytes or operations, so that the sum over any file's tasks fits an int64."""
MAX_SMS: Final = 2**16


@dataclass(frozen=True, slots=True)
class Rule:
    """The values that one field of a record may have: exact types, a range of numbers, and a check of each distinct
    object."""

    field: str
    types: frozenset[type]
    wanted: str
    code: str = "not-a-program"
    low: int | None = None
    high: int = INT64 - 1
    each: Callable[[Any], bool] | None = None

    def accepts(self, value: Any) -> bool:
        """Whether one value follows the rule."""
        return self.accepts_all([value])

    def accepts_all(self, column: Sequence[Any]) -> bool:
        """Whether all values follow the rule. It is fast where many values are one object."""
        found = set(map(type, column))
        if not found <= self.types:
            return False
        if self.low is not None:
            numbers = [value for value in column if value is not None] if _NONE in found else column
            if numbers and not (self.low <= min(numbers) and max(numbers) <= self.high):
                return False
        return self.each is None or all(map(self.each, dict(zip(map(id, column), column, strict=True)).values()))


def check_structure(program: object, findings: Findings) -> bool:
    """Check the structure; whether the later passes may rely on the types of `program`."""
    if type(program) is not MegakernelProgram or not is_complete(program):
        findings.error("not-a-program", f"expected a complete MegakernelProgram, got {show(program)}")
        return False
    tables: list[tuple[str, object, type]] = [
        ("buffer", program.buffers, Buffer),
        ("counter", program.counters, Counter),
        ("task", distinct_tasks(program.tasks), Task),
    ]
    if _header(program, findings) and program.pages is not None:
        tables.append(("page", program.pages.pages, Page))
    for name, records, kind in tables:
        if _records(name, records, kind, findings):
            shared = _distinct_tasks(records) if kind is Task else None  # type: ignore[arg-type]
            for rule in RULES[kind]:
                if shared is None or rule.field not in _SHARED or not _keeps(shared, rule):
                    _check_field(name, records, rule, findings)  # type: ignore[arg-type]
    if not findings.errors:
        for name, records, kind in tables:
            if kind is not Task or len(records) == len(program.tasks):  # type: ignore[arg-type]
                _unique(name, records, findings)  # type: ignore[arg-type]
    return not findings.errors


def is_complete(program: MegakernelProgram) -> bool:
    """Whether every field of a program is set."""
    return _complete(program, MegakernelProgram)


def _header(program: MegakernelProgram, findings: Findings) -> bool:
    """Check everything but the tables. Returns whether the page table can be checked."""
    _check_record("program", program, MegakernelProgram, findings)
    for name, kind in (("target", GpuTarget), ("config", ScheduleConfig), ("pages", PageAllocation)):
        record = getattr(program, name)
        if record is None:
            continue
        if type(record) is not kind or not _complete(record, kind):
            findings.error("not-a-program", f"{name}: expected a {kind.__name__}, got {show(record)}")
            return False
        _check_record(name, record, kind, findings)
    if not findings.errors:
        _check_shared_memory(program, findings)
    return True


def _check_shared_memory(program: MegakernelProgram, findings: Findings) -> None:
    config, target = program.config, program.target
    if config is None:
        return
    asked, most = config.smem_bytes_per_block, INT32 if target is None else target.smem_bytes_per_block_optin
    if not 0 <= asked <= most:
        where = "" if target is None else f" ({show(target.name)})"
        findings.error("smem-limit", f"config: smem_bytes_per_block={asked} is not in 0..{most}{where}")


def _check_record(name: str, record: object, kind: type, findings: Findings) -> None:
    for rule in RULES[kind]:
        value = getattr(record, rule.field)
        if not rule.accepts(value):
            findings.error(rule.code, f"{name}: {rule.field}={show(value)} is not {rule.wanted}")


def _records(name: str, records: object, kind: type, findings: Findings) -> bool:
    """Whether `records` is a plain sequence of `kind` records."""
    if type(records) not in (tuple, list):
        findings.error("not-a-program", f"{name}s: expected a list, got {show(records)}")
        return False
    items: Sequence[object] = records  # type: ignore[assignment]
    if not set(map(type, items)) <= {kind}:
        index = next(index for index, item in enumerate(items) if type(item) is not kind)
        findings.error("not-a-program", f"{name}s[{index}]: expected a {kind.__name__}, got {show(items[index])}")
        return False
    return True


def _distinct_tasks(tasks: Sequence[Task]) -> list[Task] | None:
    """One task for each combination of the fields in _SHARED; None where a field was never set."""
    try:
        keys = [(id(t.op), id(t.inputs), id(t.outputs), id(t.waits), id(t.label)) for t in tasks]
    except AttributeError:
        return None
    return list(dict(zip(keys, tasks, strict=True)).values())


def _keeps(tasks: Sequence[Task], rule: Rule) -> bool:
    """Whether all the tasks follow the rule of a field in _SHARED."""
    return rule.accepts_all(list(map(attrgetter(rule.field), tasks)))


def _complete(record: object, kind: type) -> bool:
    """Whether every field is set; an object made by `__new__` alone has none."""
    return all(hasattr(record, rule.field) for rule in RULES[kind])


def _check_field(name: str, records: Sequence[Any], rule: Rule, findings: Findings) -> None:
    """Apply one rule to one field of every record."""
    try:
        column = list(map(attrgetter(rule.field), records))
    except AttributeError:
        findings.error("not-a-program", f"{name}s: {rule.field} of a record was never set")
        return
    if rule.accepts_all(column):
        return
    for index, value in enumerate(column):
        if not rule.accepts(value):
            number = getattr(records[index], "id", None)
            findings.error(
                rule.code,
                f"{name} {show(number)}: {rule.field}={show(value)} is not {rule.wanted}",
                number if name == "task" and type(number) is int and 0 <= number < INT32 else None,
            )
            if findings.full:
                return


def _unique(name: str, records: Sequence[Any], findings: Findings) -> None:
    if len({record.id for record in records}) == len(records):
        return
    seen: set[int] = set()
    for record in records:
        if record.id in seen:
            findings.error(
                "duplicate-id", f"{name} id {record.id} is used twice", record.id if name == "task" else None
            )
            if findings.full:
                return
        seen.add(record.id)


def _ints(value: Any) -> bool:
    for number in value:  # noqa: SIM110  a loop is twice as fast as all() here
        if type(number) is not int or not -INT64 <= number < INT64:
            return False
    return True


def _names(value: Any) -> bool:
    for name in value:  # noqa: SIM110
        if type(name) is not str:
            return False
    return True


def _shape(value: Any) -> bool:
    return (
        1 <= len(value) <= ABI_MAX_RANK
        and all(type(dim) is int and 0 < dim < INT64 for dim in value)
        and prod(value) <= MAX_NUMEL
    )


def _is_part(value: Any) -> bool:
    if value is None:
        return True
    return len(value) == 2 and _ints(value) and 0 <= value[0] < ABI_MAX_RANK and 0 <= value[1] < INT32


def _waits(value: Any) -> bool:
    for wait in value:
        if type(wait) is not Wait:
            return False
        try:
            counter, threshold = wait.counter, wait.threshold
        except AttributeError:  # never set
            return False
        if type(counter) is not int or not -INT64 <= counter < INT64:
            return False
        if type(threshold) is not int or not -INT64 <= threshold < INT64:
            return False
    return True


def _ids_to_ids(value: Any) -> bool:
    return all(type(number) is int and 0 <= number < INT32 for pair in value.items() for number in pair)


def _assignment(value: Any) -> bool:
    return type(value) is str or _ids_to_ids(value)


def _groups(value: Any) -> bool:
    return all(type(group) in (tuple, list) and _names(group) for group in value)


def _tiling(value: Any) -> bool:
    return _names(value) and all(
        type(sizes) is dict and _names(sizes) and _ints(sizes.values()) for sizes in value.values()
    )


def _positive(value: Any) -> bool:
    return value > 0 and isfinite(value)


def _int(field: str, wanted: str, code: str = "not-a-program", low: int = -INT64, high: int = INT64 - 1) -> Rule:
    return Rule(field, frozenset({int}), wanted, code, low, high)


def _enum(field: str, kind: type[IntEnum]) -> Rule:
    return Rule(field, frozenset({kind}), f"a {kind.__name__}", "bad-enum")


_SHARED: Final = frozenset({"op", "inputs", "outputs", "waits", "label"})
"""Fields of a task that all tiles of a projection share as objects."""

_NONE: Final = type(None)
_DICT: Final = frozenset({dict})
_LIST: Final = frozenset({tuple, list})
_TEXT: Final = frozenset({str})
_REAL: Final = frozenset({int, float})
_FLAG: Final = frozenset({bool})
_ID: Final = _int("id", "an int in 0..2^31 - 1", "bad-id", 0, INT32 - 1)
_RANK: Final = _int("rank", f"an int in 0..{MAX_RANKS - 1}", "rank-range", 0, MAX_RANKS - 1)


def _real(field: str) -> Rule:
    return Rule(field, _REAL, "a finite number", low=-INT64, each=isfinite)


RULES: Final[Mapping[type, tuple[Rule, ...]]] = {
    MegakernelProgram: (
        Rule("meta", _DICT, "an object", each=_names),
        Rule("ir_version", _TEXT, "a string"),
        Rule("abi_version", _TEXT, "a string"),
        _int("ranks", f"an int in 1..{MAX_RANKS}", "rank-range", 1, MAX_RANKS),
        *(Rule(name, _LIST, "a list") for name in ("buffers", "counters")),
        Rule("tasks", _LIST | {Runs}, "a list"),
        Rule("target", frozenset({GpuTarget, _NONE}), "a GpuTarget or null"),
        Rule("config", frozenset({ScheduleConfig, _NONE}), "a ScheduleConfig or null"),
        Rule("pages", frozenset({PageAllocation, _NONE}), "a PageAllocation or null"),
    ),
    Buffer: (
        _ID,
        Rule("name", _TEXT, "a string"),
        _enum("kind", BufferKind),
        _enum("dtype", DType),
        Rule("shape", _LIST, f"1..{ABI_MAX_RANK} positive ints of at most 2^40 elements", "bad-shape", each=_shape),
        _enum("space", MemSpace),
        Rule("source", _TEXT | {_NONE}, "a string or null"),
        _RANK,
        Rule("part", frozenset({tuple, _NONE}), "(axis, first place) or null", "bad-shape", each=_is_part),
    ),
    Counter: (
        _ID,
        _int("init", "0", "counter-init", 0, 0),
        Rule("note", _TEXT, "a string"),
    ),
    Task: (
        _ID,
        _enum("op", InstructionKind),
        Rule("inputs", _LIST, "a list of ints", each=_ints),
        Rule("outputs", _LIST, "a list of ints", each=_ints),
        _int("out_counter", "an int"),
        Rule("waits", _LIST, "a list of Wait", each=_waits),
        Rule("params", _DICT, "an object", each=_names),
        Rule("sm", frozenset({int, _NONE}), "an int or null", "sm-range", -INT64),
        _int("est_bytes", f"a count of at most {MAX_EST_BYTES:,}", "bad-param", 0, MAX_EST_BYTES),
        _int("est_flops", f"a count of at most {MAX_EST_FLOPS:,}", "bad-param", 0, MAX_EST_FLOPS),
        Rule("label", _TEXT, "a string"),
        _RANK,
    ),
    Page: (
        _ID,
        _enum("space", MemSpace),
        _int("nbytes", "a positive int", "bad-page", 1),
        _int("live_start", "an int", "bad-page"),
        _int("live_end", "an int", "bad-page"),
    ),
    PageAllocation: (
        Rule("buffer_to_page", _DICT, "a map from ids to ids", "bad-page", each=_ids_to_ids),
        Rule("pages", _LIST, "a list"),
    ),
    GpuTarget: (
        Rule("name", _TEXT, "a string"),
        *(
            _int(name, "a positive int", low=1)
            for name in (
                "sm_arch", "smem_bytes_per_sm", "smem_bytes_per_block_optin", "regs_per_sm",
                "max_threads_per_sm", "max_regs_per_thread",
            )
        ),
        _int("num_sms", f"an int in 1..{MAX_SMS}", low=1, high=MAX_SMS),
        *(_int(name, "a count", low=0) for name in ("l2_bytes", "hbm_bytes")),
        Rule("hbm_bandwidth_gbs", _REAL, "a finite number above 0", low=0, each=_positive),
        *(_real(name) for name in ("fp16_tflops", "clock_ghz")),
        *(Rule(name, _FLAG, "true or false") for name in ("supports_cooperative", "wddm_tdr")),
        Rule("note", _TEXT, "a string"),
    ),
    ScheduleConfig: (
        Rule("tiling", _DICT, "sizes by archetype", each=_tiling),
        Rule("fusion_grouping", _LIST, "lists of names", each=_groups),
        Rule("sm_assignment", _DICT | _TEXT, "a policy or a map from task ids to SMs", each=_assignment),
        *(_int(name, "an int") for name in ("pipelining_depth", "threads_per_block", "smem_bytes_per_block")),
        Rule("page_allocation", _TEXT, "a string"),
    ),
}  # fmt: skip
"""The rules of the fields of every record in a program."""
