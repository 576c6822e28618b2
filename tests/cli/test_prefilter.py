from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from flywheel.cost_model import Predictor, predict
from flywheel.ir import MegakernelProgram, ScheduleConfig
from flywheel.measure.environment import Environment, capture_environment
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Contest, Measured
from flywheel.measure.verdict import judge
from flywheel.search.trials.evaluate import Prepared
from flywheel.search.trials.fleet import Fleet
from flywheel.search.trials.station import Predicting, Setup, Station
from flywheel.store.sql import open_store
from flywheel.store.tsv import from_tsv, to_tsv

Run = Callable[..., Result]
WORK = ("--model", "smollm2-135m", "--gpu", "l4", "--cold")


def measure(program: MegakernelProgram) -> Measured:
    """Twice what is predicted."""
    verdict = judge(error=0.0, where="logits", positions=[1], dtype="BF16")
    us = predict(program).latency_us * 2
    return Measured(MeasuredLatency(us, us, us, 30, 3, "flushed"), verdict)


class Here:
    """A GPU in this process."""

    name = "here"

    def __init__(self, setup: Setup) -> None:
        self._station = Station(setup, {})

    def start(self) -> Environment:
        return self._station.ready()

    def prepare(self, config: ScheduleConfig) -> Prepared:
        return self._station.prepare(config)

    def measure(self, config: ScheduleConfig, rivals: Sequence[ScheduleConfig], rounds: int) -> tuple[Contest, float]:
        return self._station.measure(config, rivals, rounds)

    def end(self, now: bool) -> None:
        pass


@pytest.fixture
def gpu(with_gpu: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that measures what `measure` says."""

    def capture() -> Environment:
        return replace(capture_environment(), gpu="NVIDIA L4", driver="1", nvrtc="13", kernels="0123")

    @contextmanager
    def engine(
        spec: Any, site: object, workload: Any, store: object, predictor: Predictor
    ) -> Iterator[tuple[Fleet, Environment]]:
        filtering = predictor if spec.prefilter is not None else None
        with Fleet([Here(Setup(workload, Predicting(measure), capture, filtering))], lambda *_: None) as fleet:
            yield fleet, fleet.ready()[0]

    with_gpu("NVIDIA L4")
    monkeypatch.setattr("flywheel.search.trials.sites.missing_modules", list)
    monkeypatch.setattr("flywheel.search.run.open_engine", engine)


@pytest.mark.usefixtures("gpu")
def test_the_summary_says_how_many_measurements_predictions_saved(run: Run) -> None:
    options = ("search", *WORK, "--trials", "8", "--sampler", "random", "--prefilter", "1.02", "--name", "spared")
    result = run(*options)
    assert result.exit_code == 0, result.stderr
    with open_store("flywheel.db", create=False) as store:
        rows = [row for row in store.trials("spared") if row.source != "final"]
    saved = [row for row in rows if row.outcome == "predicted"]
    assert 0 < len(saved) < 7
    assert [row.outcome for row in rows][:2] == ["measured"] * 2  # known good ones
    assert f"{len(saved)} measurements saved by predictions" in result.stdout
    assert f"measured {8 - len(saved)}" in result.stdout
    document = json.loads(run(*options, "--json").stdout)
    assert (document["saved"], document["best"]["latency_us"] is not None) == (len(saved), True)
    shown = run("export", "--format", "schedule", "--campaign", "spared").stdout
    assert "--prefilter 1.02" in json.loads(shown)["provenance"]["search"]


@pytest.mark.usefixtures("gpu")
def test_a_campaign_with_spared_trials_is_exported_imported_and_reported(run: Run) -> None:
    run("search", *WORK, "--trials", "6", "--sampler", "random", "--prefilter", "1", "--name", "spared")
    table = run("export", "--format", "tsv", "--campaign", "spared").stdout
    result = run("import", "-", "--name", "again", stdin=table)
    assert result.exit_code == 0, result.stderr
    again = from_tsv(run("export", "--format", "tsv", "--campaign", "again").stdout)
    assert to_tsv(replace(row, campaign="spared", imported_from=None) for row in again) == table
    for command in (("report", "spared", "--output", "page.html"), ("campaigns", "spared"),
                    ("export", "--format", "t4", "--campaign", "spared")):  # fmt: skip
        assert run(*command).exit_code == 0
    assert Path("page.html").exists()


@pytest.mark.usefixtures("gpu")
def test_nothing_is_saved_unless_asked(run: Run) -> None:
    result = run("search", *WORK, "--trials", "3", "--json")
    document = json.loads(result.stdout)
    assert (document["saved"], document["outcomes"]) == (0, {"measured": 3})


def test_an_options_file_may_hold_it(run: Run) -> None:
    Path("campaign.toml").write_text('model = "smollm2-135m"\ngpu = "l4"\nprefilter = 2\njobs = 1\n', encoding="utf-8")
    assert run("search", "--options", "campaign.toml", "--trials", "1").exit_code == 0


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        (("--prefilter", "0.5"), "prefilter=0.5 is not a finite factor of at least 1"),
        (("--prefilter", "nan"), "prefilter=nan is not a finite factor"),
        (("--prefilter", "2", "--measure", "predict"), "measure='predict' makes none"),
    ],
)
def test_what_cannot_filter_is_one_line(options: tuple[str, ...], fact: str, run: Run) -> None:
    result = run("search", *WORK, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert fact in result.stderr
    assert len(result.stderr.splitlines()) == 1
