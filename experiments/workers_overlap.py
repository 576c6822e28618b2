"""Whether the workers of one campaign measured at once: `python experiments/workers_overlap.py TRIALS.tsv CAMPAIGN`.

Of a table that `flywheel export --format tsv` wrote: the time from the first measurement's start to the last one's end,
what all of them took together, and how many began before the one that had begun last was over. One worker takes one
after the other; more seconds measured than passed is the work of several.
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
