from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import imagined
import pytest

from flywheel.ir import MegakernelProgram

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "cost_model_probes.py"


@pytest.fixture(scope="session")
def probes() -> ModuleType:
    """The experiment: the measured table, and programs like the kernels that were measured."""
    spec = spec_from_file_location(EXPERIMENT.stem, EXPERIMENT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def works() -> ModuleType:
    """Small models whose measurements are made up."""
    return imagined


@pytest.fixture
def work(works: ModuleType) -> MegakernelProgram:
    """A program with every kind of step: attention in parts, merges, norms, several tiles an SM, several copies."""
    found: MegakernelProgram = next(
        program
        for program in works.programs(0, 60)
        if any("combine" in task.label for task in program.tasks) and program.config.pipelining_depth
        and program.config.tiling["stream"]["copies"] > 1
    )
    return found
