"""Processes that append rows at the same time: `append_rows.py STORE WRITERS ROWS`.

Half of each writer's rows go to a campaign of its own, half to one that all share, where it takes the next number that
is free. A row's `host` is its writer and its `seed` its number among that writer's rows of the campaign.
"""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import replace
from itertools import count
from multiprocessing.synchronize import Barrier

from flywheel.errors import StoreError, TrialExistsError
from flywheel.measure.record import TrialRecord
from flywheel.store.campaign import Campaign
from flywheel.store.sql import Store, open_store

NOW = "2026-01-02T03:04:05+00:00"
CAMPAIGN = Campaign(
    name="shared", model="m", gpu="h100", dtype="BF16", context=1, batch=1, measure="predict", sampler="random", seed=0,
    spec="{}", created_at=NOW,
)  # fmt: skip
RECORD = TrialRecord(
    campaign="shared", trial=0, model="m", gpu="h100", dtype="BF16", context=1, batch=1, config="{}",
    config_id="44136fa355b3",
    outcome="rejected", reason="no-fit", source="search", sampler="random", seed=0, ir_version="0.2.0", python="3.11",
    host="lab", created_at=NOW,
)  # fmt: skip


def write(url: str, writer: int, rows: int, start: Barrier) -> None:
    """Create or find store and campaigns, then append `rows` rows to each campaign."""
    start.wait()
    with open_store(url) as store:
        for name in ("shared", f"own-{writer}"):
            create(store, name)
        free = count()
        for number in range(rows):
            record = replace(RECORD, host=f"writer-{writer}", seed=number)
            store.append(replace(record, campaign=f"own-{writer}", trial=number))
            while not taken(store, replace(record, trial=next(free))):
                pass


def create(store: Store, name: str) -> None:
    try:
        store.create_campaign(replace(CAMPAIGN, name=name))
    except StoreError:
        assert store.campaign(name) is not None  # another writer was faster


def taken(store: Store, record: TrialRecord) -> bool:
    """Whether the row could be appended under its number."""
    try:
        store.append(record)
    except TrialExistsError:
        return False
    return True


def main(url: str, writers: int, rows: int) -> None:
    context = multiprocessing.get_context("fork")  # one import for all
    start = context.Barrier(writers)
    processes = [
        context.Process(target=write, args=(url, writer, rows // (2 * writers), start)) for writer in range(writers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
