"""Writes docs/gains.md: what the kernels, the schedules that are known, and searching gain, by recorded campaigns.

    python experiments/gains.py
    python experiments/gains.py --knobs

A row is one workload with its newest measured campaign that ended with a final, from the tables `results*.tsv` and
`cold*.tsv` in results. Campaigns whose names begin with `cold` or `bare` had nothing of other work to begin with
(`--cold`), or nothing at all (`--no-seeds`); they have a table of their own. PyTorch's time is the fastest contestant
of the recorded bench of the same work, measured in another run.

With `--knobs` it prints instead what each of some knobs gains, from the same tables and from what was timed in turn,
and which shipped schedules use it:

    without, with   us of the fastest config without the knob, and of the fastest with it
    configs         how many were measured without it, and with it
    noise           %, the median distance of a final from the trial of the same config
    pairs           configs that differ in the knob alone
    best %          what the knob gains by the fastest of each side
    equal %         the same by the expected fastest of as many configs of each side, drawn at random
    pair %          the same by the fastest pair

"Without" is 2 copies, tiles of k and v as high as those of q, 32 bits, data handed over whole, and pages "none". A work
counts (*) where all of best, equal and pair are over 2 %: the fastest of many configs beats that of few by luck, and a
search tries few configs far from those that it began with.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

from flywheel.errors import FlywheelError
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, trials_of
from flywheel.plan.variant import COPIES
from flywheel.search.gains import Gains, faster, gained
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload
from flywheel.store.campaign import work_named
from flywheel.store.tsv import from_tsv

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gains.md"
OURS = "flywheel"
KINDS = ("cold", "bare")
LEAST, GAIN, WORKS = 5, 0.02, 2
"""Configs on each side for a comparison; and a knob stays if it gains more than this on so many works."""


@dataclass(frozen=True, slots=True)
class Row:
    """A campaign: its work, what it gained, its number of trials, and its table."""

    work: str
    kind: str
    gains: Gains
    trials: int
    table: str


def main() -> None:
    """Write the page, and print how many works it has; or print what knobs gain."""
    parser = argparse.ArgumentParser(description="What searching gains, by recorded campaigns.")
    parser.add_argument("--knobs", action="store_true", help="print what knobs gain")
    if parser.parse_args().knobs:
        print("\n".join(ablation()))
        return
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
    for table, name, records in campaigns():
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
            yield Row(work_named(*asked), kind, gains, len(trials_of(records)), table)


def campaigns() -> Iterator[tuple[str, str, list[TrialRecord]]]:
    """(path of the table, name, rows) of every campaign of the tables."""
    tables = [*(ROOT / "results").rglob("results*.tsv"), *(ROOT / "results" / "gpu").glob("cold*.tsv")]
    for table in sorted(tables):
        text = table.read_text(encoding="utf-8")
        batch = None if "batch" in text.partition("\n")[0].split("\t") else 1
        found: dict[str, list[TrialRecord]] = {}
        for record in from_tsv(text, batch):
            found.setdefault(record.campaign, []).append(record)
        for name, records in found.items():
            yield table.relative_to(ROOT).as_posix(), name, records


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


def taken(knob: str, config: dict[str, Any]) -> bool | None:
    """Whether a config uses the knob, which is taken out of it; None where it could not use it."""
    tiling = config["tiling"]
    match knob:
        case "pause":
            return tiling.get("stream", {}).pop("pause_cycles", 0) != 0
        case "copies":
            return tiling.get("stream", {}).pop("copies", COPIES) != COPIES
        case "rows.kv":
            k, q = (tiling.get(f"gemv.{name}", {}).get("N_tile") for name in ("k_proj", "q_proj"))
            for name in ("k_proj", "v_proj"):
                tiling.pop(f"gemv.{name}", None)
            return None if k is None else k != q
        case "exchange.bits":
            return tiling.pop("exchange", {}).get("bits", 32) != 32
        case "hand_off halves":
            by_data = tiling.get("hand_off", {})
            return by_data.pop("slices", 1) != 1 if by_data.get("data") else None
    return config.pop("page_allocation") != "none"


OF_SEVERAL: dict[str, bool | None] = {
    "pause": None, "copies": None, "rows.kv": None, "exchange.bits": True, "hand_off halves": None, "pages": False
}  # fmt: skip
"""Knobs, and whether they are of several GPUs; None where of any number."""


@dataclass(frozen=True, slots=True)
class Sides:
    """Latencies in us of the configs of one campaign without a knob and with it, and those of pairs of configs that
    differ in it alone."""

    work: str
    table: str
    at: str
    without: list[float]
    using: list[float]
    pairs: list[tuple[float, float]]
    noise: float

    @property
    def best(self) -> float:
        """What the best config without it takes over the best with it, less one."""
        return min(self.without) / min(self.using) - 1

    @property
    def equal(self) -> float:
        """The same of the expected best of as many configs, drawn at random, as the side with fewer has."""
        least = min(len(self.without), len(self.using))
        return best_of_drawn(self.without, least) / best_of_drawn(self.using, least) - 1

    @property
    def pair(self) -> float | None:
        """The same of the fastest pair; None without pairs."""
        without, using = min(self.pairs, key=min, default=(None, None))
        return None if without is None or using is None else without / using - 1

    @property
    def counts(self) -> bool:
        """Whether the knob gains enough on this work."""
        return min(self.best, self.equal, self.best if self.pair is None else self.pair) > GAIN


def best_of_drawn(latencies: Sequence[float], count: int) -> float:
    """The expected least of `count` of these, drawn at random without returning any."""
    ranked = enumerate(sorted(latencies), start=1)
    chances = (us * comb(len(latencies) - rank, count - 1) for rank, us in ranked)
    return sum(chances) / comb(len(latencies), count)


def sides(knob: str, table: str, records: Sequence[TrialRecord]) -> Sides:
    """The configs of one campaign, each by its first trial. Rows of finals are of another time, and only say the noise:
    the median distance of a final from its trial."""
    trials: dict[str, TrialRecord] = {}
    for record in records:
        if record.source != "final":
            trials.setdefault(record.config_id, record)
    found: dict[bool, list[float]] = {False: [], True: []}
    alike: defaultdict[str, dict[bool, float]] = defaultdict(dict)
    for record in trials.values():
        config = json.loads(record.config)
        used = taken(knob, config)
        if used is None or record.latency_us is None:
            continue
        found[used].append(record.latency_us)
        same = alike[json.dumps(config, sort_keys=True)]
        same[used] = min(record.latency_us, same.get(used, record.latency_us))
    again = [(record.latency_us, trials.get(record.config_id)) for record in records if record.source == "final"]
    noise = [abs(us / trial.latency_us - 1) for us, trial in again if us and trial and trial.latency_us]
    first = records[0]
    work = work_named(first.model, first.gpu, first.dtype, first.context, first.batch, first.weights)
    pairs = [(same[False], same[True]) for same in alike.values() if len(same) == 2]
    at = max(record.created_at for record in records)
    return Sides(work, table, at, found[False], found[True], pairs, median(noise) if noise else 0.0)


def ablation() -> Iterator[str]:
    """Lines: for each knob, what it gains on each work. Of each work, the newest campaign counts that measured at least
    LEAST configs without the knob and as many with it. Rows of several kernels are never compared."""
    measured: list[tuple[str, list[TrialRecord]]] = []
    for table, _, records in campaigns():
        by_kernels: defaultdict[str | None, list[TrialRecord]] = defaultdict(list)
        for record in records:
            if record.latency_us is not None and record.source != "store":
                by_kernels[record.kernels].append(record)
        measured += [(table, rows) for rows in by_kernels.values()]
    timed = [each for path in sorted((ROOT / "results" / "gpu" / "pauses").glob("h?00.txt")) for each in in_turn(path)]
    for knob, several in OF_SEVERAL.items():
        newest: dict[str, Sides] = {}
        for table, records in measured:
            if several not in (None, records[0].gpu[0].isdigit()):
                continue
            each = sides(knob, table, records)
            enough = min(len(each.without), len(each.using)) >= LEAST
            if enough and (each.work not in newest or newest[each.work].at < each.at):
                newest[each.work] = each
        gaining = {work for work, each in newest.items() if each.counts}
        lines = [told(newest[work]) for work in sorted(newest)]
        if knob == "pause":
            gaining |= {work for work, ratio in timed if ratio > GAIN}
            lines += [f"  {work:58} {'timed in turn':46} {100 * ratio:6.1f}" for work, ratio in timed]
        verdict = "stays" if len(gaining) >= WORKS else "gains too little to stay"
        yield f"{knob}: over {100 * GAIN:.0f} % on {len(gaining)} of {len(lines)} lines: {verdict}"
        yield f"  {'work':58}  without     with  configs noise pairs  best %  equal %  pair %  rows"
        yield from lines
        using = [path.stem for path in sorted((ROOT / "flywheel" / "schedules").glob("*.json")) if uses(knob, path)]
        yield f"  shipped schedules that use it: {', '.join(using) or 'none'}"
        yield ""


def told(each: Sides) -> str:
    """A line of a work."""
    count, pair = f"{len(each.without)}/{len(each.using)}", each.pair
    return (
        f"{'*' if each.counts else ' '} {each.work:58} {min(each.without):8.1f} {min(each.using):8.1f} {count:>8} "
        f"{100 * each.noise:5.2f} {len(each.pairs):5} {100 * each.best:7.1f}  {100 * each.equal:7.1f} "
        f"{'' if pair is None else format(100 * pair, '.1f'):>7}  {each.table.removeprefix('results/')}"
    )


def in_turn(path: Path) -> Iterator[tuple[str, float]]:
    """(schedule and GPU, what the best pause gains) of an output of experiments/in_turn.py."""
    text = path.read_text(encoding="utf-8")
    times: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for name, pause, us in re.findall(r"^(\S+)(?: stream\.pause_cycles=(\d+))? +here +([\d.]+)", text, re.MULTILINE):
        times[name][pause] = float(us)
    for name, found in times.items():
        yield f"{name} on {path.stem}", found.pop("") / min(found.values()) - 1


def uses(knob: str, path: Path) -> bool:
    """Whether a shipped schedule uses a knob."""
    schedule = json.loads(path.read_text(encoding="utf-8"))
    several = OF_SEVERAL[knob]
    return several in (None, schedule["gpu"][0].isdigit()) and taken(knob, schedule["config"]) is True


if __name__ == "__main__":
    main()
