"""docs/ir.md says what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path

from fusing import PATTERNS

from flywheel.ir import (
    PARAM_FIELDS,
    RECIPE_PARAM_FIELDS,
    TARGETS,
    InstructionKind,
    program_from_dict,
    program_to_dict,
    validate,
)
from flywheel.ir.opcode_table import opcode_table, with_table
from flywheel.ir.validate.findings import CODES, STRICT_CODES
from flywheel.lowering.fusion import Pattern

TEXT = (Path(__file__).parents[2] / "docs" / "ir.md").read_text()


def test_every_code_is_in_the_table_of_rules() -> None:
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", TEXT, re.MULTILINE))
    codes = {code: text for code, text in rows.items() if code not in ("meta", "target", "config")}
    assert codes.keys() - {"buffers", "counters", "tasks", "pages", "ranks", "tiling"} == CODES.keys()
    assert {code for code, text in codes.items() if "strict error" in text} == STRICT_CODES


def test_the_table_of_opcodes_is_the_generated_one() -> None:
    assert with_table(TEXT) == TEXT
    assert all(f"| {int(kind)} | {kind.name} |" in opcode_table() for kind in InstructionKind)


def test_params_and_targets_are_named() -> None:
    for name in (*PARAM_FIELDS, *RECIPE_PARAM_FIELDS):
        assert f"`{name}`" in TEXT
    for name in TARGETS:
        assert re.search(rf"\b{name}\b", TEXT)


def test_the_runs_that_fuse_are_the_patterns_of_lowering() -> None:
    section = TEXT.split("### Runs that fuse\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\S+) \| ([`-].*) \| (`.*) \| ([`-].*) \|$", section, re.MULTILINE)
    documented = {name: Pattern(*(tuple(re.findall(r"`(\w+)`", cell)) for cell in cells)) for name, *cells in rows}
    assert documented == PATTERNS


def test_the_example_is_a_valid_program_as_it_would_be_written() -> None:
    blocks = re.findall(r"```json\n(.*?)```", TEXT, re.DOTALL)
    example = json.loads(blocks[-1])
    program = program_from_dict(example)
    assert program_to_dict(program) == example
    assert validate(program, strict=True).ok


def test_links_within_the_page_lead_somewhere() -> None:
    titles = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    headings = {re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-") for title in titles}
    for link in re.findall(r"\]\(#([a-z-]+)\)", TEXT):
        assert link in headings
