from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING

import pytest
from effort import examples
from hypothesis import HealthCheck, settings

from flywheel.process import collect_rarely

if TYPE_CHECKING:
    from postgres_server import Server

# One worker a core already: torch's own threads, which wait by spinning, made small tensors a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray reads these once a process, at its import, whichever test that is in. Its clusters let in nobody else.
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", token_hex(32))

# Triton reads it once a process, at its import. Where there is a GPU, Triton compiles for it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background jobs ignore it, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two loaded cores make any deadline flaky, and a failure has to repeat on another machine.
settings.register_profile(
    "flywheel", deadline=None, derandomize=True, max_examples=examples(50), suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("flywheel")

KEPT_S = 14 * 86400
"""How long a kernel of the GPU is kept."""


@pytest.fixture(autouse=True)
def own_routines(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that changes the bounds on which tasks' routines depend shares no kept routines with other tests."""
    _forget_routines(request)
    yield
    _forget_routines(request)


def _forget_routines(request: pytest.FixtureRequest) -> None:
    routines = sys.modules.get("flywheel.plan.routines")
    if routines is not None and "monkeypatch" in request.fixturenames:
        routines.planned_form.cache_clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail the tests marked gpu instead of skipping them")
    parser.addoption(
        "--emulate-gpu", type=int, choices=(80, 90), default=0, metavar="SM_ARCH",
        help="run the tests of tests/gpu with the kernels for SM_ARCH, 80 or 90, on the CPU",
    )  # fmt: skip


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: some tests wait for servers, and for limits of time to pass."""
    return (os.cpu_count() or 1) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Kernels that were built for the CPU serve all workers, and the next run: they take a minute of one core."""
    kept = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if kept is not None:
        os.environ.setdefault("EMULATOR_KERNELS", str(kept.mkdir("emulator")))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What imports and the collection of tests make lives to the end: Python's collector of garbage is not to look
    through it again and again, which took a tenth of all time. At what tests make it looks as rarely as in a command,
    which takes a sixth less of the time of programs and proofs."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        collect_rarely()
        gc.enable()


@pytest.fixture(scope="session")
def kernel_cache(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where cubins of the kernels stay for other workers and the next run, which then compile only what changed: an
    entry's name is the digest of the sources, of NVRTC's version and of its options."""
    kept = getattr(pytestconfig, "cache", None)
    if kept is None:
        return tmp_path_factory.mktemp("kernels")
    folder: Path = kept.mkdir("cubins")
    for entry in folder.iterdir():
        if time.time() - entry.stat().st_mtime > KEPT_S:
            entry.unlink(missing_ok=True)
    return folder


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With --require-gpu, a test marked gpu that skips has failed."""
    report = yield
    if report.skipped and item.config.getoption("--require-gpu") and item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: {report.longrepr[2] if isinstance(report.longrepr, tuple) else 'skipped'}"
    return report


@pytest.fixture(scope="session")
def empty_tracking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty tracking file, to be copied: MLflow takes two seconds to make one."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("tracking") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A PostgreSQL server of this session's own; without its programs, every test that wants it fails."""
    from postgres_server import MISSING, Server, find_binaries

    binaries = find_binaries()
    if binaries is None:
        pytest.fail(MISSING, pytrace=False)
    with Server(binaries) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty database of each kind that a store can be in."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/store with 100% blanks.db"
        return
    server: Server = request.getfixturevalue("postgres_server")
    url = server.create_database()
    yield url
    server.drop_database(url)
