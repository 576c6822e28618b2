"""`flywheel diff`: how two programs differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import click

from flywheel.cli.exits import DIFFERENT
from flywheel.cli.files import load_program
from flywheel.cli.inspect import describe
from flywheel.cli.options import command, json_option
from flywheel.cli.text import cell, pairs, show, show_json, show_table
from flywheel.ir import MegakernelProgram, config_to_dict, program_to_dict
from flywheel.report.layer import operation

TOTALS: Final = (
    "program_id", "tasks", "buffers", "counters", "waits", "work", "weight_bytes", "scratch_bytes", "depth",
    "predicted_us",
)  # fmt: skip
_NUMBERS: Final = (int, float)
RECORDS: Final = ("tasks", "buffers", "counters", "pages", "buffers on pages")


@command
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@json_option
@click.pass_context
def diff(ctx: click.Context, first: str, second: str, as_json: bool) -> None:
    """Compare two programs: config, target, tasks, waits, bytes and predicted latency.

    Exit code 0 if they are the same, 1 if they differ.
    """
    before, after = load_program(first), load_program(second)
    same = _canonical(program_to_dict(before)) == _canonical(program_to_dict(after))
    document = {"a": first, "b": second, "same": same, **differences(before, after)}
    if as_json:
        show_json(document)
    elif same:
        show("same")
    else:
        _show(document)
    if not same:
        ctx.exit(DIFFERENT)


def differences(before: MegakernelProgram, after: MegakernelProgram) -> dict[str, dict[str, list[Any]]]:
    """Section -> name -> its value in both programs, where they differ; None where a program has no such name.

    `records` has, by kind, the number of records that only one of the programs has.
    """
    pair = (before, after)
    sections: dict[str, list[Mapping[str, Any]]] = {
        "totals": [_flat(_totals(program)) for program in pair],
        "meta": [program.meta for program in pair],
        "target": [asdict(program.target) if program.target else {} for program in pair],
        "config": [_flat(config_to_dict(program.config)) if program.config else {} for program in pair],
        "tasks": [Counter(f"{operation(task.label)} ({task.op.name})" for task in program.tasks) for program in pair],
    }
    differing = {section: _differing(first, second) for section, (first, second) in sections.items()}
    return differing | {"records": _changed(program_to_dict(before), program_to_dict(after))}


def _totals(program: MegakernelProgram) -> dict[str, Any]:
    facts = describe(program)
    return {"ir_version": program.ir_version, "abi_version": program.abi_version} | {n: facts[n] for n in TOTALS}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[Any]]:
    """Kind -> the number of records that only the first has, and only the second; kinds without any are left out."""
    changed = {}
    for kind in RECORDS:
        first, second = _records(before, kind), _records(after, kind)
        if first != second:
            changed[f"{kind} only here"] = [(first - second).total(), (second - first).total()]
    return changed


def _records(document: dict[str, Any], kind: str) -> Counter[str]:
    """Canonical text of each record of a kind -> how often it occurs."""
    if kind in ("tasks", "buffers", "counters"):
        return Counter(map(_canonical, document[kind]))
    pages = document["pages"]
    if pages is None:
        return Counter()
    return Counter(map(_canonical, pages["pages"] if kind == "pages" else pages["buffer_to_page"].items()))


def _canonical(value: object) -> str:
    """A text that is equal for equal values. NaN equals itself."""
    return json.dumps(value, sort_keys=True, default=str)


def _flat(value: object, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{name}.{key}" if name else str(key))
    return flat


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, list[Any]]:
    return {
        name: [before.get(name), after.get(name)]
        for name in dict.fromkeys([*before, *after])
        if _canonical(before.get(name)) != _canonical(after.get(name))
    }


def _show(document: Mapping[str, Any]) -> None:
    differing = [
        (section, name, before, after)
        for section, names in document.items()
        if isinstance(names, Mapping)
        for name, (before, after) in names.items()
    ]
    rows, words = [], []
    for section, name, before, after in differing:
        if all(value is None or type(value) in _NUMBERS for value in (before, after)):
            rows.append((section, name, _text(before), _text(after), _delta(before, after)))
        else:
            words.append((f"{section} {name}", f"{_text(before)} -> {_text(after)}"))
    if rows:
        show_table(("<", "<!", "A", "B", "?B - A"), rows)
    show(*pairs(words, indent=""))
    if not differing:
        show("the same but for the order of records")


def _text(value: object) -> str:
    if isinstance(value, list):
        return " ".join("+".join(map(str, item)) if isinstance(item, list) else str(item) for item in value) or "none"
    return f"{value:,.1f}" if isinstance(value, float) else cell(value)


def _delta(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    delta = after - before
    return f"{delta:+,.1f}" if isinstance(delta, float) else f"{delta:+,}"
