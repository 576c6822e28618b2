"""The table of opcodes in docs/ir.md, made from the table of operations. `python -m flywheel.ir.opcode_table [PATH]`
writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from flywheel.ir.operations import OPERATIONS, Operand, Operation

DEFAULT_PATH: Final = Path("docs/ir.md")
BEGIN: Final = "<!-- flywheel.ir.opcode_table -->\n"
END: Final = "<!-- end -->\n"
_HEAD: Final = (
    "| code | opcode | inputs | output | params, [optional] | meaning |",
    "|---|---|---|---|---|---|",
)


def opcode_table() -> str:
    """The table in Markdown."""
    return "\n".join((*_HEAD, *map(_row, OPERATIONS.values()))) + "\n"


def with_table(text: str) -> str:
    """The page `text` with the table between its marks. Raises ValueError where a mark is missing."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + opcode_table() + END + rest.split(END, 1)[1]


def _row(row: Operation) -> str:
    inputs = ", ".join(map(_operand, row.inputs))
    least, most = row.arity
    if most > len(row.inputs):
        inputs = f"{least} to {most}: {_operand(row.inputs[-1])}" if row.inputs else f"{least} to {most}"
    _, outputs = row.n_outputs
    output = _operand(row.output) if row.output is not None else (f"1 to {outputs}" if outputs else "")
    params = ", ".join((*row.params, *(f"[{name}]" for name in (*row.options, *row.together))))
    return f"| {int(row.kind)} | {row.kind.name} | {inputs} | {output} | {params} | {row.meaning} |".replace("  ", " ")


def _operand(operand: Operand) -> str:
    text = f"`{operand.name} {operand.extent}`"
    return f"[{text}]" if operand.optional else text


if __name__ == "__main__":
    page = Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_PATH
    page.write_text(with_table(page.read_text(encoding="utf-8")), encoding="utf-8")
