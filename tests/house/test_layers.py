from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

STDLIB_ONLY = ("flywheel/ir", "flywheel/errors.py")
BELOW = ("flywheel.ir", "flywheel.errors")


def imported_modules(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def is_stdlib_or_ir(module: str) -> bool:
    return module.split(".")[0] in sys.stdlib_module_names or any(f"{module}.".startswith(f"{ok}.") for ok in BELOW)


def test_every_import_keeps_the_layering_contracts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert lint_imports(config_filename=str(root / "pyproject.toml"), no_cache=True, no_logo=True) == 0


def test_the_format_imports_only_the_standard_library(root: Path, product: list[Path]) -> None:
    names = {path: path.relative_to(root).as_posix() for path in product}
    format_files = [path for path in product if names[path].startswith(STDLIB_ONLY)]
    assert format_files
    assert [
        f"{names[path]}: {module}"
        for path in format_files
        for module in imported_modules(path.read_text(encoding="utf-8"))
        if not is_stdlib_or_ir(module)
    ] == []
