from __future__ import annotations

import re
from pathlib import Path


def test_every_promise_of_what_survives_what_names_a_test_that_is_there(root: Path) -> None:
    text = (root / "docs" / "store.md").read_text(encoding="utf-8")
    table = text.partition("## What survives what")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    sources = "".join(path.read_text(encoding="utf-8") for path in (root / "tests").rglob("test_*.py"))
    assert len(lines) > 10
    for line in lines:
        named = re.findall(r"`(test_\w+)`", line)
        assert named, line
        assert [name for name in named if f"def {name}(" not in sources] == []
