from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flywheel.interop.mpk.graph import MpkGraph, read_graph
from flywheel.interop.mpk.proof import check
from flywheel.ir.validate.findings import ValidationResult

GRAPHS = Path(__file__).parent / "graphs"


def _bytes(name: str) -> bytes:
    return lzma.decompress((GRAPHS / f"{name}.json.xz").read_bytes())


@pytest.fixture(scope="session")
def sample() -> Callable[[str], bytes]:
    """The bytes of a sample, by its name."""
    return _bytes


@pytest.fixture(scope="session")
def graph() -> Callable[..., MpkGraph]:
    """A sample's graph, its document first changed by a function if one is given."""
    read: dict[str, MpkGraph] = {}

    def make(name: str, change: Callable[[dict[str, Any]], object] | None = None) -> MpkGraph:
        if change is not None:
            document = json.loads(_bytes(name))
            change(document)
            return read_graph(json.dumps(document).encode())
        if name not in read:
            read[name] = read_graph(_bytes(name))
        return read[name]

    return make


@pytest.fixture(scope="session")
def checked(graph: Callable[..., MpkGraph]) -> Callable[..., ValidationResult]:
    """`checked(workers, *names)`: what the proof says of the samples of those names, found once."""
    found: dict[tuple[int | None, tuple[str, ...]], ValidationResult] = {}

    def judge(workers: int | None, *names: str) -> ValidationResult:
        key = workers, names
        if key not in found:
            found[key] = check([graph(name) for name in names], workers)
        return found[key]

    return judge
