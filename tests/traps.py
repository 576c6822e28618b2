"""A working directory full of modules that nothing may import."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
NAMES: Final = (
    "alembic", "click", "flywheel", "mlflow", "multiprocessing", "numpy", "optuna", "pickle", "signal", "socket",
    "sqlalchemy", "uvicorn", "gunicorn", "flask",
)  # fmt: skip
TRAP: Final = "import pathlib\npathlib.Path({mark!r}).write_text(__name__)\nraise SystemExit('trapped')\n"


def lay_traps(folder: Path, outside: Path) -> tuple[list[str], Path]:
    """Fill a folder with traps: the installed command, which lies in `outside`, and the file that a trap leaves."""
    script, sprung = outside / "bin" / "flywheel", outside / "sprung"
    script.parent.mkdir()
    script.write_text("from flywheel.__main__ import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n")
    for name in NAMES:
        (folder / f"{name}.py").write_text(TRAP.format(mark=str(sprung)))
    return [sys.executable, str(script)], sprung


def environment() -> dict[str, Any]:
    """Of that command: it finds flywheel here, and no options."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FLYWHEEL_")}
    return {**kept, "PYTHONPATH": str(ROOT)}
