from __future__ import annotations

from typing import Any

from flywheel.measure.outcome import Predicted
from flywheel.search.trials.engine import InlineEngine


def test_an_engine_without_processes_evaluates_when_it_is_asked(lab: Any) -> None:
    asked = []

    def measure(program: Any) -> Any:
        asked.append(program)
        return lab.measure(program)

    space = lab.space()
    with InlineEngine(lab.bench(measure)) as engine:
        finish = engine.submit(space.to_config(space.known_good()[0]))
        assert asked == []
        assert isinstance(finish().outcome, Predicted)
    assert len(asked) == 1
