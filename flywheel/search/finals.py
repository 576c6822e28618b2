"""The end of a measured campaign: its best programs are measured again, in turn on one GPU, and compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from statistics import median
from typing import Final

from flywheel.errors import TrialExistsError
from flywheel.ir import config_from_dict
from flywheel.measure.environment import Environment
from flywheel.measure.outcome import Contest, Measured
from flywheel.measure.record import TrialRecord
from flywheel.measure.standing import best_of, standing
from flywheel.search.knowledge.lowered import lowers
from flywheel.search.noise import Gain, gain
from flywheel.search.rows import to_record
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials.engine import TrialEngine
from flywheel.search.trials.evaluate import Evaluation
from flywheel.search.workload import Workload
from flywheel.store.sql import Store

FINALISTS: Final = 5
ROUNDS: Final = 12
"""How often all finalists are loaded anew and timed."""


def finalists(records: Sequence[TrialRecord], workload: Workload) -> list[TrialRecord]:
    """The rows of the fastest FINALISTS programs that this version lowers, imported ones included, each by its fastest
    row; and of the fastest program that was known before the search, so that the final says what searching gained.
    Empty if fewer than two programs were measured, or if these programs have had their final in this store, and nobody
    else computed on the GPU then."""
    seeds = {record.program_id for record in records if record.source == "seed"}
    fastest: dict[str | None, TrialRecord] = {}
    for record in sorted(standing(records), key=lambda record: (record.objective_us or 0.0, record.trial)):
        if record.outcome == "measured":
            fastest.setdefault(record.program_id, record)
    able = (record for record in fastest.values() if lowers(record, workload))
    chosen = list(islice(able, FINALISTS))
    if not any(record.program_id in seeds for record in chosen):
        chosen += islice((record for record in able if record.program_id in seeds), 1)
    settled = all(record.source == "final" and not record.is_imported and not record.strangers for record in chosen)
    return [] if len(chosen) < 2 or settled else chosen


def hold_final(
    store: Store, name: str, engine: TrialEngine, spec: CampaignSpec, workload: Workload, environment: Environment
) -> list[TrialRecord]:
    """Measure a campaign's best programs again, in turn, and append a row for each; no rows if a worker dies meanwhile.

    The new rows count instead of all earlier rows of their programs. A final beside other processes has no rows if the
    campaign has a best that was measured without them. Rows that another process appends meanwhile may
    require another final.
    """
    while chosen := finalists(store.trials(name), workload):
        rows = measure_again(chosen, engine, spec, environment)
        best = best_of(store.trials(name))
        if any(row.strangers for row in rows) and best is not None and best.kind == "measured" and not best.strangers:
            return []
        if not rows or _append(store, name, workload, rows, chosen):
            return rows
    return []


def _append(
    store: Store, name: str, workload: Workload, rows: list[TrialRecord], chosen: Sequence[TrialRecord]
) -> bool:
    """Number the rows and append all of them, or none and return False if the `chosen` are no longer the finalists."""
    programs = [record.program_id for record in chosen]
    while True:
        known = store.trials(name)
        if [record.program_id for record in finalists(known, workload)] != programs:
            return False
        first = 1 + max(record.trial for record in known)
        rows[:] = [replace(row, trial=first + place) for place, row in enumerate(rows)]
        with suppress(TrialExistsError):
            store.append_all(rows)
            return True


def measure_again(
    chosen: Sequence[TrialRecord], engine: TrialEngine, spec: CampaignSpec, environment: Environment
) -> list[TrialRecord]:
    """Measure programs in turn. Returns a row for each, not yet numbered; no rows if a worker dies meanwhile.

    A program that turns out to be wrong gets no row and ends the contest; the others are then measured again.
    `environment` is the coordinator's.
    """
    while True:
        configs = [config_from_dict(json.loads(record.config)) for record in chosen]
        evaluation = engine.submit(configs[0], configs[1:], ROUNDS)()
        contest = evaluation.contest
        if contest is None or not contest.times_us:
            return []
        found = [*zip(chosen, configs, (contest.outcome, *contest.rivals), strict=True)]
        right = [(record, config, outcome) for record, config, outcome in found if isinstance(outcome, Measured)]
        if len(right) < 2 or len(right) == len(found):
            break
        chosen = [record for record, _, _ in right]
    compared = gains(contest, spec.seed) if len(right) > 1 else [None]
    share_s = None if evaluation.measure_s is None else evaluation.measure_s / len(found)
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    rows = []
    for (record, config, outcome), gained in zip(right, compared, strict=False):
        measured = Evaluation(
            outcome, record.program_id, record.tasks, record.weight_bytes, record.floor_us,
            measure_s=share_s, environment=evaluation.environment,
        )  # fmt: skip
        rows.append(to_record(
            record.campaign, record.trial, spec, config, measured, environment,
            source="final", ask_s=None, created_at=now, compared=gained,
        ))  # fmt: skip
    return rows


def gains(contest: Contest, seed: int) -> list[Gain]:
    """The gain of each program of a contest over the fastest of the others."""
    medians = [median(us for samples in rounds for us in samples) for rounds in contest.times_us]
    order = sorted(range(len(medians)), key=medians.__getitem__)
    rivals = [order[1] if place == order[0] else order[0] for place in range(len(medians))]
    return [gain(rounds, contest.times_us[rival], seed) for rounds, rival in zip(contest.times_us, rivals, strict=True)]
