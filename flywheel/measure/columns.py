"""The values that a column of a stored row can hold: types, ranges of numbers, lengths of texts, times."""

from __future__ import annotations

from datetime import datetime, timedelta
from math import isfinite
from types import MappingProxyType
from typing import Final

from flywheel.ir.show import show
from flywheel.ir.version import ABI_MAX_ROWS

MAX_NAME: Final = 1000
"""Most characters of a name."""
MAX_TEXT: Final = 2**24
"""Most characters of any other text: a config, a reason, a campaign's file."""
_TEXTS: Final = frozenset({"config", "reason", "spec"})
_YEARS: Final = range(2000, 3000)
"""Years in which a row can have been made. They keep arithmetic on times of all time zones within Python's range."""

_MOST_US: Final = 1e12
_MOST_S: Final = 1e9
_INT32: Final = 2**31 - 1
_INT64: Final = 2**63 - 1
_TIMES_US: Final = (
    "predicted_us", "latency_us", "p10_us", "p90_us", "batch_us", "rival_us", "floor_us", "hand_off_us", "one_way_us",
    "same_gpu_us",
)  # fmt: skip
_TIMES_S: Final = ("ask_s", "lower_s", "validate_s", "measure_s")
_RANGES: Final = MappingProxyType(
    {
        "trial": (0, _INT32),
        "context": (1, _INT32),
        "batch": (1, ABI_MAX_ROWS),
        "seed": (0, _INT64),
        "samples": (1, _INT32),
        "tasks": (0, _INT32),
        "strangers": (0, _INT32),
        "weight_bytes": (1, 2**53),
        "sm_clock_mhz": (0, 10**6),
        "mem_clock_mhz": (0, 10**6),
        "temperature_c": (-273, 10**4),
        "power_w": (0.0, 1e6),
        "floor_fraction": (1e-15, 1e15),
        "gain_low_us": (-_MOST_US, _MOST_US),
        "gain_high_us": (-_MOST_US, _MOST_US),
        "peer": (0, _INT32),
        **dict.fromkeys(("read_gbs", "to_gbs", "from_gbs"), (1e-6, 1e9)),
        **dict.fromkeys(_TIMES_US, (1e-6, _MOST_US)),
        **dict.fromkeys(_TIMES_S, (0.0, _MOST_S)),
    }
)
"""Column -> (least, most)."""


def fault_of(name: str, kind: type, nullable: bool, value: object) -> str | None:
    """The fault of a value in the column `name` of Python type `kind`; None where it has none."""
    if value is None:
        return None if nullable else "is absent"
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        return f"is {show(value)}, not of type {kind.__name__}"
    if isinstance(value, str):
        return _fault_of_text(name, value)
    if isinstance(value, float) and not isfinite(value):
        return f"is {value}, not finite; absent is None"
    assert isinstance(value, int | float)
    low, high = _RANGES.get(name, (-_INT64, _INT64) if kind is int else (None, None))
    if low is None or high is None or low <= value <= high:
        return None
    if value < low and low >= 0:
        return f"is {show(value)}, {'negative' if low == 0 else 'not positive' if value <= 0 else f'below {low:g}'}"
    return f"is {show(value)}, not in {low:,}..{high:,}"


def _fault_of_text(name: str, value: str) -> str | None:
    if not value:
        return "is an empty string; absent is None"
    most = MAX_TEXT if name in _TEXTS else MAX_NAME
    if len(value) > most:
        return f"has {len(value):,} characters, more than {most:,}"
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        return f"is {show(value)}, which UTF-8 cannot hold"
    if "\x00" in value:
        return f"is {show(value)}, with a NUL, which no database holds"
    if name == "created_at" and not is_utc(value):
        return f"is {show(value)}, not an ISO 8601 time in UTC of the years {_YEARS.start} to {_YEARS.stop - 1}"
    return None


def is_utc(text: str) -> bool:
    """Whether a text is a time in UTC at which a row can have been made."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return False
    return moment.utcoffset() == timedelta(0) and moment.year in _YEARS
