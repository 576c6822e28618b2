"""Whether the workers of one campaign measured at the same time: `python experiments/workers_overlap.py TRIALS.tsv
CAMPAIGN`.

From a table that `flywheel export --format tsv` wrote, it prints the time from the first measurement's start to the
last one's end, the sum of their times, and how many began while an earlier one still ran. One worker measures one
program after the other. If more seconds were measured than passed, several workers measured at once.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import pandas as pd


def main() -> None:
    """Read and print."""
    parser = argparse.ArgumentParser(description="measurements of a campaign that overlap")
    parser.add_argument("table")
    parser.add_argument("campaign")
    arguments = parser.parse_args()
    rows = pd.read_csv(arguments.table, sep="\t").query("campaign == @arguments.campaign and measure_s > 0")
    if rows.empty:
        raise SystemExit(f"{arguments.table}: no measurement of campaign {arguments.campaign}")
    written = pd.to_datetime(rows["created_at"])
    ends = (written - written.min()).dt.total_seconds()
    spans = sorted(zip(ends - rows["measure_s"], ends, strict=True))
    overlapping = sum(later[0] < earlier[1] for earlier, later in pairwise(spans))
    print(
        f"{arguments.campaign}: {len(spans)} measurements of {rows['measure_s'].sum():.1f} s together in "
        f"{max(ends) - spans[0][0]:.1f} s; {overlapping} began while the one before was under way"
    )


if __name__ == "__main__":
    main()
