"""The cache of compiled functions, in processes of their own."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flywheel.sealed import unseal

ROOT = Path(__file__).parents[1]
SCRIPT = (
    "import json, outer\n"
    "value = outer.thrice(14)\n"
    "stats = outer.thrice.stats\n"
    "print(json.dumps([value, sum(stats.cache_hits.values()), sum(stats.cache_misses.values())]))\n"
)
COMPILED, LOADED = [42, 0, 1], [42, 1, 0]
"""What SCRIPT prints: the value, and how often the code came from the cache, and did not."""


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


STRANGE: dict[str, Callable[[Path], None]] = {"a pipe": os.mkfifo, "a link to a device": endless, "a terabyte": huge}


class Place:
    """A module of two compiled functions, the first of which inlines the second, and the folder of their code."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.code = folder, folder / "code"
        (folder / "outer.py").write_text(
            "from flywheel.compiled import bare\nfrom inner import times\n\n\n"
            "@bare\ndef thrice(n):\n    return times(n)\n"
        )
        self.write(3)

    def write(self, factor: int) -> None:
        """The inlined function, anew. Processes keep no bytecode, which holds for any source of its second and size."""
        text = f"from flywheel.compiled import bare\n\n\n@bare\ndef times(n):\n    return {factor} * n\n"
        (self.folder / "inner.py").write_text(text)

    def start(self, script: str = SCRIPT, **more: Any) -> subprocess.Popen[str]:
        settings = {"NUMBA_CACHE_DIR": str(self.code), "PYTHONPATH": f"{self.folder}:{ROOT}", **more.pop("env", {})}
        return subprocess.Popen(
            [sys.executable, "-B", "-c", script], env={**os.environ, **settings}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
        )  # fmt: skip

    def run(self, **more: Any) -> tuple[list[int], str]:
        """What a process prints, and what it says on stderr."""
        with self.start(**more) as process:
            said, complaints = process.communicate(timeout=100)
        assert process.returncode == 0, complaints
        return json.loads(said), complaints

    def files(self, function: str) -> list[Path]:
        return sorted(self.code.glob(f"*/*.{function}-*.code"))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where the code is stored. Tests put back what they change."""
    place = Place(tmp_path_factory.mktemp("warm"))
    assert place.run() == (COMPILED, "")
    return place


def flipped(raw: bytes) -> bytes:
    """A byte of the machine code is another one."""
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]


def test_code_that_is_stored_is_loaded(warm: Place) -> None:
    assert warm.run() == (LOADED, "")


@pytest.mark.parametrize(
    "damage",
    [lambda raw: b"", lambda raw: raw[:-1], lambda raw: raw[:64], flipped, lambda raw: b"\x80\x04garbage\n" * 9],
    ids=["empty", "cut", "only its digest", "a byte", "garbage"],
)
def test_a_damaged_file_is_compiled_again(warm: Place, damage: Callable[[bytes], bytes]) -> None:
    (file,) = warm.files("thrice")
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert warm.run() == (COMPILED, "")
    assert len(file.read_bytes()) == len(whole)


@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_what_is_no_plain_file_is_not_read_but_replaced(warm: Place, make: Callable[[Path], None]) -> None:
    (file,) = warm.files("thrice")
    file.unlink()
    make(file)
    assert warm.run() == (COMPILED, "")
    assert file.lstat().st_size < 1e6
    assert unseal(file.read_bytes()) is not None


@pytest.mark.parametrize("make", [os.mkfifo, endless], ids=["a pipe", "a link to a device"])
def test_a_lock_that_is_no_plain_file_keeps_nobody_waiting(warm: Place, make: Callable[[Path], None]) -> None:
    (file,) = warm.files("thrice")
    file.unlink()
    lock = file.with_name("flywheel.lock")
    lock.unlink(missing_ok=True)
    make(lock)
    found, said = warm.run()
    lock.unlink()
    assert found == COMPILED
    fact = "no regular file of 256 MiB at most"
    assert said == f"flywheel: does not wait for others that compile: {str(lock)!r}: {fact}\n"


def test_code_of_an_older_function_that_is_inlined_is_not_used(place: Place) -> None:
    place.run()
    place.write(4)
    (value, _, misses), _ = place.run()
    assert (value, misses) == (56, 1)


def test_the_code_of_another_function_is_not_used_under_this_ones_name(warm: Place) -> None:
    (own,), (other,) = warm.files("thrice"), warm.files("times")
    own.write_bytes(other.read_bytes())
    assert warm.run()[0] == COMPILED


def test_of_two_processes_one_compiles(place: Place) -> None:
    both = [place.start(), place.start()]
    found = [json.loads(process.communicate(timeout=100)[0]) for process in both]
    assert sorted(found) == sorted([COMPILED, LOADED])


def test_who_waits_for_another_process_says_so(warm: Place) -> None:
    (file,) = warm.files("thrice")
    stored = file.read_bytes()
    file.unlink()
    with (file.parent / "flywheel.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = warm.start(f"import flywheel.compiled\nflywheel.compiled._SAY_S = 0.2\n{SCRIPT}")
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line == f"flywheel: waits for another process that compiles, for 120 s at most ({lock.name})\n"
        file.write_bytes(stored)
    assert json.loads(process.communicate(timeout=100)[0]) == LOADED


def test_who_waits_for_a_process_that_hangs_compiles_in_the_end(warm: Place) -> None:
    (file,) = warm.files("thrice")
    file.unlink()
    with (file.parent / "flywheel.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hasty = f"import flywheel.compiled\nflywheel.compiled._WAIT_S = 0.5\n{SCRIPT}"
        assert json.loads(warm.start(hasty).communicate(timeout=100)[0]) == COMPILED


def test_a_process_that_is_killed_while_it_compiles_keeps_nobody(place: Place) -> None:
    slow = "import numba.core.compiler as c, time\nc.CompilerBase.compile_extra = lambda *_: time.sleep(600)\n"
    with place.start(slow + SCRIPT) as process:
        end = time.monotonic() + 60
        while not list(place.code.glob("*/flywheel.lock")) and time.monotonic() < end:
            time.sleep(0.02)
        process.kill()
    assert place.run() == (COMPILED, "")


def test_a_disk_that_is_full_costs_the_cache_and_no_result(place: Place) -> None:
    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    found, said = place.run(preexec_fn=fill)
    folder = next(place.code.iterdir())
    assert found == COMPILED
    assert said == f"flywheel: compiled code is not kept: {str(folder)!r}: File too large; each start compiles again\n"
    assert place.files("thrice") == [] and not list(folder.glob("*.code.*"))


def test_where_no_folder_is_writable_code_is_compiled_and_a_line_says_why(place: Place) -> None:
    nowhere = {"NUMBA_CACHE_DIR": "/dev/null/x", "NUMBA_CACHE_LOCATOR_CLASSES": "UserProvidedCacheLocator"}
    fact = "compiled code is not kept, since no folder for it is writable; NUMBA_CACHE_DIR can name one"
    assert place.run(env=nowhere) == (COMPILED, f"flywheel: {fact}\n")


def test_without_a_home_no_folder_is_made_in_the_working_directory(place: Place, tmp_path: Path) -> None:
    homeless = f"import os\nos.path.expanduser = lambda path: path\n{SCRIPT}"
    work = tmp_path / "work"
    work.mkdir()
    with place.start(homeless, cwd=work) as process:
        assert json.loads(process.communicate(timeout=100)[0]) == COMPILED
    assert list(work.iterdir()) == []
