"""Decides which rows of a campaign are trials, which of them still hold, and which is the best.

No other Python code decides this; `Store.best` decides the same in SQL. Every function takes the rows of one campaign,
by number. Rows measured for this store take precedence over imported ones: a table's numbers come from another machine
or another day, so even the slowest own measurement is more reliable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Final

from flywheel.measure.record import TrialRecord

KINDS: Final = ("measured", "imported", "predicted")
"""Kinds of latencies, the most reliable first."""


def compared(records: Sequence[TrialRecord]) -> str:
    """The kind of latencies that a campaign compares: measured if there are any, else predicted."""
    return "measured" if any(record.outcome == "measured" for record in records) else "predicted"


def trials_of(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The rows that are trials. A final measures a trial's program again, so it is none."""
    return [record for record in records if record.source != "final"]


def origin_of(record: TrialRecord, records: Sequence[TrialRecord]) -> str:
    """A row's source; for a final, with the trial whose program it measured again: `final of trial 147`."""
    tried = (each.trial for each in trials_of(records) if each.program_id == record.program_id)
    trial = next(tried, None) if record.source == "final" else None
    return record.source if trial is None else f"{record.source} of trial {trial}"


def standing(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The rows whose latency holds.

    A final compared the fastest programs, so its rows replace every row before it. A row that was answered from an
    earlier row of its program has that row's latency.
    """
    last = max((record for record in records if record.source == "final"), key=_number, default=None)
    known: set[str | None] = set()
    kept = []
    for record in records:
        lasts = last is None or record.trial > last.trial or _final(record) == _final(last)
        if record.objective_us is not None and lasts and not _repeats(record, known):
            kept.append(record)
        known.add(record.program_id)
    return kept


def best_so_far(records: Sequence[TrialRecord]) -> Iterator[tuple[TrialRecord, Mapping[str, TrialRecord]]]:
    """Each row, and the best rows up to it by `TrialRecord.kind`: measured, imported or predicted. Rows of one final
    count together.

    The best is the fastest row that holds and `may_be_best`, the first among equals, and one that `is_doubtful` only
    where all are. After a final it may be slower
    than before, since it is known more exactly. A row that is only predicted after something was measured was not worth
    measuring.
    """
    best: dict[str, TrialRecord] = {}
    known: set[str | None] = set()
    for _, together in groupby(records, key=_final):
        rows = list(together)
        if rows[0].source == "final":
            best = {**best, rows[0].kind: min(rows, key=_rank)}
        for record in rows:
            before = best.get(record.kind)
            if (
                record.source != "final"
                and record.may_be_best
                and not (record.is_predicted and best.keys() & {"measured", "imported"})
                and not _repeats(record, known)
                and (before is None or _rank(record) < _rank(before))
            ):
                best = {**best, record.kind: record}
            known.add(record.program_id)
            yield record, best


def incumbents(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The rows that were the best of their kind when they were added."""
    shown: dict[str, TrialRecord] = {}
    found = []
    for _, best in best_so_far(records):
        for kind, record in best.items():
            if shown.get(kind) is not record:
                shown[kind] = record
                found.append(record)
    return found


def best_of(records: Sequence[TrialRecord]) -> TrialRecord | None:
    """The best row measured for this store, else the best imported measurement, else the best prediction; None where
    there is none."""
    best: Mapping[str, TrialRecord] = {}
    for _, found in best_so_far(records):
        best = found
    return best.get("measured") or best.get("imported") or best.get("predicted")


def tied_with(best: TrialRecord | None, records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """The other rows of a final that cannot be distinguished from `best`, its fastest; empty if `best` is not of a
    final."""
    if best is None or best.source != "final":
        return []
    return [
        record
        for record in records
        if _final(record) == _final(best)
        and record.trial != best.trial
        and record.gain_high_us is not None
        and record.gain_high_us >= 0.0
    ]


def ranked(records: Sequence[TrialRecord]) -> list[TrialRecord]:
    """One row for each config with a latency: first the best, then the others that hold, then the rest. Within each
    part, rows measured for this store come first, then imported ones, then predicted ones, each by latency and doubtful
    ones last."""
    best, holds = best_of(records), {record.trial for record in standing(records)}
    rows = sorted(
        (record for record in records if record.objective_us is not None),
        key=lambda record: (record is not best, record.trial not in holds, KINDS.index(record.kind), _rank(record)),
    )
    first: dict[str, TrialRecord] = {}
    for record in rows:
        first.setdefault(record.config_id, record)
    return list(first.values())


def disturbed(record: TrialRecord) -> str | None:
    """What disturbed a measurement: lowered clocks, other processes on the GPU, or something that shows in its samples
    alone. None where nothing did."""
    found = [] if record.throttle in (None, "none") else [f"throttled ({record.throttle})"]
    found += [f"strangers ({record.strangers})"] if record.strangers else []
    if record.is_doubtful and not record.strangers:
        found.append(f"uneven ({record.p10_us:,.1f} to {record.p90_us:,.1f} us)")
    return ", ".join(found) or None


def marks(record: TrialRecord) -> str | None:
    """Remarks on a row: that it was imported, and what disturbed it. None where there are none."""
    return ", ".join(filter(None, ("imported" if record.is_imported else None, disturbed(record)))) or None


def judged(record: TrialRecord) -> str | None:
    """How a row's numbers compared with the oracle's; None if the row has no verdict."""
    if record.verdict_bound is None:
        return None
    error = "no number" if record.verdict_error is None else f"{record.verdict_error:.3g}"
    return f"worst error {error} of at most {record.verdict_bound:.3g}, {record.verdict_where}"


def _repeats(record: TrialRecord, known: set[str | None]) -> bool:
    return record.source == "store" and record.program_id in known


def _final(record: TrialRecord) -> tuple[int | None, str]:
    """A key that is equal for rows of one final, which share their time, and different for all other rows."""
    return (None if record.source == "final" else record.trial), record.created_at


def _rank(record: TrialRecord) -> tuple[bool, float, int]:
    assert record.objective_us is not None
    return record.is_doubtful, record.objective_us, record.trial


def _number(record: TrialRecord) -> int:
    return record.trial
