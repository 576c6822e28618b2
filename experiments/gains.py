"""Writes docs/gains.md: what the kernels, the schedules that are known, and searching gain, by recorded campaigns.

    python experiments/gains.py

A row is one workload with its newest measured campaign that ended with a final, from the tables `results*.tsv` and
`cold*.tsv` in results. Campaigns whose names begin with `cold` or `bare` had nothing of other work to begin with
(`--cold`), or nothing at all (`--no-seeds`); they have a table of their own. PyTorch's time is the fastest contestant
of the recorded bench of the same work, measured in another run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from flywheel.errors import FlywheelError
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, trials_of
from flywheel.search.gains import Gains, faster, gained
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload
from flywheel.store.campaign import work_named
from flywheel.store.tsv import from_tsv

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gains.md"
OURS = "flywheel"
KINDS = ("cold", "bare")


@dataclass(frozen=True, slots=True)
class Row:
    """A campaign: its work, what it gained, its number of trials, and its table."""

    work: str
    kind: str
    gains: Gains
    trials: int
    table: str


def main() -> None:
    """Write the page, and print how many works it has."""
    newest: dict[tuple[str, str], Row] = {}
    for row in rows():
        before = newest.get((row.work, row.kind))
        if before is None or row.gains.best.created_at > before.gains.best.created_at:
            newest[row.work, row.kind] = row
    found = [newest[key] for key in sorted(newest)]
    PAGE.write_text(page(found, rivals()), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {len({row.work for row in found})} works")


def rows() -> Iterator[Row]:
    """Every campaign of the tables whose best row is of a final."""
    tables = [*(ROOT / "results").rglob("results*.tsv"), *(ROOT / "results" / "gpu").glob("cold*.tsv")]
    for table in sorted(tables):
        text = table.read_text(encoding="utf-8")
        batch = None if "batch" in text.partition("\n")[0].split("\t") else 1
        campaigns: dict[str, list[TrialRecord]] = {}
        for record in from_tsv(text, batch):
            campaigns.setdefault(record.campaign, []).append(record)
        for name, records in campaigns.items():
            best = best_of(records)
            if best is None or best.source != "final":
                continue
            asked = best.model, best.gpu, best.dtype, best.context, best.batch, best.weights
            try:
                gains = gained(make_space(make_workload(*asked)), records)
            except FlywheelError:  # a model that is not in the catalog
                continue
            kind = next((each for each in KINDS if name.startswith(each)), "")
            if gains is not None and (gains.start is not None or kind):
                where = table.relative_to(ROOT).as_posix()
                yield Row(work_named(*asked), kind, gains, len(trials_of(records)), where)


def rivals() -> dict[str, tuple[float, str]]:
    """Work -> (us of the fastest contestant of PyTorch, its name), of the recorded benches."""
    found: dict[str, tuple[float, str]] = {}
    for path in sorted((ROOT / "results" / "gpu").rglob("*.bench.json")):
        bench = json.loads(path.read_text(encoding="utf-8"))
        card = bench["environment"]["gpu"]
        gpu = next((name for name in ("h100", "h200") if name.upper() in card), card)
        shared = f"{card[0]}x{gpu}" if card[1:].startswith(" x ") else gpu
        for each in bench["comparisons"]:
            times = [(other["median_us"], other["name"]) for other in each["contestants"] if other.get("median_us")]
            others = [timed for timed in times if timed[1] != OURS]
            if others:
                asked = bench["model"], shared, bench["dtype"], each["context"], each["batch"], bench["weights"]
                found[work_named(*asked)] = min(others)
    return found


def page(found: list[Row], beside: dict[str, tuple[float, str]]) -> str:
    """The page's text."""
    usual = [row for row in found if not row.kind]
    over = [100 * faster(row.gains.best, row.gains.seed) for row in usual if row.gains.seed is not None]
    first = [100 * faster(row.gains.best, row.gains.start) for row in usual if row.gains.start is not None]
    lines = [
        "# What searching gains",
        "",
        "Written by `experiments/gains.py` from the recorded campaigns; do not edit. All times are measured, in us a",
        "step, and each has a passing verdict behind it. A percentage says how many more steps a second are made.",
        "",
        "- *first*: the schedule that any search of the work tries first. It is made from a rule. Beside PyTorch, it",
        "  shows what the kernels gain.",
        "- *known*: the fastest schedule that the search began with: rules, and the best of other work and of earlier",
        "  searches of the same work.",
        "- *found*: the best of the search, from its final. *noise*: whether the final could tell it from *known*;",
        "  empty where the final did not compare the two.",
        "",
        f"Over {len(usual)} works the median gain is {median(over):.1f} % over *known* (most {max(over):.1f} %),",
        f"and {median(first):.1f} % over *first* (most {max(first):.0f} %). Most of these searches began with finds",
        "of an earlier search of the same work: a gain of nothing then says that the earlier search had found it.",
        "",
        "![a cold search of llama3.2-3b on an H200, and a layer of its best schedule](search.svg)",
        "",
        "A cold search of llama3.2-3b on an H200: 4.0 % over the best of the rules' schedules, beyond the noise.",
        "",
        *table(usual, beside),
        "",
    ]
    for kind, words in (
        ("cold", "Nothing of other work to begin with (`--cold`): the rules' schedules alone are *known*."),
        ("bare", "Nothing at all to begin with (`--no-seeds`)."),
    ):
        rows_of = [row for row in found if row.kind == kind]
        if rows_of:
            lines += [f"## {kind.capitalize()}", "", words, "", *table(rows_of, beside), ""]
    return "\n".join(lines)


def table(found: list[Row], beside: dict[str, tuple[float, str]]) -> list[str]:
    """Lines of a table in Markdown."""
    lines = [
        "| work | PyTorch | first | known | found | over PyTorch | over first | over known | noise | trials | output |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        start, seed, best = row.gains.start, row.gains.seed, row.gains.best
        rival = beside.get(row.work)
        assert best.objective_us is not None
        torch = "" if rival is None else f"{rival[0]:,.0f} ({rival[1]})"
        over = "" if rival is None else f"{rival[0] / best.objective_us:.2f} times"
        noise = {True: "beyond", False: "within", None: ""}[row.gains.sure]
        gain = "" if seed is None else f"{100 * faster(best, seed):.1f} %"
        known = "" if seed is None else f"{seed.objective_us:,.0f}"
        first = "" if start is None else f"{start.objective_us:,.0f}"
        untuned = "" if start is None else f"{100 * faster(best, start):.1f} %"
        cells = [
            row.work, torch, first, known, f"{best.objective_us:,.0f}", over, untuned, gain, noise, str(row.trials),
            f"[{best.created_at[:10]}](../{row.table})",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
