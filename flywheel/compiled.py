"""Functions that numba compiles. Importing this takes 0.3 s, so import it only before computing."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any, ClassVar, Final, TypeVar, cast

import llvmlite
import numba
from numba.core.caching import FunctionCache
from numba.core.serialize import dumps

from flywheel.sealed import open_plain, read_plain, seal, unseal, write_whole

Function = TypeVar("Function", bound=Callable[..., object])

_LOCK: Final = "flywheel.lock"
_WAIT_S: Final = 120.0
"""Most wall seconds that another process may take to compile a function. Then this one compiles it, too."""
_SAY_S: Final = 5.0
_ASK_S: Final = 0.1
_said: Final[set[str]] = set()


def bare(function: Function) -> Function:
    """The function as machine code, compiled at its first call, which computes in given arrays and makes none.

    It counts no references, and is inlined where it is called, since a call would pass every field of every array.
    Other processes reuse the code where it can be stored.
    """
    njit = cast(Any, numba.njit)
    compiled = njit(_nrt=False, forceinline=True)(function)
    try:
        Path.home()  # raises where this user has none: numba would make a folder "~" here
        compiled._cache = cast(Any, _SealedCache)(function)
    except RuntimeError:  # or neither the function's folder nor the user's cache is writable
        _say("compiled code is not kept, since no folder for it is writable; NUMBA_CACHE_DIR can name one")
    return cast(Function, compiled)


class _SealedCache(FunctionCache):
    """numba's cache of a function, but with one file for each signature and processor, which is whole, and of these
    very sources, or does not count.

    numba's own has an index beside the code. After a kill between the two, the index names another version's code; a
    damaged file is machine code that runs. It also looks at the function's own file only, not at those of functions
    that are inlined. Of several processes one compiles; the others wait.
    Source: numba, `core/caching.py` (Cache, IndexDataCacheFile) and `core/dispatcher.py` (Dispatcher.compile).
    """

    _locks: ClassVar[dict[Path, tuple[IO[bytes], int]]] = {}
    """By folder, the lock that this process holds, and how many functions it compiles there, each for the one before.
    numba lets one thread compile at a time."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The stored code for a signature; None where this process is to compile it."""
        target_context.refresh()
        path = self._path(sig, target_context.codegen())
        found = self._read(path)
        if found is None and self._wait_for_turn(path.parent):
            found = self._read(path)  # another process has compiled meanwhile
            if found is not None:
                self._let_others(path.parent)
        if found is None:
            return None
        return self._impl.rebuild(target_context, pickle.loads(found))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Store the code for a signature, if that is possible."""
        path = self._path(sig, data.codegen)
        try:
            if self._impl.check_cachable(data):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, seal(self._header(path) + b"\n" + cast(Any, dumps)(self._impl.reduce(data))))
        except OSError as error:
            _say(f"compiled code is not kept: {str(path.parent)!r}: {error.strerror}; each start compiles again")
        self._let_others(path.parent)

    def _path(self, sig: Any, codegen: Any) -> Path:
        name = hashlib.sha256(repr((sig, codegen.magic_tuple())).encode()).hexdigest()[:16]
        return Path(self._cache_path) / f"{self._impl.filename_base}.{name}.code"

    def _read(self, path: Path) -> bytes | None:
        try:
            with open_plain(path) as file:
                content = unseal(read_plain(file))
        except OSError:
            return None
        header, _, data = (content or b"").partition(b"\n")
        return data if header == self._header(path) else None

    def _header(self, path: Path) -> bytes:
        """What the code is, and what it was made from."""
        sources = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in sorted(_files(self._py_func))}
        return json.dumps([path.name, numba.__version__, llvmlite.__version__, sources]).encode()

    def _wait_for_turn(self, folder: Path) -> bool:
        """Wait while another process compiles for this folder; whether one may have."""
        lock, depth = self._locks.get(folder, (None, 0))
        if lock is not None:
            self._locks[folder] = lock, depth + 1
            return False
        begun, patience_s = monotonic(), _SAY_S
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = open_plain(folder / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab")
            self._locks[folder] = lock, 1
            while not _taken(lock) and monotonic() - begun < _WAIT_S:
                if monotonic() - begun > patience_s:
                    patience_s = _WAIT_S
                    _say(f"waits for another process that compiles, for {_WAIT_S:g} s at most ({folder / _LOCK})")
                sleep(_ASK_S)
        except OSError as error:  # no regular file, a file system without locks, or one that is full
            _say(f"does not wait for others that compile: {str(folder / _LOCK)!r}: {error.strerror}")
            return False
        return True

    def _let_others(self, folder: Path) -> None:
        lock, depth = self._locks.pop(folder, (None, 0))
        if lock is not None and depth > 1:
            self._locks[folder] = lock, depth - 1
        elif lock is not None:
            lock.close()


def _taken(lock: Any) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _files(function: Any) -> Iterator[str]:
    """The sources of a compiled function and of those that are inlined in it."""
    waiting, seen = [function], set()
    while waiting:
        each = waiting.pop()
        if each in seen:
            continue
        seen.add(each)
        yield each.__code__.co_filename
        named = (each.__globals__.get(name) for name in each.__code__.co_names)
        waiting += [found.py_func for found in named if hasattr(found, "py_func")]


def _say(line: str) -> None:
    """Write a line to stderr, once."""
    if line not in _said:
        _said.add(line)
        with suppress(OSError, ValueError, AttributeError):  # it is closed, or there is none
            sys.stderr.write(f"flywheel: {line}\n")
            sys.stderr.flush()
