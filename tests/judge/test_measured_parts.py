from __future__ import annotations

import importlib.util
from pathlib import Path


def test_each_part_of_a_measured_trial_is_a_function_that_there_is() -> None:
    """experiments/measured_parts.py counts functions by their names, and needs a GPU to run."""
    path = Path(__file__).parents[2] / "experiments" / "measured_parts.py"
    spec = importlib.util.spec_from_file_location("measured_parts", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.parts()
    assert len({part for _, _, part in found}) == len(found)
    assert [name for owner, name, _ in found if not callable(getattr(owner, name, None))] == []
