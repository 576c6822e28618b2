from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
from rich.console import Console

from flywheel.cli.progress import TREND_WIDTH, LivePanel, PlainLines, make_reporter, seconds_left, trend
from flywheel.cli.text import amount
from flywheel.measure.environment import capture_environment
from flywheel.measure.record import TrialRecord
from flywheel.search.campaign import Progress
from flywheel.search.run import Start
from flywheel.search.spec import CampaignSpec


@pytest.fixture
def start() -> Start:
    return Start(CampaignSpec("m", "h100", trials=40), "c", 0, 19, 1000, capture_environment())


@pytest.fixture
def progress() -> Progress:
    record = TrialRecord(
        campaign="c", trial=7, model="m", gpu="h100", dtype="bf16", context=512, batch=1, config="{}",
        config_id="44136fa355b3",
        outcome="predicted", predicted_us=1000.0, predictor="1", floor_us=800.0, floor_fraction=0.8, source="search",
        sampler="tpe", seed=0, ir_version="0.2.0", python="3", host="h", created_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip
    return Progress(record, record, {"predicted": 6, "timed_out": 2}, 8, 8, 4.0, improved=True)


def test_the_panel_shows_best_floor_outcomes_rate_and_time_left(start: Start, progress: Progress) -> None:
    screen = io.StringIO()
    panel = LivePanel(Console(file=screen, force_terminal=True, width=100, color_system=None))
    with panel:
        panel.start(start)
        panel.watch(progress)
        panel.drain()
    text = screen.getvalue()
    for words in ("m on h100", "1,000 us predicted", "80.0 % reached", "predicted 6, timed out 2", "8/40", "2.0/s"):
        assert words in text
    assert "at trial 7, 0 trials and" in text
    assert "again to abort" in text


def test_one_trial_is_no_plural() -> None:
    assert (amount(1, "trial"), amount(0, "trial"), amount(1200, "trial")) == ("1 trial", "0 trials", "1,200 trials")


def test_the_panel_shows_the_trend_of_the_best_so_far(start: Start, progress: Progress) -> None:
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    panel = LivePanel(Console(file=screen, force_terminal=True, width=100, color_system=None))
    with panel:
        panel.start(start)
        for us in (2000.0, 1500.0, 1000.0):
            record = replace(progress.record, predicted_us=us, floor_us=None, floor_fraction=None)
            panel.watch(replace(progress, best=record))
    screen.seek(0)
    assert "█▅▁ 2,000.0 us to 1,000.0 us" in screen.read()


def test_a_trend_falls_as_the_best_does_and_fits_its_line() -> None:
    assert trend([5.0]) == "▁"
    assert trend([5.0, 5.0]) == "▁▁"
    bars, _, words = trend([1000.0 - trial for trial in range(500)]).partition(" ")
    assert len(bars) == TREND_WIDTH
    assert sorted(bars, reverse=True) == list(bars)
    assert (bars[0], bars[-1]) == ("█", "▁")
    assert words == "1,000.0 us to 501.0 us"


def test_an_aborted_panel_is_gone_and_stays_gone(start: Start, progress: Progress) -> None:
    screen = io.StringIO()
    panel = LivePanel(Console(file=screen, force_terminal=True, width=100, color_system=None))
    panel.abort()
    with panel:
        panel.start(start)
        panel.watch(progress)
        threading.Thread(target=panel.abort).start()
        panel.abort()
        left = screen.getvalue()
    assert screen.getvalue() == left
    assert left.endswith("\x1b[1A\x1b[2K")
    assert left.rindex("\x1b[?25h") > left.rindex("╰")


def test_plain_lines_speak_of_improvements_only(
    start: Start, progress: Progress, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = PlainLines()
    lines.start(start)
    lines.watch(progress)
    for _ in range(20):
        lines.watch(replace(progress, improved=False))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 2
    assert "trials  8/40  best 1,000 us predicted, 80.0 % of floor, trial 7" in shown.err


def test_plain_lines_break_a_long_silence(
    start: Start, progress: Progress, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.cli.progress.QUIET_S", 0.0)
    lines = PlainLines()
    lines.start(start)
    lines.watch(replace(progress, improved=False, best=None))
    assert "none feasible yet" in capsys.readouterr().err


def test_without_a_terminal_there_is_no_panel() -> None:
    assert isinstance(make_reporter(), PlainLines)


def test_the_time_left_is_that_of_the_first_budget_to_run_out() -> None:
    spec = CampaignSpec("m", "g", trials=40)
    assert seconds_left(spec, 0, 0, 0.0) is None
    assert seconds_left(spec, 30, 20, 10.0) == pytest.approx(5.0)
    assert seconds_left(replace(spec, time_s=12.0), 30, 20, 10.0) == pytest.approx(2.0)
