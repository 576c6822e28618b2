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
    """One row a record in the order of `records`, with the columns of docs/columns.md in theirs; what is absent is
    missing. Raises UsageError without pandas."""
    if find_spec("pandas") is None:
        raise UsageError(f"to_dataframe needs pandas: {install_line('pandas')}")
    from pandas import DataFrame

    names = [column.name for column in COLUMNS]
    return DataFrame([[getattr(record, name) for name in names] for record in records], columns=names)
