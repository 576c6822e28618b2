from __future__ import annotations

from types import ModuleType

import imagined
import pytest

from flywheel.ir import MegakernelProgram


@pytest.fixture(scope="session")
def works() -> ModuleType:
    """Small models whose measurements are made up."""
    return imagined


@pytest.fixture
def work(works: ModuleType) -> MegakernelProgram:
    """A program with attention in parts, and so merges, that reads ahead, with several copies at once."""
    found: MegakernelProgram = next(
        program
        for program in works.programs(0, 60)
        if any("combine" in task.label for task in program.tasks) and program.config.pipelining_depth
        and program.config.tiling["stream"]["copies"] > 1
    )
    return found
