from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

# One worker a core already: torch's own threads, which wait by spinning, made small tensors a hundred times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Two loaded cores make any deadline flaky, and a failure has to repeat on another machine.
settings.register_profile(
    "ci", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-gpu", action="store_true", help="fail the tests marked gpu instead of skipping them")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With --require-gpu, a test marked gpu that skips has failed."""
    report = yield
    skipped = report.skipped and not hasattr(report, "wasxfail")
    if skipped and item.config.getoption("--require-gpu") and item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"--require-gpu: {report.longrepr[2] if isinstance(report.longrepr, tuple) else 'skipped'}"
    return report
