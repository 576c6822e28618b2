"""Runs a notebook's cells in this process and writes what they print and what their last expressions are into it.

    python experiments/run_notebook.py docs/tour.ipynb

Cells run one after another in one namespace, in a directory of their own. It knows plain text only, and no magics.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def main() -> None:
    """Run the notebook that the command line names, and replace it."""
    path = Path(sys.argv[1])
    notebook = json.loads(path.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        outputs = list(run(notebook))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, (printed, value)) in enumerate(zip(cells, outputs, strict=True), start=1):
        cell["execution_count"], cell["outputs"] = number, as_outputs(printed, value, number)
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def run(notebook: dict[str, Any]) -> Iterator[tuple[str, str | None]]:
    """Of each code cell what it prints, and its last expression's repr; None where that is None or no expression."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            yield run_cell("".join(cell["source"]), names)


def run_cell(source: str, names: dict[str, Any]) -> tuple[str, str | None]:
    """Run one cell in the namespace `names`."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    return printed.getvalue(), None if value is None else repr(value)


def as_outputs(printed: str, value: str | None, number: int) -> list[dict[str, Any]]:
    """Outputs as nbformat 4 has them."""
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": value.splitlines(keepends=True)}
        outputs.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return outputs


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "100")
    main()
