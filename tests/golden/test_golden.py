from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from pathlib import Path

from flywheel.ir import MegakernelProgram, load_program, program_to_json, validate

FOLDER = Path(__file__).parent
programs: Callable[[], Iterator[tuple[Path, MegakernelProgram]]] = runpy.run_path(str(FOLDER / "regenerate.py"))[
    "programs"
]


def test_lowering_gives_the_golden_programs_byte_for_byte() -> None:
    """A difference is either a bug or wanted: then run `python tests/golden/regenerate.py` and read its diff."""
    differing = [path.name for path, program in programs() if path.read_text() != program_to_json(program) + "\n"]
    assert differing == []


def test_golden_programs_are_proved() -> None:
    for path, _ in programs():
        program = load_program(path)
        assert validate(program, strict=True).ok, path.name


def test_every_golden_file_belongs_to_a_config() -> None:
    assert {path for path, _ in programs()} == set(FOLDER.glob("*.json"))
