from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from flywheel.installing import DISTRIBUTION
from flywheel.version import VERSION

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
SEARCH = (
    "search", "--model", "smollm2-135m", "--gpu", "h100", "--measure", "predict", "--trials", "2", "--jobs", "1",
    "--json",
)  # fmt: skip
RUN = """
import sys
import flywheel
assert "site" in flywheel.__file__
from flywheel.__main__ import main
sys.exit(main())
"""


def build(kind: str, tree: Path, files: Path) -> Path:
    """`build_sdist` or `build_wheel` of a source tree."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(files)], cwd=tree, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return files / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of this tree, and the wheel that is built from it."""
    tree, files = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT / "flywheel", tree / "flywheel", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    sdist = build("build_sdist", tree, files)
    with tarfile.open(sdist) as packed:
        packed.extractall(tree / "unpacked", filter="data")
    return sdist, build("build_wheel", next((tree / "unpacked").iterdir()), files)


def test_the_wheel_holds_every_file_of_the_package(built: tuple[Path, Path]) -> None:
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "flywheel").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(built[1]) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
        metadata = wheel.read(f"flywheel_megakernel-{VERSION}.dist-info/METADATA").decode()
        scripts = wheel.read(f"flywheel_megakernel-{VERSION}.dist-info/entry_points.txt").decode()

    assert held == files
    assert {"flywheel/py.typed", "flywheel/vm/cuda/megakernel.cu", "flywheel/vm/cuda/abi.h"} <= held
    assert any(name.startswith("flywheel/store/migrations/versions/0001") for name in held)
    assert metadata.startswith("Metadata-Version:") and f"\nName: {DISTRIBUTION}\nVersion: {VERSION}\n" in metadata
    assert scripts == "[console_scripts]\nflywheel = flywheel.__main__:main\n"


def test_the_sdist_holds_what_the_wheel_is_built_from(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}

    assert {"pyproject.toml", "README.md", "LICENSE", "flywheel/vm/cuda/megakernel.cu", "flywheel/py.typed"} <= held


def test_an_editable_installation_is_a_path_that_type_checkers_follow(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    with tarfile.open(built[0]) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    tree = next((tmp_path / "unpacked").iterdir())
    with zipfile.ZipFile(build("build_editable", tree, tmp_path)) as wheel:
        held = {name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" not in name}

    ((name, path),) = held.items()
    assert name.endswith(".pth")
    assert path.strip() == str(tree)


def bring_machine_code(site: Path) -> None:
    """What numba has compiled of these very sources, where it looks for it: it takes most of a short search's time."""
    for code in (ROOT / "flywheel").rglob("__pycache__/*.nb?"):
        place = site / code.relative_to(ROOT)
        place.parent.mkdir(exist_ok=True)
        shutil.copy(code, place)
    for path in site.rglob("*.py"):
        source = ROOT / path.relative_to(site)
        if source.read_bytes() == path.read_bytes():
            shutil.copystat(source, path)


def test_a_search_runs_from_the_wheel_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(built[1]) as wheel:
        wheel.extractall(tmp_path / "site")
    bring_machine_code(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    done = subprocess.run(
        [sys.executable, "-c", RUN, *SEARCH], cwd=tmp_path, env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert '"predicted": 2' in done.stdout
