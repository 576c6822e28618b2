"""Measurements say which kernels and which packing they are of."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from flywheel.vm.gpu.sources import PACKING, SOURCES, kernels_id, source_digest


@pytest.fixture
def rooms(tmp_path: Path) -> list[Path]:
    return [Path(shutil.copytree(room, tmp_path / room.name)) for room in (SOURCES, *PACKING)]


@pytest.mark.parametrize("source", ["cuda/ops/matrix.cuh", "plan/staging.py", "pack/stream.py"])
def test_the_id_is_of_kernels_and_of_packing(rooms: list[Path], source: str) -> None:
    assert re.fullmatch("[0-9a-f]{16}", kernels_id())
    assert kernels_id(rooms) == kernels_id()
    changed = rooms[0].parent / source
    text = changed.read_text()
    changed.write_text(text + "\n")
    assert kernels_id(rooms) != kernels_id()
    changed.write_text(text)
    changed.rename(changed.with_stem("another"))
    assert kernels_id(rooms) != kernels_id()


def test_the_digest_for_the_compiler_is_of_kernels_alone(rooms: list[Path]) -> None:
    (rooms[1] / "more.py").write_text("")
    assert source_digest(rooms[0]) == source_digest()


def test_no_lambda_takes_arguments_of_any_type() -> None:
    """NVRTC 13.0 takes such a lambda in a device function for one of the host, and refuses the kernel. Newer ones do
    not, so no compilation here shows it."""
    texts = {path.name: path.read_text() for path in SOURCES.rglob("*.cu*")}
    found = {name: re.findall(r"\](?:\s*)\([^()]*\bauto\b[^()]*\)", text) for name, text in texts.items()}
    assert {name: each for name, each in found.items() if each} == {}
