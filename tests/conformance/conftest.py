from __future__ import annotations

import pytest
from conformance.implementations import Model, make_model
from small_decoder import gpu

__all__ = ["gpu", "model"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The model that every implementation decodes."""
    return make_model(tmp_path_factory.mktemp("conformance"))
