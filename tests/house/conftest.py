from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return Path(__file__).parents[2]


@pytest.fixture(scope="session")
def product(root: Path) -> list[Path]:
    """Every Python file of the package."""
    return sorted((root / "flywheel").rglob("*.py"))
