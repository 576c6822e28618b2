"""One name, one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path


def test_no_two_classes_have_one_name(root: Path, product: list[Path]) -> None:
    """A class that is private to its module, `_Part`, counts as `Part`: a search for the name finds both."""
    places = defaultdict(list)
    for path in product:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(path.relative_to(root).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
