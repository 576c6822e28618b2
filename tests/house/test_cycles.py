from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest


def imports_of(source: str, modules: Sequence[str]) -> Iterator[str]:
    """Those of `modules` that `source` imports: at its top, within functions, and for type checkers only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            children = [f"{node.module}.{alias.name}" for alias in node.names]
            named = [child if child in modules else node.module for child in children]
        else:
            continue
        yield from (name for name in named if name in modules)


def find_cycle(imports: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Modules that import each other in a ring, the first of them again at the end; empty where there is no ring."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        ring: Sequence[str] = error.args[1]
        return ring[::-1]
    return ()


@pytest.mark.parametrize(
    "source",
    [
        "from a.b import c",
        "from a import b",
        "import a.b",
        "def f():\n    from a.b import c",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a.b import C",
    ],
)
def test_an_import_is_seen_wherever_it_stands(source: str) -> None:
    assert list(imports_of(source, ["a", "a.b", "a.c"])) == ["a.b"]


def test_a_ring_of_imports_is_named() -> None:
    assert find_cycle({"a": ["b"], "b": ["c"], "c": []}) == ()
    ring = find_cycle({"a": ["b"], "b": ["c"], "c": ["a"]})
    assert (len(ring), {*ring}) == (4, {"a", "b", "c"})


def test_no_modules_import_each_other_in_a_ring(root: Path, product: list[Path]) -> None:
    paths = {".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path for path in product}
    modules = list(paths)
    assert "flywheel.ir.program" in modules
    imports = {name: list(imports_of(path.read_text(encoding="utf-8"), modules)) for name, path in paths.items()}
    assert find_cycle(imports) == ()
