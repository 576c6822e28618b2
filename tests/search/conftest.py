from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flywheel.ir import TARGETS, ScheduleConfig
from flywheel.measure.environment import Environment
from flywheel.models.spec import DecoderSpec
from flywheel.search.campaign import CampaignResult, CampaignRun, Progress
from flywheel.search.opening import open_campaign
from flywheel.search.space import Space, make_space
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials.engine import EvaluationSetup, InlineEngine, TrialEngine
from flywheel.search.trials.evaluate import Evaluation, Measure
from flywheel.search.trials.predicting import look
from flywheel.search.workload import Workload
from flywheel.store.sql import Store, open_store

SPEC = DecoderSpec("small", "llama", 96, 160, 1, 4, 2, 16, 300, 1e4, 1e-6, 4096)
TARGET = replace(TARGETS["h100"], name="few", num_sms=6)
PINNED = {
    "rows.qkv": "32", "rows.o": "32", "rows.gate_up": "32", "rows.down": "32", "rows.lm_head": "64",
    "kv_block": "64", "fuse.qkv": "1", "fuse.attention": "3", "fuse.out": "1",
    "fuse.mlp_in": "1", "fuse.down": "1", "fuse.head": "1", "placement": "round_robin",
    "smem": "232448", "chunk": "32768", "matrix": "4", "inflight": "98304", "share": "1",
    "hand_off": "counter", "copies": "2",
}  # fmt: skip
"""All but the depth (7 values) and the threads (4)."""


class WideEngine:
    """Holds two evaluations at a time, in this process: what a pool does, without its processes."""

    width = 2

    def __init__(self, bench: EvaluationSetup) -> None:
        self._inline = InlineEngine(bench)
        self.submitted: list[ScheduleConfig] = []

    def submit(
        self,
        config: ScheduleConfig,
        rivals: Sequence[ScheduleConfig] = (),
        rounds: int = 1,
        limit_us: float | None = None,
    ) -> Callable[[], Evaluation]:
        self.submitted.append(config)
        return self._inline.submit(config)


class Lab:
    """A store with a campaign's surroundings."""

    def __init__(self, url: str, store: Store, environment: Environment, measure: Measure) -> None:
        self.url, self.store, self.environment, self.measure = url, store, environment, measure
        self.workload = Workload("small", SPEC, TARGET, "bf16", 64)

    def space(self, **fix: str) -> Space:
        """A toy space of 28 configs, or with `fix` another one."""
        return make_space(self.workload, {**PINNED, **{name.replace("__", "."): value for name, value in fix.items()}})

    def spec(self, **changes: Any) -> CampaignSpec:
        base = {"name": "toy", "context": 64, "measure": "predict", "sampler": "random", "seeds": False, "trials": 12}
        return CampaignSpec("small", "few", **{**base, **changes})

    def bench(self, measure: Measure | None = None) -> EvaluationSetup:
        return EvaluationSetup(self.workload, partial(look, self.store, "few", "bf16"), measure or self.measure)

    def campaign(
        self, spec: CampaignSpec, engine: TrialEngine | None = None, space: Space | None = None
    ) -> CampaignRun:
        space = space or self.space()
        name = open_campaign(spec, space, self.store, fresh=False)
        return CampaignRun(spec, name, space, self.store, engine or InlineEngine(self.bench()), self.environment)

    def run(
        self,
        spec: CampaignSpec,
        engine: TrialEngine | None = None,
        space: Space | None = None,
        watch: Callable[[Progress], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> CampaignResult:
        return self.campaign(spec, engine, space).run(watch, interrupted)

    def configs(self, name: str = "toy") -> list[str]:
        return [record.config_id for record in self.store.trials(name)]


@pytest.fixture
def toy_measures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of stand-in measurements; spawned processes inherit the path to it."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("toy_measures")


@pytest.fixture
def lab(tmp_path: Path, environment: Environment, toy_measures: ModuleType) -> Iterator[Lab]:
    """A fresh store, and a toy space with a smooth objective."""
    url = f"sqlite:///{tmp_path / 'store.db'}"
    with open_store(url) as store:
        yield Lab(url, store, environment, toy_measures.smooth)


@pytest.fixture
def wide() -> Callable[[EvaluationSetup], WideEngine]:
    """Makes engines that hold two evaluations at a time."""
    return WideEngine


@pytest.fixture(scope="session")
def environment() -> Environment:
    return Environment("0.1", "0.2.0", "3.11", "Linux", 2, "lab", None, "5.0", "2.0", None, None, None)
