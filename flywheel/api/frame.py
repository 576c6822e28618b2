"""Rows as a pandas table."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from flywheel.errors import UsageError
from flywheel.installing import install_line
from flywheel.measure.record import COLUMNS, TrialRecord
from flywheel.search.space import choices_of

if TYPE_CHECKING:
    from pandas import DataFrame, Series

KNOB: Final = "knob."
"""The names of columns that hold a knob begin with it."""


def to_dataframe(records: Iterable[TrialRecord]) -> DataFrame:
    """A table with a row for each record, in the order of `records`. It has the columns of docs/columns.md, in that
    order, and then `knob.NAME` for each knob of the rows, such as `knob.depth`, in the order of the search space.

    Absent values are missing values. A knob is missing where a row's work has no such knob, its model is not on this
    machine or its config lies outside the search space. Knobs with numbers have the type int64, or Int64 where some are
    missing. Raises UsageError if pandas is not installed.
    """
    if find_spec("pandas") is None:
        raise UsageError(f"to_dataframe needs pandas: {install_line('pandas')}")
    from pandas import DataFrame, concat

    rows, names = list(records), [column.name for column in COLUMNS]
    table = DataFrame([[getattr(row, name) for name in names] for row in rows], columns=names)
    choices = [choice or {} for choice in choices_of(rows)]
    knobs = dict.fromkeys(name for choice in choices for name in choice)
    columns = [_column(f"{KNOB}{name}", [choice.get(name) for choice in choices]) for name in knobs]
    return concat([table, *columns], axis=1)


def _column(name: str, values: list[Any]) -> Series[Any]:
    from pandas import Series

    numbers = all(value is None or isinstance(value, int) for value in values)
    return Series(values, name=name, dtype=None if not numbers else "Int64" if None in values else "int64")
