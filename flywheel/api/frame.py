"""Rows as a pandas table."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from flywheel.errors import UsageError
from flywheel.installing import install_line
from flywheel.measure.record import COLUMNS, TrialRecord

if TYPE_CHECKING:
    from pandas import DataFrame


def to_dataframe(records: Iterable[TrialRecord]) -> DataFrame:
    """A table with a row for each record, in the order of `records`, and the columns of docs/columns.md, in that order.
    Absent values are missing values. Raises UsageError if pandas is not installed."""
    if find_spec("pandas") is None:
        raise UsageError(f"to_dataframe needs pandas: {install_line('pandas')}")
    from pandas import DataFrame

    names = [column.name for column in COLUMNS]
    return DataFrame([[getattr(record, name) for name in names] for record in records], columns=names)
