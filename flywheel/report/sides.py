"""Two schedules beside each other: what each takes, how far apart they are, and what of it may be chance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from flywheel.errors import ConfigError, IrFormatError, StoreError, UnknownNameError
from flywheel.ir.config import ScheduleConfig
from flywheel.ir.show import show
from flywheel.measure.device import GENERIC
from flywheel.measure.latency import RESOLUTION, Band, band_of, rounded, tokens_per_s
from flywheel.models.decoder import DTYPES, MAX_BATCH
from flywheel.models.formats import parse_formats
from flywheel.report.svg import PlotAxis, element, label, picture, polyline, short, tip
from flywheel.search.workload import find_target, gpus_of
from flywheel.store.campaign import work_named
from flywheel.store.schedule import Schedule, schedule_from_document

_WIDTH, _LEFT, _RIGHT = 900.0, 20.0, 880.0
_TOP, _ROW, _BAR, _AXIS = 40.0, 56.0, 20.0, 40.0


@dataclass(frozen=True, slots=True)
class Side:
    """A schedule with the time of its step. `low_us` and `high_us` are the 10th and the 90th percentile of its samples;
    where it is predicted, the range of its `band`, which is None where it is measured. `origin` are the provenance's
    fields."""

    name: str
    schedule: Schedule
    band: Band | None
    latency_us: float
    low_us: float
    high_us: float
    origin: Mapping[str, Any]

    @property
    def measured(self) -> bool:
        """Whether the time is measured."""
        return self.band is None

    @property
    def work(self) -> str:
        """What the schedule was found for, in words."""
        asked = self.schedule
        return work_named(asked.model, asked.gpu, asked.dtype, asked.context, asked.batch, asked.weights)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all sequences together."""
        return tokens_per_s(self.latency_us, self.schedule.batch)

    @property
    def took(self) -> str:
        """The time in us as text, with no more digits than it has."""
        return f"{self.latency_us:,.1f}" if self.measured else rounded(self.latency_us)

    @property
    def rate(self) -> str:
        """The tokens a second as text, with no more digits than they have."""
        return f"{self.tokens_per_s:,.0f}" if self.measured else rounded(self.tokens_per_s)

    @property
    def config(self) -> ScheduleConfig:
        """The schedule's config."""
        return self.schedule.config


@dataclass(frozen=True, slots=True)
class Difference:
    """How much longer a step takes than another one, as a fraction of the other one's time: 0.02 is 2 % slower.

    `low` and `high` are the least and the largest that the samples between the 10th and the 90th percentile allow. The
    two may be of different days and machines, which differ by a few percent; the range knows nothing of that. Of
    predictions, they are what the ranges of the two allow; on one GPU, whose predictions err alike, what predictions
    can tell apart (`RESOLUTION`).
    """

    slower: float
    low: float
    high: float

    @property
    def sure(self) -> bool:
        """Whether `low` and `high` are on the same side of 0."""
        return self.low > 0.0 or self.high < 0.0


def read_side(name: str, document: Mapping[str, Any]) -> Side:
    """The side of an exported schedule's document. Raises IrFormatError where it is none, has no latency, or has a
    number or a name that no exported schedule has."""
    where = f"schedule {name}"
    try:
        schedule = schedule_from_document(document, where)
        _check_names(schedule)
    except StoreError as error:
        raise IrFormatError(str(error)) from None
    except (UnknownNameError, ConfigError) as error:
        raise IrFormatError(f"{where}: {error}") from None
    measured, predicted = document.get("measured"), document.get("predicted")
    origin, band = document.get("provenance"), None
    if measured is not None:
        low, middle, high = (_time(measured, key, f"{where}: measured") for key in ("p10_us", "median_us", "p90_us"))
        if not low <= middle <= high:
            raise IrFormatError(f"{where}: p10_us {low}, median_us {middle}, p90_us {high} are not in ascending order")
    elif predicted is not None:
        middle = _time(predicted, "latency_us", f"{where}: predicted")
        band = band_of(schedule.gpu, str(predicted.get("predictor")))
        low, high = band.around(middle)
    else:
        raise IrFormatError(f"{where}: has no latency to compare")
    return Side(name, schedule, band, middle, low, high, origin if isinstance(origin, dict) else {})


_MOST_US: Final = 1e12
"""The longest time of a step that is read: eleven days."""


def _time(document: object, key: str, where: str) -> float:
    """A time in us of a strange document. Raises IrFormatError."""
    value = document.get(key) if isinstance(document, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value <= _MOST_US:
        raise IrFormatError(f"{where}.{key} is {show(value)}, no time in us")
    return float(value)


def _check_names(schedule: Schedule) -> None:
    """Raises UnknownNameError and ConfigError for a GPU, a dtype, weights or a batch that no schedule is made for. The
    model may be somebody's own, and so may the GPU under a generic name."""
    if not gpus_of(schedule.gpu)[1].startswith(GENERIC):
        find_target(gpus_of(schedule.gpu)[1])
    if schedule.dtype not in DTYPES:
        raise UnknownNameError(f"dtype {show(schedule.dtype)} is not one of {', '.join(DTYPES)}")
    if schedule.weights != schedule.dtype:
        parse_formats(schedule.weights, schedule.dtype)
    if schedule.batch > MAX_BATCH:
        raise ConfigError(f"batch {schedule.batch} is not in 1..{MAX_BATCH}")


def different(first: Side, second: Side) -> list[str]:
    """The names of what makes the works of two sides different ones; a GPU does not."""
    asked = ("model", "dtype", "weights", "context", "batch")
    return [name for name in asked if getattr(first.schedule, name) != getattr(second.schedule, name)]


def difference(first: Side, second: Side) -> Difference | None:
    """How much slower `second` is; None where one is measured and the other predicted, which are never compared."""
    if first.measured != second.measured:
        return None
    slower = second.latency_us / first.latency_us - 1.0
    if not first.measured and first.schedule.gpu == second.schedule.gpu:
        return Difference(slower, slower - RESOLUTION, slower + RESOLUTION)
    return Difference(
        slower,
        second.low_us / first.high_us - 1.0,
        second.high_us / first.low_us - 1.0,
    )


_COLOURS: Final = {True: "measured", False: "predicted"}


def drawn(sides: Sequence[Side]) -> str:
    """A bar for each side, on one axis that starts at 0. A line at a bar's end spans the 10th to the 90th percentile,
    or the range of a prediction."""
    across = PlotAxis(0.0, max(side.high_us for side in sides) * 1.02, _LEFT, _RIGHT)
    title = " beside ".join(side.name for side in sides)
    bottom = _TOP + _ROW * len(sides)
    parts = [label(_LEFT, 20, title)]
    for value in across.ticks(8):
        x = across(value)
        grid = element("path", d=polyline([(x, _TOP), (x, bottom)]), class_="grid")
        parts += [grid, label(x, bottom + 16, short(value), "middle faint")]
    for row, side in enumerate(sides):
        parts += _bar(side, across, _TOP + _ROW * row)
    said = "us a step; orange: measured, blue: predicted"
    return picture(_WIDTH, bottom + _AXIS, title, [*parts, label(_RIGHT, bottom + 34, said, "end faint")])


def _bar(side: Side, across: PlotAxis, top: float) -> list[str]:
    end, middle = across(side.latency_us), top + 20 + _BAR / 2
    times = f"{side.took} us, {side.rate} tokens/s"
    spread = polyline([(across(side.low_us), middle), (across(side.high_us), middle)])
    return [
        label(_LEFT, top + 14, f"{side.work}: {times}"),
        element("rect", tip(f"{side.name}: {times}"), x=_LEFT, y=top + 20, width=end - _LEFT, height=_BAR,
                fill="currentColor", class_=_COLOURS[side.measured]),
        element("path", d=spread, class_="ink", stroke_width=2, fill="none"),
    ]  # fmt: skip
