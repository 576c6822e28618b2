"""`flywheel validate`: prove programs, file by file."""

from __future__ import annotations

from typing import Any

import click

from flywheel.cli.exits import REJECTED
from flywheel.cli.files import load_program
from flywheel.cli.options import command, json_option
from flywheel.cli.text import show, show_json
from flywheel.errors import IrFormatError
from flywheel.ir import Finding, ValidationResult
from flywheel.ir import validate as prove
from flywheel.ir.show import escaped

UNREADABLE = "unreadable"
"""Code of the error of a file that holds no program; it is the only error."""


@command
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--strict", is_flag=True, help="Treat page aliasing and columns that no task writes as errors, too.")
@json_option
@click.pass_context
def validate(ctx: click.Context, files: tuple[str, ...], strict: bool, as_json: bool) -> None:
    """Prove programs free of deadlocks and races; `-` is stdin.

    With --json, one line a file. Exit code 3 if any file is rejected or unreadable; the others are still checked.
    """
    accepted = True
    for path in files:
        result = _verdict(path, strict)
        accepted = accepted and result.ok
        if as_json:
            show_json({"path": path, **_document(result)}, indent=None)
        else:
            show(*f"{escaped(path)}: {result.report()}".split("\n"))
    if not accepted:
        ctx.exit(REJECTED)


def _verdict(path: str, strict: bool) -> ValidationResult:
    try:
        return prove(load_program(path), strict)
    except IrFormatError as error:
        return ValidationResult(False, (Finding(UNREADABLE, str(error).removeprefix(f"{path}: ")),))


def _document(result: ValidationResult) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "errors": [_finding(finding) for finding in result.errors],
        "warnings": [_finding(finding) for finding in result.warnings],
        "stats": dict(result.stats),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {"code": finding.code, "message": finding.message, "task": finding.task}
