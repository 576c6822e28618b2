"""Values from strangers in messages: short, on one line, and without an error of their own."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from html import escape

MAX_SHOWN = 60
MAX_NAMES = 8
MAX_LINE = 1000


def show(value: object) -> str:
    """`repr` of a number, a string or a short list of them, cut to 60 characters; for anything else the type's name.

    It calls no method of a foreign class.
    """
    kind = type(value)
    if kind is int:
        return repr(value) if -(10**30) < value < 10**30 else "a huge int"  # type: ignore[operator]
    if kind is str:
        return _cut(repr(value[:MAX_SHOWN]))  # type: ignore[index]
    if kind is float or kind is bool or value is None:
        return repr(value)
    if (kind is list or kind is tuple) and len(value) <= 8:  # type: ignore[arg-type]
        items: tuple[object, ...] = tuple(value)  # type: ignore[arg-type]
        if all(type(item) in (int, str, float, bool, type(None)) for item in items):
            return _cut("[" + ", ".join(map(show, items)) + "]")
    return f"a {kind.__name__}"


def listed(names: Iterable[str]) -> str:
    """Names of a stranger for a line: the first eight, each cut to 60 characters, and how many more there are."""
    every = list(names)
    more = f" and {len(every) - MAX_NAMES:,} more" if len(every) > MAX_NAMES else ""
    return ", ".join(map(_cut, every[:MAX_NAMES])) + more


def escaped(text: str) -> str:
    """`text` on one line. Line breaks, ESC, lone surrogates and all else that cannot be printed are escaped as in
    Python."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def markup(text: str) -> str:
    """Any text as HTML or XML that only shows it, without the control characters that XML cannot hold."""
    return escape(escaped(text))


def html_table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """A small table of names and values in HTML, for notebooks. It shows texts of strangers as text, and leaves out
    values that are None."""
    cells = "".join(
        f"<tr><td>{markup(name)}</td><td>{markup(str(value))}</td></tr>" for name, value in rows if value is not None
    )
    return f"<table><caption>{markup(title)}</caption><tbody>{cells}</tbody></table>"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`: did you mean X? It`, to stand between an unknown name and `is not one of`; empty where no known name is
    close."""
    close = get_close_matches(name, list(known), n=2, cutoff=0.5)
    return f": did you mean {' or '.join(close)}? It" if close else ""


def one_line(text: str) -> str:
    """`text` without line breaks and without characters that UTF-8 cannot hold, cut to MAX_LINE characters."""
    if len(text) > MAX_LINE:
        text = f"{text[:MAX_LINE]}..."
    return " ".join(text.encode("utf-8", "backslashreplace").decode().splitlines())


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "..."
