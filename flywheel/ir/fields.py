"""Read values of a parsed document as the types that they must have.

`where` names the place of the value, or of the record whose `field` it is. Every function raises an IrFormatError with
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from math import isfinite
from typing import Any, TypeVar

from flywheel.errors import IrFormatError
from flywheel.ir.show import one_line, show

_E = TypeVar("_E", bound=IntEnum)


def read_field(data: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of `key`, which the record must have."""
    if key not in data:
        raise IrFormatError(one_line(f"{where}: {key!r} is missing"))
    return data[key]


def read_int(value: object, where: str, field: str = "") -> int:
    """An int. True and False are none."""
    if type(value) is not int:
        raise _wrong(value, "an integer", where, field)
    return value


def read_number(value: object, where: str, field: str = "") -> float:
    """A finite int or float."""
    if type(value) is int or (type(value) is float and isfinite(value)):
        return value
    raise _wrong(value, "a finite number", where, field)


def read_float(value: object, where: str, field: str) -> float:
    """A finite float, or an int of 32 bits as one."""
    if (type(value) is int and abs(value) < 2**31) or (type(value) is float and isfinite(value)):
        return float(value)
    raise _wrong(value, "a finite number", where, field)


def read_estimate(value: object, where: str, field: str) -> int:
    """A finite number, truncated to an int."""
    return value if type(value) is int else int(read_number(value, where, field))


def read_bool(value: object, where: str, field: str = "") -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise _wrong(value, "true or false", where, field)
    return value


def read_str(value: object, where: str, field: str = "") -> str:
    """A string."""
    if not isinstance(value, str):
        raise _wrong(value, "a string", where, field)
    return value


def read_list(value: object, where: str, field: str = "") -> list[Any]:
    """A list. A tuple is accepted."""
    if not isinstance(value, list | tuple):
        raise _wrong(value, "a list", where, field)
    return list(value)


def read_dict(value: object, where: str, field: str = "") -> dict[str, Any]:
    """An object whose keys are strings."""
    if not isinstance(value, dict):
        raise _wrong(value, "an object", where, field)
    for key in value:
        if type(key) is not str:
            raise _wrong(key, "a string key", where, field)
    return value


def read_ints(value: object, where: str, field: str) -> tuple[int, ...]:
    """A list of ints, as a tuple."""
    return tuple([read_int(item, where, field) for item in read_list(value, where, field)])


def read_int_map(value: object, where: str) -> dict[int, int]:
    """An object of ints with decimal ints as keys, as a dict."""
    result = {}
    for key, item in read_dict(value, where).items():
        if not key.isascii() or not key.isdigit() or len(key) > 19 or str(int(key)) != key:
            raise _wrong(key, "an integer key", where, "")
        result[int(key)] = read_int(item, where, key)
    return result


def read_enum(kind: type[_E], value: object, where: str, field: str) -> _E:
    """The member of `kind` that a string names."""
    member = kind.__members__.get(value) if isinstance(value, str) else None
    if member is None:
        raise _wrong(value, f"the name of a member of {kind.__name__}", where, field)
    return member


def _wrong(value: object, wanted: str, where: str, field: str) -> IrFormatError:
    place = f"{where}.{field}" if field else where
    return IrFormatError(one_line(f"{place}: expected {wanted}, got {show(value)}"))
