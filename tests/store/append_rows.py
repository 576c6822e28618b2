"""A process of its own that appends rows: `append_rows.py STORE CAMPAIGN COUNT`; starts at a line on standard input."""

from __future__ import annotations

import sys
from dataclasses import replace

from flywheel.measure.record import TrialRecord
from flywheel.store.campaign import Campaign
from flywheel.store.sql import open_store

NOW = "2026-01-02T03:04:05+00:00"


def main(url: str, campaign: str, count: int) -> None:
    record = TrialRecord(
        campaign=campaign,
        trial=0,
        model="m",
        gpu="h100",
        dtype="BF16",
        context=1,
        config="{}",
        config_id="c",
        outcome="rejected",
        reason="no-fit",
        source="search",
        sampler="random",
        seed=0,
        ir_version="0.2.0",
        python="3.11",
        host="lab",
        created_at=NOW,
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    with open_store(url) as store:
        store.create_campaign(
            Campaign(
                name=campaign,
                model="m",
                gpu="h100",
                dtype="BF16",
                context=1,
                measure="predict",
                sampler="random",
                seed=0,
                spec="{}",
                created_at=NOW,
            )
        )
        for trial in range(count):
            store.append(replace(record, trial=trial))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
