"""Where a store is: the meaning of a path or a URL, the name that errors give a store, and checks before it is opened.

A URL may hold a password, even a malformed URL, so no message repeats a URL that could not be parsed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from flywheel.errors import StoreError, UsageError
from flywheel.ir.files import same_file

_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_NEARLY: Final = re.compile(r"postgres(ql)?(\+\w+)?:", re.IGNORECASE)
_NOT_A_URL: Final = "store: not a database URL; want a path, sqlite:///PATH or postgresql://HOST/NAME"

_SHOWN: Final = (
    "host", "hostaddr", "port", "user", "dbname", "service", "connect_timeout", "application_name", "options",
    "sslmode", "sslrootcert", "sslcert", "sslkey", "target_session_attrs",
)  # fmt: skip
"""Parameters of a PostgreSQL URL that messages repeat."""

_SQLITE: Final = {
    "uri": (re.compile("true|false|1|0"), "true or false"),
    "mode": (re.compile("ro|rw|rwc|memory"), "ro, rw or rwc"),
    "cache": (re.compile("shared|private"), "shared or private"),
    "immutable": (re.compile("0|1"), "0 or 1"),
    "nolock": (re.compile("0|1"), "0 or 1"),
    "timeout": (re.compile(r"\d+(\.\d+)?"), "a number of seconds"),
}
"""Parameters of a SQLite URL, with a pattern of their values and its description."""

_BESIDE: Final = ("-wal", "-shm", "-journal")
"""Ends of the names of files that SQLite keeps beside its own. Source: SQLite, "Temporary Files Used By SQLite"."""

_IN_URI: Final = ("mode", "cache", "immutable", "nolock")
"""Parameters that SQLite itself reads; it does so only with `uri=true`."""


def make_store_url(url: str | Path) -> URL:
    """SQLAlchemy's URL of a store. A text without a scheme, or after `sqlite:`, is the path of a SQLite file.

    Raises StoreError.
    """
    text = str(url)
    scheme = None if isinstance(url, Path) else _SCHEME.match(text)
    if scheme is None:
        if not isinstance(url, Path) and (_NEARLY.match(text) or "://" in text or ("//" in text and "@" in text)):
            raise StoreError(_NOT_A_URL)
        plain = text if isinstance(url, Path) or not text.lower().startswith("sqlite:") else text[len("sqlite:") :]
        return _checked_file(URL.create("sqlite", database=plain))
    try:
        parsed = make_url(text[: scheme.end()].lower() + text[scheme.end() :])
    except (ArgumentError, ValueError):
        raise StoreError(_NOT_A_URL) from None
    match parsed.drivername:
        case "sqlite" | "sqlite+pysqlite":
            return _checked_file(parsed.set(drivername="sqlite"))
        case "postgresql" | "postgresql+psycopg" | "postgres":
            return _checked_server(parsed.set(drivername="postgresql+psycopg"))
        case other:
            raise StoreError(f"store {store_name(parsed)}: {other} is not supported; use sqlite or postgresql")


def store_name(url: URL) -> str:
    """The name that errors give a store: the path of a SQLite file, or the URL without its password."""
    if url.get_backend_name() == "sqlite" and url.database:
        return url.database
    unshown = [name for name in url.query if name not in _SHOWN]
    shown = url.set(drivername=url.drivername.partition("+")[0]).difference_update_query(unshown)
    return shown.render_as_string(hide_password=True)


def file_of(url: URL) -> Path | None:
    """The file of a SQLite URL; None for a database in memory."""
    database = url.database or ""
    if "uri" in url.query:
        database = unquote(urlsplit(database).path)
    return None if database in ("", ":memory:") or url.query.get("mode") == "memory" else Path(database)


def check_apart(path: Path, url: str | Path) -> None:
    """Raises UsageError if `path` is a file of the store at `url`: its SQLite file, or one that SQLite keeps beside it.
    Raises StoreError for a malformed `url`."""
    own = file_of(make_store_url(url))
    if own is not None and any(same_file(path, own.with_name(own.name + end)) for end in ("", *_BESIDE)):
        raise UsageError(f"{path}: is a file of the trial store; name another file")


def check_file(url: URL, name: str, create: bool) -> None:
    """Raises StoreError if the path cannot be that of a file or, with `create=False`, if no file is there."""
    path = file_of(url)
    if path is None:
        return
    try:
        is_there = path.exists()
        if path.is_dir():
            raise StoreError(f"store {name}: is a directory, not a file")
        if not path.parent.is_dir():
            raise StoreError(f"store {name}: directory {path.parent} does not exist")
    except OSError as error:
        raise StoreError(f"store {_short(name)}: cannot be opened: {error.strerror or error}") from None
    if not is_there and not create:
        raise StoreError(f"store {name}: does not exist")
    if not is_there and not os.access(path.parent, os.W_OK):
        raise StoreError(f"store {name}: cannot be created: directory {path.parent} is read-only")


def readable(url: URL) -> URL:
    """The URL that opens a SQLite file. It opens the file read-only if this process may not write it, or may not create
    its write-ahead log. Source: SQLite, "Read-Only WAL-Mode Databases"."""
    path = file_of(url)
    if path is None or "uri" in url.query or not path.exists():
        return url
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        return url
    options = {"uri": "true", "mode": "ro"}
    if not path.with_name(path.name + "-wal").exists():  # nobody has it open
        options["immutable"] = "1"
    return url.set(database=f"file:{quote(str(path.resolve()))}").update_query_dict(options)


def _checked_file(url: URL) -> URL:
    name = store_name(url)
    if url.host is not None or url.username is not None:
        raise StoreError("store: a path follows sqlite:/// with three slashes, or sqlite: with none")
    if any(ord(char) < 32 for char in url.database or ""):
        raise StoreError(f"store {_short(name)}: no file has a control character in its name")
    for parameter, value in url.query.items():
        if parameter not in _SQLITE:
            raise StoreError(f"store {name}: no parameter {_short(parameter)!r}; there are {', '.join(_SQLITE)}")
        known, wanted = _SQLITE[parameter]
        if not isinstance(value, str) or known.fullmatch(value) is None:
            raise StoreError(f"store {name}: parameter {parameter} must be {wanted}")
        if parameter in _IN_URI and url.query.get("uri") not in ("true", "1"):
            raise StoreError(f"store {name}: parameter {parameter} needs a file: URI and uri=true")
    return url


def _checked_server(url: URL) -> URL:
    if "@" in (url.host or "") or "@" in (url.database or ""):
        raise StoreError("store: an @ in a user or password is written %40 in a URL")
    return url


def check_parameters(url: URL, name: str) -> None:
    """Raises StoreError if libpq does not know a parameter of a PostgreSQL URL."""
    from psycopg import pq

    known = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
    for parameter in url.query:
        if parameter not in known:
            raise StoreError(f"store {name}: libpq has no parameter {_short(parameter)!r}")


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."
