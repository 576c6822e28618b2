from __future__ import annotations

import ast
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 60
# A released migration is one frozen table.
FROZEN = "flywheel/store/migrations/versions/"


def test_files_stay_short(root: Path, product: list[Path]) -> None:
    lines = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8").count("\n") for path in product}
    assert {name: count for name, count in lines.items() if count >= FILE_LINES} == {}


def test_functions_stay_short(root: Path, product: list[Path]) -> None:
    lines = {
        f"{path.relative_to(root).as_posix()}:{node.lineno} {node.name}": (node.end_lineno or 0) - node.lineno + 1
        for path in product
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {
        name: count for name, count in lines.items() if count >= FUNCTION_LINES and not name.startswith(FROZEN)
    } == {}


def test_the_readme_is_one_page_of_short_lines(root: Path) -> None:
    lines = (root / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 110] == []
