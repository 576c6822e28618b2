from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import pytest

from flywheel.errors import FlywheelError
from flywheel.measure.outcome import Crashed, Predicted
from flywheel.search.engine import InlineEngine, PoolEngine


def test_a_pool_finds_what_one_process_finds(lab: Any) -> None:
    with PoolEngine(lab.bench(), 2) as pool:
        lab.run(lab.spec(name="pool", trials=14), pool)
    lab.run(lab.spec(name="inline", trials=14), InlineEngine(lab.bench()))
    pooled, inline = (
        [(record.program_id, record.predicted_us) for record in lab.store.trials(name)] for name in ("pool", "inline")
    )
    assert pooled == inline
    # Only the second campaign could be answered by the first.
    assert {record.source for record in lab.store.trials("inline")} == {"store"}


def test_a_config_that_kills_its_process_crashes_alone(lab: Any, toy_measures: ModuleType) -> None:
    with PoolEngine(lab.bench(toy_measures.deadly), 2) as pool:
        result = lab.run(lab.spec(sampler="grid", trials=28), pool, lab.space(threads="288"))
        config = lab.space().to_config({**lab.space().known_good()[0], "depth": 8})
        assert isinstance(pool.submit(config)().outcome, Predicted)
    assert result.outcomes == {"predicted": 6, "crashed": 1}
    (dead,) = [record for record in lab.store.trials("toy") if record.outcome == "crashed"]
    assert '"pipelining_depth":4' in dead.config
    assert dead.reason == "the evaluating process died twice"


def test_a_death_of_the_configs_own_is_no_transient(lab: Any, toy_measures: ModuleType) -> None:
    space = lab.space()
    config = space.to_config({**space.known_good()[0], "depth": 4})
    with PoolEngine(lab.bench(toy_measures.deadly), 1) as pool:
        evaluation = pool.submit(config)()
    assert evaluation.outcome == Crashed("the evaluating process died twice", transient=False)
    assert evaluation.program_id is None


def test_a_pool_that_cannot_start_is_news_not_an_outcome(lab: Any) -> None:
    bench = lab.bench()
    unable = type(bench)(bench.workload, partial(int, "not a number"), bench.measure)
    with PoolEngine(unable, 1) as pool, pytest.raises(FlywheelError, match=r"^worker processes: they die before"):
        lab.run(lab.spec(), pool)
    assert lab.configs() == []
