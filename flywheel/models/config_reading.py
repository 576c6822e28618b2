"""Typed reading of a model's `config.json`, which may come from a stranger."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from flywheel.errors import UnsupportedModelError
from flywheel.models.config_fields import Neutral
from flywheel.models.rope import FLOATS, is_constant
from flywheel.models.spec import MAX_DIM


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of the file, read by typed accessors that raise UnsupportedModelError naming the field."""

    source: str
    prefix: str
    values: Mapping[str, object]
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Fields that have another name in the file, with that name."""

    def shown(self, field: str) -> str:
        """The field as messages name it."""
        return f"{self.prefix}{self.renamed.get(field, field)}"

    def refusal(self, field: str, supported: str) -> UnsupportedModelError:
        fact = f"is {shown(self.values[field])}" if field in self.values else "is missing"
        return UnsupportedModelError(f"{self.source}: {self.shown(field)} {fact}; supported: {supported}")

    def choice(self, field: str, allowed: Collection[str]) -> str:
        value = self.values.get(field)
        if not isinstance(value, str) or value not in allowed:
            raise self.refusal(field, " or ".join(map(shown, allowed)))
        return value

    def positive_int(self, field: str, largest: int = MAX_DIM) -> int:
        value = self.values.get(field)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
            raise self.refusal(field, f"an integer from 1 to {largest}")
        return value

    def whole(self, field: str, absent: int) -> int:
        value = self.values.get(field, absent)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.refusal(field, "an integer of at least 0")
        return value

    def integers(self, field: str) -> list[int]:
        """An integer or several; none where the field is absent or null."""
        value = self.values.get(field)
        given = value if isinstance(value, list) else [] if value is None else [value]
        found = [each for each in given if type(each) is int]
        if len(found) < len(given):
            raise self.refusal(field, "an integer, a list of integers or null")
        return found

    def positive_float(self, field: str, absent: float | None = None) -> float:
        value = self.values.get(field, absent)
        if not is_constant(value):
            raise self.refusal(field, FLOATS)
        return float(value)

    def flag(self, field: str, absent: bool) -> bool:
        value = self.values.get(field, absent)
        if not isinstance(value, bool):
            raise self.refusal(field, "true or false")
        return value

    def asks_nothing(self, field: str, neutral: tuple[object, ...]) -> bool:
        """Whether a field is absent, null or one of the neutral values."""
        value = self.values.get(field)
        return value is None or any(same(value, option) for option in neutral)

    def check_neutral(self, neutral: Neutral) -> None:
        for name, allowed in neutral.items():
            if not self.asks_nothing(name, allowed):
                raise self.refusal(name, " or ".join([*map(shown, allowed), "absent"]))


def same(value: object, option: object) -> bool:
    return isinstance(value, bool) is isinstance(option, bool) and value == option


def shown(value: object) -> str:
    """A JSON value in printable ASCII, cut short."""
    if isinstance(value, str):
        return json.dumps(value[:60])
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    return ascii(reprlib.repr(value))[1:-1]


def key_shown(key: str) -> str:
    """A key in printable ASCII, cut short."""
    return key if key.isidentifier() and key.isascii() and len(key) <= 60 else shown(key)
