"""The dashboard of a campaign: what a person finds there in a real browser, and whose code it runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import pytest
from effort import LONG, examples
from traps import environment, lay_traps

# The flags without network: Chromium would otherwise look for updates, and complain.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PATIENCE_MS = 60_000
REQUIRE_BROWSER = "FLYWHEEL_REQUIRE_BROWSER"


@pytest.fixture
def chromium() -> str:
    """Debian's browser. Where REQUIRE_BROWSER is set, as .ci/run does once it has one, missing it is a failure."""
    found = shutil.which("chromium")
    if found is None:
        if os.environ.get(REQUIRE_BROWSER):
            pytest.fail("no chromium here: apt-get install chromium")
        pytest.skip("no chromium here: apt-get install chromium")
    return found


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One that runs: its address, every process's command line as soon as it was there, and the file of a trap."""

    address: str
    lines: list[bytes]
    sprung: Path


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory, empty_tracking: Path) -> Iterator[Dashboard]:
    """Of a store with one campaign, `small`, in a folder full of traps. Ctrl-C ends it, and its server with it.

    Its tracking file's name stands for a password: it is told by the environment.
    """
    folder, outside = tmp_path_factory.mktemp("dashboard"), tmp_path_factory.mktemp("installed")
    command, sprung = lay_traps(folder, outside)
    shutil.copy(empty_tracking, outside / "s3cret.db")
    search = ("search", "--model", "smollm2-135m", "--gpu", "l4", "--measure", "predict", "--jobs", "2")
    subprocess.run(
        [*command, *search, "--trials", str(examples(24, 6)), "--name", "small", "--store", "trials.db"],
        cwd=folder, env=environment(), capture_output=True, check=True,
    )  # fmt: skip
    process = subprocess.Popen(
        [*command, "dashboard", "--store", "trials.db", "--children", "kept", "--json"], cwd=folder, text=True,
        env={**environment(), "FLYWHEEL_DASHBOARD_TRACKING_URI": f"sqlite:///{outside}/s3cret.db"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    lines = command_lines()
    try:
        assert line, process.communicate()[1]
        url = json.loads(line)["url"]
        yield Dashboard(url, lines, sprung)
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0
    with pytest.raises(OSError, match=r"."):
        urlopen(url, timeout=2)


def command_lines() -> list[bytes]:
    """What everybody on the machine can read of every process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes())
    return found


def test_a_dashboard_is_for_this_machine_runs_no_code_of_the_working_directory_and_tells_nobody_its_password(
    dashboard: Dashboard
) -> None:
    """Nor do the search before it and its two workers. A tracking database's password is on no command line."""
    assert dashboard.address.startswith("http://127.0.0.1:")
    assert any(b"mlflow\0server" in each for each in dashboard.lines)
    assert not [each for each in dashboard.lines if b"s3cret" in each]
    assert not dashboard.sprung.exists()


@LONG
def test_a_browser_finds_the_campaign_its_latency_a_plot_the_report_and_the_schedule(
    dashboard: Dashboard, chromium: str
) -> None:
    from playwright.sync_api import expect, sync_playwright

    foreign: list[str] = []
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=chromium, args=[*FLAGS]) as browser,
    ):
        page = browser.new_page(viewport={"width": 1280, "height": 640})
        page.set_default_timeout(PATIENCE_MS)
        expect.set_options(timeout=PATIENCE_MS)
        page.on("request", lambda made: foreign.append(made.url) if made.url.startswith("http") else None)
        page.goto(dashboard.address)
        for column in ("best_us/predicted", "floor_fraction/predicted", "gained/percent", "model", "weights", "batch"):
            expect(page.get_by_role("columnheader", name=column, exact=True).first).to_be_visible()
        expect(page.get_by_text("Sort: best_us/predicted")).to_be_visible()
        page.get_by_role("link", name="small", exact=True).first.click()
        expect(page.get_by_text("Finished").first).to_be_visible()
        expect(page.get_by_text("us a token").first).to_be_visible()
        expect(page.get_by_role("link", name="Runs", exact=True).first).to_be_visible()
        assert page.get_by_text("Evaluation runs").count() == 0  # of the view for language models
        run = page.url.split("?")[0]
        with page.expect_popup() as opened:
            page.get_by_role("link", name="The report").click()
        report = opened.value.frame_locator("iframe").first
        expect(report.get_by_role("heading", name="small")).to_be_visible()
        opened.value.close()
        page.get_by_role("tab", name="Model metrics").click()
        expect(page.locator(".js-plotly-plot").first).to_be_visible()
        shown = page.locator("body").inner_text()
        assert shown.index("best_us") < shown.index("floor_fraction") < shown.index("outcomes")
        page.get_by_role("tab", name="Artifacts").click()
        page.get_by_text("best_schedule.json").first.click()
        expect(page.get_by_text('"flywheel-schedule"').first).to_be_visible()
        page.get_by_text("report.html").first.click()
        report = page.frame_locator("iframe").first
        expect(report.get_by_role("heading", name="small")).to_be_visible()
        expect(report.locator("svg")).not_to_have_count(0)
        page.get_by_text("plots", exact=True).first.click()
        page.get_by_text("history.svg").first.click()
        plot = page.locator("img[src*='blob:'], img[src*='history.svg'], img[src*='get-artifact']").first
        expect(plot).to_be_visible()
        assert plot.evaluate("image => image.naturalWidth") > 0
    assert re.search(r"/runs/[0-9a-f]{32}", run)
    assert [url for url in foreign if not url.startswith(dashboard.address.split("#")[0])] == []
