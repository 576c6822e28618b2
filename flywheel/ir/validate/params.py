"""Types and ranges of scalar params."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, Final

from flywheel.ir.opcodes import LEAST, MAX_TABLE, POSITIVE, STEPS_ALONE, InstructionKind, KvRows
from flywheel.ir.records import Task
from flywheel.ir.show import show
from flywheel.ir.validate.findings import Findings
from flywheel.ir.version import ABI_MAX_ROWS
from flywheel.ir.window import first_row, rows_in_sight

_INT32: Final = 2**31
_FLOAT32: Final = (2.0 - 2.0**-23) * 2.0**127


def check_params(task: Task, fields: Mapping[str, str], required: Sequence[str], findings: Findings) -> None:
    """Check a task's params: required ones are present, and known ones have the right type and range. Unknown ones are
    warned of."""
    params = task.params
    for name in required:
        if name not in params:
            findings.error("missing-param", f"{_where(task)}: {task.op.name} needs param {name}", task.id)
    for name, value in params.items():
        kind = fields.get(name)
        if kind is not None:
            fault = param_fault(name, value, kind)
            if fault is not None:
                findings.error("bad-param", f"{_where(task)}: {fault}", task.id)
        elif name in STEPS_ALONE:
            findings.error("bad-param", f"{_where(task)}: {name} is a param of a recipe's step alone", task.id)
        elif name != "recipe" or task.op is not InstructionKind.FUSED:
            findings.warn("unknown-param", f"{_where(task)}: param {show(name)} does not reach the device", task.id)
    for fault in (_rows_fault(params), _window_fault(params)):
        if fault is not None:
            findings.error("bad-param", f"{_where(task)}: {fault}", task.id)


def _where(task: Task) -> str:
    return f"task {task.id} ({task.label})"


def param_fault(name: str, value: Any, kind: str) -> str | None:
    """The fault of one param, or None. `kind` is 'i' (int32), 'f' (real) or 't' (a table of reals)."""
    if kind == "t":
        return _table_fault(name, value)
    if kind == "i":
        if type(value) is not int:
            return f"{name}={show(value)} is not an int"
        if not -_INT32 <= value < _INT32:
            return f"{name}={show(value)} does not fit int32"
    elif not (type(value) is float and isfinite(value)) and not (type(value) is int and abs(value) < _INT32):
        return f"{name}={show(value)} is not a finite number"
    if name in LEAST and value < LEAST[name]:
        return f"{name}={value} is less than {LEAST[name]}"
    if name in POSITIVE and value <= 0:
        return f"{name}={value} is not greater than 0"
    if name in ("sequence", "lane") and value >= ABI_MAX_ROWS:
        return f"{name}={value} is not one of {ABI_MAX_ROWS}"
    return None


def _table_fault(name: str, value: Any) -> str | None:
    if type(value) is not tuple or not 1 <= len(value) <= MAX_TABLE:
        return f"{name}={show(value)} is not 1..{MAX_TABLE} numbers"
    wrong = next((each for each in value if type(each) is not float or not 0.0 <= each <= _FLOAT32), None)
    return None if wrong is None else f"{name} has {show(wrong)}, not a float of at least 0"


def _place(params: Mapping[str, Any]) -> list[int | None]:
    """`pos`, `kv_start` and `kv_len`; None for what is no int."""
    given = [params.get(name) for name in ("pos", "kv_start", "kv_len")]
    return [value if type(value) is int else None for value in given]


def _window_fault(params: Mapping[str, Any]) -> str | None:
    """The fault of `window`, or None. What a task reads must be in sight of its token."""
    window = params.get("window")
    if type(window) is not int or window < 1:  # absent, or found to be bad by itself
        return None
    pos, start, length = _place(params)
    if pos is None or start is None or length is None:
        return "window without pos, kv_start and kv_len"
    if params.get("kv_rows") == KvRows.NEW:
        return f"window={window} with kv_rows={KvRows.NEW} (NEW), the row at pos"
    seen = rows_in_sight(params, pos)
    if length > 0 and start + length > seen:
        return f"kv_start + kv_len = {start + length} with window={window}, of which pos={pos} sees {seen} rows"
    return None


def _rows_fault(params: Mapping[str, Any]) -> str | None:
    """The fault of `kv_rows`, or None. Its rows must lie before `pos`, or be the row at `pos`."""
    if "kv_rows" not in params:
        return None
    rows = params["kv_rows"]
    if rows not in tuple(KvRows):
        return f"kv_rows={show(rows)} is not one of {', '.join(f'{each.value} ({each.name})' for each in KvRows)}"
    pos, start, length = _place(params)
    if pos is None or start is None or length is None:
        return "kv_rows without pos, kv_start and kv_len"
    if rows == KvRows.NEW and (start, length) != (pos, 1):
        return f"kv_rows={rows} (NEW) with rows {start}..{start + length} as its window, not the one at pos={pos}"
    window = params.get("window")
    if type(window) is int and window > 0:
        start += first_row(params)
    if rows == KvRows.PAST and length > 0 and start + length > pos:
        return f"kv_rows={rows} (PAST) with a window that ends at row {start + length}, behind pos={pos}"
    return None
