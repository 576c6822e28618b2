"""The size of an operand, as a formula over params and sizes. The table of operations is written in these formulas.

A *term* is a number, a name, a name plus a number ("head_dim + 2"), or a quotient rounded up ("n / group"). A *scope*
gives names their values: at first a task's params, then every size that an operand was found to have. If the scope
lacks a name, the first operand that has the size decides it, and all others must agree. Each extent's `fit` adds the
buffer's sizes to the scope. It returns what is wrong with the buffer, or None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

from flywheel.ir.dtype import DType
from flywheel.ir.records import Buffer

Scope = dict[str, int]


def value(term: str, scope: Scope) -> int | None:
    """The value of a term; None while one of its names has no value."""
    if term in scope:
        return scope[term]
    if term.isdigit():
        return int(term)
    name, operator, other = _parts(term)
    left, right = scope.get(name), int(other) if other.isdigit() else scope.get(other)
    if not operator or left is None or right is None:
        return None if operator else left
    return left + right if operator == "+" else -(-left // right)


@cache
def _parts(term: str) -> tuple[str, str, str]:
    """A term's first name, its operator, and the rest; the last two are empty for a single name."""
    name, _, rest = term.partition(" ")
    operator, _, other = rest.partition(" ")
    return name, operator, other


@dataclass(frozen=True, slots=True, init=False)
class View:
    """A number of elements, the product of the factors, in any shape; of type `dtype` if given."""

    factors: tuple[str, ...]
    dtype: DType | None

    def __init__(self, *factors: str, dtype: DType | None = None) -> None:
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "dtype", dtype)

    def unknown(self, scope: Scope) -> int:
        """The number of factors without a value."""
        return sum(value(factor, scope) is None for factor in self.factors)

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """Fit a buffer. At most one factor may be unknown."""
        fault = _fit_product(self.factors, buffer.numel, scope)
        if fault is None and self.dtype not in (None, buffer.dtype):
            return f"is {buffer.dtype.name}, not {self.dtype.name}"
        return fault

    def __str__(self) -> str:
        return f"[{', '.join(self.factors)}]{'' if self.dtype is None else f' in {self.dtype.name}'}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of `columns` elements. A buffer of rank 2 has the rows of its shape; in one of another rank the rows are
    consecutive.

    With `wide`, a row of a buffer of rank 2 may be longer; its first elements count.
    """

    rows: str
    columns: str
    wide: bool = False

    @property
    def factors(self) -> tuple[str, ...]:
        """Rows and columns."""
        return self.rows, self.columns

    def unknown(self, scope: Scope) -> int:
        """0: a matrix decides its rows itself."""
        return 0

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """Fit a buffer. `columns` must be known."""
        columns = value(self.columns, scope)
        if len(buffer.shape) != 2:
            return _fit_product((self.rows, self.columns), buffer.numel, scope)
        rows, width = buffer.shape
        if columns is None or width < columns or (width > columns and not self.wide):
            bound = "at least" if self.wide else "exactly"
            return f"has rows of {width} elements, not of {bound} {_named(self.columns, scope)}"
        return _fit_product((self.rows,), rows, scope, "rows")

    def __str__(self) -> str:
        return f"[{self.rows}, {'>= ' if self.wide else ''}{self.columns}]"


@dataclass(frozen=True, slots=True, init=False)
class Cache:
    """`rows` rows along the first dimension. A row has as many elements as the product of the other factors."""

    rows: str
    row: tuple[str, ...]

    def __init__(self, rows: str, *row: str) -> None:
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "row", row)

    @property
    def factors(self) -> tuple[str, ...]:
        """Rows, and the factors of a row."""
        return self.rows, *self.row

    def unknown(self, scope: Scope) -> int:
        """0: a cache decides its rows itself."""
        return 0

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """Fit a buffer. At most one factor of a row may be unknown."""
        rows = buffer.shape[0]
        return _fit_product((self.rows,), rows, scope, "rows") or _fit_product(
            self.row, buffer.numel // rows, scope, "elements in a row"
        )

    def __str__(self) -> str:
        return f"[{', '.join(self.factors)}]"


@dataclass(frozen=True, slots=True)
class Packed:
    """Numbers of type `qdtype`, in rows along the last dimension: one a byte, or two a byte for I4."""

    rows: str
    width: str

    @property
    def factors(self) -> tuple[str, ...]:
        """Rows and columns."""
        return self.rows, self.width

    def unknown(self, scope: Scope) -> int:
        """0: packed integers decide their rows and width themselves."""
        return 0

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """Fit a buffer: bytes for 8-bit integers, I4 or bytes for 4-bit integers, the own type for 8-bit floats."""
        nibbles, octets = scope["qdtype"] == DType.I4, scope["qdtype"] == DType.F8E4M3
        if octets is not (buffer.dtype is DType.F8E4M3):
            return f"is {buffer.dtype.name}, not what holds {DType(scope['qdtype']).name}"
        if buffer.dtype is DType.I4 and not nibbles:
            return f"is I4, not the bytes of {DType(scope['qdtype']).name}"
        width = buffer.shape[-1] * (2 if nibbles and buffer.dtype is not DType.I4 else 1)
        rows = prod(buffer.shape[:-1])
        return _fit_product((self.rows,), rows, scope, "rows") or _fit_product((self.width,), width, scope, "integers")

    def __str__(self) -> str:
        return f"[{self.rows}, {self.width}]"


@dataclass(frozen=True, slots=True, init=False)
class Either:
    """The first of several views that fits."""

    views: tuple[View, ...]

    def __init__(self, *views: View) -> None:
        object.__setattr__(self, "views", views)

    @property
    def factors(self) -> tuple[str, ...]:
        """The first view's factors."""
        return self.views[0].factors

    def unknown(self, scope: Scope) -> int:
        """The first view's unknown factors; the other views have the same names."""
        return self.views[0].unknown(scope)

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """Fit a buffer. The last view's fault where no view fits."""
        faults = []
        for view in self.views:
            tried = dict(scope)
            fault = view.fit(buffer, tried)
            if fault is None:
                scope |= tried
                return None
            faults.append(fault)
        return f"{faults[0]}, nor {faults[-1].partition(' not ')[2]}"

    def __str__(self) -> str:
        return " or ".join(map(str, self.views))


Extent = View | Matrix | Cache | Packed | Either


def _fit_product(factors: Sequence[str], count: int, scope: Scope, what: str = "elements") -> str | None:
    """Check that `count` is the product of `factors`; the fault, or None. One factor without a value gets its value by
    this."""
    known = [value(factor, scope) for factor in factors]
    product = prod(number for number in known if number is not None)
    missing = [factor for factor, number in zip(factors, known, strict=True) if number is None]
    if not missing and count == product:
        return None
    named = " * ".join(_named(factor, scope) for factor in factors if factor not in missing) if count % product else ""
    if not missing:
        named = " * ".join(_named(factor, scope) for factor in factors)
        total = f" = {product}" if len(factors) > 1 else ""
        return f"holds {count} {what}, not {named}{total}"
    (unknown,) = missing
    name, operator, other = _parts(unknown)
    if count % product:
        return f"holds {count} {what}, not a multiple of {named}"
    scope[name] = count // product - (int(other) if operator else 0)
    if scope[name] < 1:
        named = " * ".join(_named(factor, scope) for factor in factors if factor not in missing)
        return f"holds {count} {what}, not {unknown} of at least {int(other) + 1} times {named}"
    return None


def _named(term: str, scope: Scope) -> str:
    return f"({term} = {value(term, scope)})" if " " in term else f"{term}={value(term, scope)}"
