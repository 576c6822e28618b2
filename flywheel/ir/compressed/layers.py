"""Programs whose layers repeat: a period of layers is spelled out, and all others are that period with other ids.

Lowering spells out four parts: what comes before, a period of layers, the next period, and what follows. The second
period, the *template*, comes `times` times. Each time, the ids of buffers and counters of the template and of the
period before it grow by the number of a period's records; smaller ids stay. What follows has the ids that it has where
the template comes once. Where all layers are alike, a period is one layer. Source: docs/ir.md, "Proof by layers".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar, cast, overload

from flywheel.ir.records import Buffer, Counter, make_buffer, make_counter

R = TypeVar("R", bound=Buffer | Counter)
T = TypeVar("T")

_INDEX: Final = re.compile(r"\{i(?:\+([1-9][0-9]{0,5}))?\}")


def index_of(behind: int) -> str:
    """What stands in texts for the number of the layer that comes `behind` the template's first; see `spell`."""
    return f"{{i+{behind}}}" if behind else "{i}"


def split_at_indices(text: str) -> tuple[list[str], list[int]]:
    """(what stands before, between and after the numbers of layers in a text, how far each of these layers is behind
    the template's first)."""
    parts = _INDEX.split(text)
    return parts[::2], [int(each or 0) for each in parts[1::2]]


def spell(text: str, first: int) -> str:
    """The text with its number of a layer, where the template's first layer has the number `first`."""
    if "{i" not in text:
        return text
    if "{i+" not in text:
        return text.replace("{i}", str(first))
    return _INDEX.sub(lambda found: str(first + int(found[1] or 0)), text)


MAX_TIMES: Final = 1 << 16
MAX_PLACE: Final = 1 << 30
"""Bound of the places of records, so that the epilogue's ids are int32, too."""


@dataclass(frozen=True, slots=True)
class Span:
    """The template's part of a table: places `start` to `stop`."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of records."""
        return self.stop - self.start

    @property
    def least(self) -> int:
        """First place of the layer before the template; it has as many records."""
        return self.start - self.size


@dataclass(frozen=True, slots=True)
class Layers:
    """How often the template comes, the number of its first layer, its part of each table, and its number of layers."""

    times: int
    index: int
    runs: Span
    buffers: Span
    counters: Span
    period: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for values of which no tables can be made."""
        if type(self.times) is not int or type(self.index) is not int or not 1 <= self.times <= MAX_TIMES:
            raise ValueError(f"layers: times={self.times!r:.40}, index={self.index!r:.40}")
        if not 0 <= self.index <= MAX_TIMES:
            raise ValueError(f"layers: index={self.index!r:.40} is not in 0..{MAX_TIMES}")
        if type(self.period) is not int or not 1 <= self.period <= MAX_TIMES:
            raise ValueError(f"layers: period={self.period!r:.40} is not in 1..{MAX_TIMES}")
        for span in (self.runs, self.buffers, self.counters):
            if type(span) is not Span or type(span.start) is not int or type(span.stop) is not int:
                raise ValueError(f"layers: {span!r:.80} is no span")
            if not 0 <= span.least <= span.start:
                raise ValueError(f"layers: {span!r:.80} has no layer of its size before it")
            if span.stop + self.times * span.size > MAX_PLACE:
                raise ValueError(f"layers: {self.times} of {span!r:.80} end beyond place {MAX_PLACE}")

    def first(self, by: int) -> int:
        """The number of the template's first layer, `by` periods later."""
        return self.index + by * self.period

    def shift(self, by: int) -> Shift:
        """The shift by `by` periods."""
        buffers, counters = self.buffers, self.counters
        return Shift(buffers.least, by * buffers.size, counters.least, by * counters.size, self.first(by))


NO_LAYERS: Final = Layers(1, 0, Span(0, 0), Span(0, 0), Span(0, 0))
"""The layers of a program without any: all of it follows a template of nothing."""


class Shift(NamedTuple):
    """How a record changes from period to period: ids from a least one on grow, and texts name the layer."""

    least_buffer: int
    buffers: int
    least_counter: int
    counters: int
    layer: int
    """The number of the template's first layer."""


class LayeredTable(Sequence[R]):
    """The buffers or the counters of a program of alike layers. Their ids are their places.

    `spelled` is the table with the template once. As a sequence it has all records, which are made on demand.
    """

    __slots__ = ("_all", "layers", "spelled")

    def __init__(self, spelled: Sequence[R], layers: Layers) -> None:
        """Raises ValueError for records of another type, and for a record whose id is not its place."""
        if type(layers) is not Layers or {type(each) for each in spelled} not in ({Buffer}, {Counter}):
            raise ValueError(f"{spelled!r:.80} is no table of buffers or counters with layers")
        if any(type(each.id) is not int or each.id != place for place, each in enumerate(spelled)):
            raise ValueError("the id of a record is not its place")
        if any(type(text) is not str or text.count("{i") > 1 for each in spelled for text in _texts(each)):
            raise ValueError("a text of a record is not a string, or has two numbers of layers")
        self.spelled: tuple[R, ...] = tuple(spelled)
        self.layers: Layers = layers
        self._all: tuple[R, ...] | None = None
        if self.span.stop > len(self.spelled):
            raise ValueError(f"{self.span} ends beyond a table of {len(self.spelled)} records")

    @property
    def span(self) -> Span:
        """The template's part of the table."""
        return self.layers.buffers if type(self.spelled[0]) is Buffer else self.layers.counters

    def repeated(self, times: int) -> tuple[R, ...]:
        """The table of the program in which the template comes `times` times."""
        layers, span = self.layers, self.span
        template, behind = self.spelled[span.start : span.stop], self.spelled[span.stop :]
        return (
            *self.spelled[: span.start],
            *[moved(each, shift) for shift in map(layers.shift, range(times)) for each in template],
            *[moved(each, layers.shift(times - 1)) for each in behind],
        )

    def column(self, of: Callable[[R], T], times: int | None = None) -> list[T]:
        """`of` of each record, if the template comes `times` times; by default, as often as it does.

        The result of `of` must not depend on ids and texts.
        """
        span = self.span
        values = [of(each) for each in self.spelled]
        template = values[span.start : span.stop] * (self.layers.times if times is None else times)
        return values[: span.start] + template + values[span.stop :]

    def __len__(self) -> int:
        return len(self.spelled) + (self.layers.times - 1) * self.span.size

    @overload
    def __getitem__(self, place: int) -> R: ...

    @overload
    def __getitem__(self, place: slice) -> tuple[R, ...]: ...

    def __getitem__(self, place: int | slice) -> R | tuple[R, ...]:
        return self._records()[place]

    def __iter__(self) -> Iterator[R]:
        return iter(self._records())

    def __eq__(self, other: object) -> bool:
        """Whether the other sequence has equal records."""
        return isinstance(other, LayeredTable | tuple) and self._records() == tuple(other)

    def __hash__(self) -> int:
        return hash(self._records())

    def __reduce__(self) -> tuple[Any, tuple[tuple[R, ...], Layers]]:
        return LayeredTable, (self.spelled, self.layers)

    def _records(self) -> tuple[R, ...]:
        if self._all is None:
            self._all = self.repeated(self.layers.times)
        return self._all


def _texts(each: Buffer | Counter) -> tuple[object, ...]:
    if isinstance(each, Counter):
        return (each.note,)
    return (each.name,) if each.source is None else (each.name, each.source)


def moved(each: R, shift: Shift) -> R:
    """A record of the template or of what follows, some periods later."""
    first = shift.layer
    if isinstance(each, Counter):
        return cast(R, make_counter(each.id + shift.counters, each.init, spell(each.note, first)))
    source = spell(each.source, first) if each.source is not None else None
    name, number = spell(each.name, first), each.id + shift.buffers
    look = each.kind, each.dtype, each.shape, each.space
    return cast(R, make_buffer(number, name, *look, source, each.rank, each.part))


def table_of(records: Sequence[R], layers: Layers) -> Sequence[R]:
    """Records with the template once as a table of all layers."""
    return tuple(records) if layers is NO_LAYERS else LayeredTable(records, layers)


def brief_table(table: Sequence[R]) -> tuple[Sequence[R], Layers]:
    """The records of a table with the template once, and its layers; all records and NO_LAYERS where it has none."""
    return (table.spelled, table.layers) if isinstance(table, LayeredTable) else (table, NO_LAYERS)


def column_of(table: Sequence[R], of: Callable[[R], T]) -> list[T]:
    """`of` of each record, whatever form the table has. The result of `of` must not depend on ids and texts."""
    return table.column(of) if isinstance(table, LayeredTable) else list(map(of, table))
