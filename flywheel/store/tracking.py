"""Where a mirror is: tracking URIs, how messages show them, and checks before MLflow connects.

MLflow itself waits for a database for minutes, and a URI may hold a password.
"""

from __future__ import annotations

import re
import threading
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from sqlalchemy import URL, NullPool, create_engine, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from flywheel.errors import MirrorError, UsageError
from flywheel.store.places import file_of, make_store_url

CONNECT_S: Final = 5
"""Seconds after which a tracking database that has not answered is given up."""
ANSWER_S: Final = 2.0
"""Seconds after which a tracking server that has not answered is reported."""

_PARTS: Final = re.compile(r"([a-z][a-z0-9+.-]*:/*)?(.*@)?([^?#]*)", re.IGNORECASE | re.DOTALL)
_PATIENT: Final = ("postgresql", "mysql", "mariadb")
"""Databases whose drivers take `connect_timeout`."""


def local_tracking(store_url: str) -> str:
    """Tracking URI beside a SQLite store, else in the working directory: a SQLite file, mlflow.db."""
    file = file_of(make_store_url(store_url)) if make_store_url(store_url).get_backend_name() == "sqlite" else None
    folder = Path.cwd() if file is None else file.resolve().parent
    return f"sqlite:///{folder / 'mlflow.db'}"


def shown(uri: str) -> str:
    """A tracking URI without its password and its parameters, even if it is malformed."""
    found = _PARTS.match(uri)
    assert found is not None  # every part may be empty
    scheme, secret, rest = found.groups()
    if "@" in uri.partition("?")[2]:  # of a password with a question mark, or of one among the parameters
        return f"{scheme or ''}***"
    if secret is None or (scheme or "").lower().startswith("sqlite:"):  # a file has no password; its name may have an @
        return f"{scheme or ''}{secret or ''}{rest}"
    return f"{scheme or ''}{secret.partition(':')[0] if ':' in secret else ''}:***@{rest}"


def _quoted(uri: str) -> str:
    """A malformed URI as `shown` has it. Where it may hold a password, what follows is left out, since the password may
    have slipped there."""
    said = shown(uri)
    return repr(said if "@" not in said else f"{said.partition('@')[0]}@...")


def check_tracking(uri: str, store_url: str) -> None:
    """Raises UsageError for a malformed URI, for a database whose driver is not installed, and for the store itself;
    MirrorError for a database that does not answer within CONNECT_S."""
    if is_server(uri):
        _check_server(uri)
    elif "://" in uri:
        _check_database(uri, make_store_url(store_url))


def is_server(uri: str) -> bool:
    """Whether a tracking URI is that of a server, which has pages to look at."""
    return re.match("https?:", uri, re.IGNORECASE) is not None


def check_answer(uri: str) -> None:
    """Raises MirrorError for a server that does not answer within ANSWER_S, whatever the reason."""
    if not is_server(uri):
        return
    found: list[str] = ["nothing was heard"]
    asking = threading.Thread(target=_ask, args=(uri, found), daemon=True)  # a name server may take longer
    asking.start()
    asking.join(ANSWER_S)
    if found[-1]:
        raise MirrorError(f"MLflow {shown(uri)}: does not answer: {found[-1]}")


def _ask(uri: str, found: list[str]) -> None:
    """Ask once, and append the trouble to `found`, or an empty text: any answer shows that the server is there."""
    parts = urlsplit(uri)
    kind = HTTPSConnection if parts.scheme.lower() == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request("GET", f"{parts.path.rstrip('/')}/health")
        connection.getresponse()
    except (OSError, HTTPException) as error:
        found.append(getattr(error, "strerror", None) or str(error) or type(error).__name__)
    else:
        found.append("")
    finally:
        connection.close()


def _check_server(uri: str) -> None:
    try:
        parts = urlsplit(uri)
        fine = bool(parts.hostname) and parts.port != 0
    except ValueError:
        fine = False
    if not fine:
        raise UsageError(f"MLflow: the tracking URI {_quoted(uri)} is not a URL of a server")


def _check_database(uri: str, store: URL) -> None:
    try:
        url = make_url(uri)
        driver = url.get_dialect()
    except (ArgumentError, ValueError):
        raise UsageError(f"MLflow: the tracking URI {_quoted(uri)} is not a database URL") from None
    except NoSuchModuleError:
        return  # no database: MLflow has schemes of its own
    if _is_same(url, store):
        raise UsageError(f"MLflow {shown(uri)}: is the store; MLflow's tables need another database")
    kind = url.get_backend_name()
    try:
        driver.import_dbapi()
        engine = create_engine(
            url, poolclass=NullPool, connect_args={"connect_timeout": CONNECT_S} if kind in _PATIENT else {}
        )
    except ImportError as error:
        raise UsageError(f"MLflow {shown(uri)}: its driver {error.name or kind} is not installed") from None
    if kind not in _PATIENT:
        return
    try:
        engine.connect().close()
    except SQLAlchemyError as error:
        said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
        raise MirrorError(f"MLflow {shown(uri)}: does not answer: {said}") from None


def _is_same(url: URL, store: URL) -> bool:
    if url.get_backend_name() != store.get_backend_name():
        return False
    if store.get_backend_name() == "sqlite":
        ours, theirs = file_of(store), file_of(url)
        return ours is not None and theirs is not None and ours.resolve() == theirs.resolve()
    return _server_of(url) == _server_of(store)


def _server_of(url: URL) -> tuple[object, ...]:
    return (url.host or url.query.get("host"), url.port or 5432, url.database)
