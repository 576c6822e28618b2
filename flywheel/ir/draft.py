"""Make many frozen records fast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, fields, make_dataclass
from typing import Any, Final, ParamSpec, TypeVar, cast

from flywheel.ir.records import Buffer, Counter, Task, Wait

P = ParamSpec("P")
R = TypeVar("R")


def maker(kind: Callable[P, R]) -> Callable[P, R]:
    """A fast constructor of `kind`, a frozen dataclass with slots whose __init__ only assigns its fields.

    It fills a draft with the same slots by plain assignment, then turns the draft into the record.
    """
    columns: list[Any] = [
        (each.name, Any, field(default=each.default, default_factory=each.default_factory))
        for each in fields(cast(Any, kind))
    ]
    draft: Any = make_dataclass(f"{cast(Any, kind).__name__}Draft", columns, slots=True)

    def make(*values: P.args, **named: P.kwargs) -> R:
        record: R = draft(*values, **named)
        record.__class__ = kind  # type: ignore[assignment]
        return record

    return make


make_task: Final = maker(Task)
make_buffer: Final = maker(Buffer)
make_counter: Final = maker(Counter)
make_wait: Final = maker(Wait)
