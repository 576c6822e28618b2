"""How large an operand is, as a formula over params and sizes: the words in which the table of operations is written.

A *term* is a number, a name, a name plus a number ("head_dim + 2"), or a quotient rounded up ("n / group"). A *scope*
gives names their values: the params of a task at first, and every size that an operand was found to have. A name that
the scope lacks is a size that the first operand which has it decides, and all others must agree with. Each extent's
`fit` adds what the buffer decides to the scope, and returns what is wrong with the buffer, or None.
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
    """What a term comes to, or None while one of its names has no value."""
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
    """A term's first name, its operator and what stands behind that; both empty where the term is a name."""
    name, _, rest = term.partition(" ")
    operator, _, other = rest.partition(" ")
    return name, operator, other


@dataclass(frozen=True, slots=True, init=False)
class View:
    """So many elements, the product of the factors, in any shape; where `dtype` is given, of that type."""

    factors: tuple[str, ...]
    dtype: DType | None

    def __init__(self, *factors: str, dtype: DType | None = None) -> None:
        object.__setattr__(self, "factors", factors)
        object.__setattr__(self, "dtype", dtype)

    def unknown(self, scope: Scope) -> int:
        """Number of factors that have no value yet."""
        return sum(value(factor, scope) is None for factor in self.factors)

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """At most one factor may be unknown."""
        fault = _fit_product(self.factors, buffer.numel, scope)
        if fault is None and self.dtype not in (None, buffer.dtype):
            return f"is {buffer.dtype.name}, not {self.dtype.name}"
        return fault

    def __str__(self) -> str:
        return f"[{', '.join(self.factors)}]{'' if self.dtype is None else f' in {self.dtype.name}'}"


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of `columns` elements: of rank 2 as its shape says, of another rank one row after the other.

    `wide` lets rows of a rank 2 be longer, of which the first elements count.
    """

    rows: str
    columns: str
    wide: bool = False

    @property
    def factors(self) -> tuple[str, ...]:
        """Rows and columns."""
        return self.rows, self.columns

    def unknown(self, scope: Scope) -> int:
        """A matrix decides its rows itself."""
        return 0

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """`columns` is known."""
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
    """Rows along the first dimension, `rows` of them, each of the product of the other factors."""

    rows: str
    row: tuple[str, ...]

    def __init__(self, rows: str, *row: str) -> None:
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "row", row)

    @property
    def factors(self) -> tuple[str, ...]:
        """Rows, and what a row is the product of."""
        return self.rows, *self.row

    def unknown(self, scope: Scope) -> int:
        """A cache decides its rows itself."""
        return 0

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """At most one factor of a row may be unknown."""
        rows = buffer.shape[0]
        return _fit_product((self.rows,), rows, scope, "rows") or _fit_product(
            self.row, buffer.numel // rows, scope, "elements in a row"
        )

    def __str__(self) -> str:
        return f"[{', '.join(self.factors)}]"


@dataclass(frozen=True, slots=True)
class Packed:
    """Numbers of type `qdtype`, in rows along the last dimension: a byte each, or as I4 two a byte."""

    rows: str
    width: str

    @property
    def factors(self) -> tuple[str, ...]:
        """Rows and columns."""
        return self.rows, self.width

    def unknown(self, scope: Scope) -> int:
        """Packed integers decide their rows and width themselves."""
        return 0

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """Integers of bytes are in bytes; nibbles are in I4 or in bytes; floats of 8 bits are in their own type."""
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
    """One of some views, the first that fits."""

    views: tuple[View, ...]

    def __init__(self, *views: View) -> None:
        object.__setattr__(self, "views", views)

    @property
    def factors(self) -> tuple[str, ...]:
        """Of the first view."""
        return self.views[0].factors

    def unknown(self, scope: Scope) -> int:
        """Of the first view; the others have the same names."""
        return self.views[0].unknown(scope)

    def fit(self, buffer: Buffer, scope: Scope) -> str | None:
        """The last fault where none of the views fits."""
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
    """Whether `count` is the product of `factors`. A factor without a value gets the value that makes it so."""
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
