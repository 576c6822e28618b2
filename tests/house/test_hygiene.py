from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE_DIRS = ("flywheel", "tests", "experiments", "docs", "results", ".ci")
TEXT_SUFFIXES = ("", ".md", ".py", ".toml", ".txt", ".json", ".tsv", ".csv", ".cu", ".cuh", ".h")
MACHINE_PATH = re.compile(r"(?<![\w./-])/(?:work|home|root|Users)/")
UNFINISHED = re.compile(r"\b(?:TO[D]O|FI[X]ME)\b")
BROAD = ("Exception", "BaseException")
SLOW_IMPORTS = (
    "alembic", "cmaes", "cuda", "mlflow", "numpy", "optuna", "pandas", "pynvml", "ray", "safetensors", "scipy",
    "sqlalchemy", "tokenizers", "torch", "transformers",
)  # fmt: skip
HELP = "import sys; sys.argv = ['flywheel', '--help']; from flywheel.cli.main import main; sys.exit(main())"


def texts(root: Path) -> Iterator[tuple[str, str]]:
    nested = (path for name in SOURCE_DIRS for path in (root / name).rglob("*"))
    for path in sorted([*root.glob("[!.]*"), *nested]):
        if path.is_file() and path.suffix in TEXT_SUFFIXES:
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def lines_with(root: Path, pattern: re.Pattern[str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts(root)
        for number, line in enumerate(text.splitlines(), start=1)
        if pattern.search(line)
    ]


def caught_names(kind: ast.expr | None) -> Iterator[str]:
    """Names of the exceptions that an `except` clause catches; a bare one catches BaseException."""
    match kind:
        case None:
            yield "BaseException"
        case ast.Tuple(elts=kinds):
            for each in kinds:
                yield from caught_names(each)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name


def swallows_everything(node: ast.AST) -> bool:
    match node:
        case ast.ExceptHandler(type=kind, body=body):
            reraises = isinstance(body[-1], ast.Raise)
            return not reraises and any(name in BROAD for name in caught_names(kind))
        case ast.Call(func=ast.Name(id="suppress") | ast.Attribute(attr="suppress"), args=kinds):
            return any(name in BROAD for kind in kinds for name in caught_names(kind))
    return False


def test_no_file_names_a_place_on_one_machine(root: Path) -> None:
    assert lines_with(root, MACHINE_PATH) == []


def test_no_file_leaves_work_for_later(root: Path) -> None:
    assert lines_with(root, UNFINISHED) == []


@pytest.mark.parametrize(
    ("source", "swallows"),
    [
        ("try: f()\nexcept: pass", True),
        ("try: f()\nexcept (OSError, Exception): pass", True),
        ("try: f()\nexcept builtins.BaseException: pass", True),
        ("with suppress(Exception): f()", True),
        ("try: f()\nexcept Exception:\n    g()\n    raise", False),
        ("try: f()\nexcept OSError: pass", False),
    ],
)
def test_broad_excepts_are_told_from_narrow_ones(source: str, swallows: bool) -> None:
    assert any(swallows_everything(node) for node in ast.walk(ast.parse(source))) is swallows


def test_no_except_swallows_everything_but_the_workers_last_line_of_defence(root: Path, product: list[Path]) -> None:
    assert [
        path.relative_to(root).as_posix()
        for path in product
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if swallows_everything(node)
    ] == ["flywheel/vm/worker.py"]


def imported_by(code: str) -> set[str]:
    """Top-level names of all that `code` imports."""
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}


def test_help_imports_nothing_slow() -> None:
    imported = imported_by(HELP)
    assert {"click", "flywheel"} <= imported
    assert imported.isdisjoint(SLOW_IMPORTS)


def test_describing_and_lowering_a_model_imports_nothing_slow() -> None:
    imported = imported_by("import flywheel.models.catalog, flywheel.models.decoder, flywheel.lowering.lower")
    assert "flywheel" in imported
    assert imported.isdisjoint(SLOW_IMPORTS)
