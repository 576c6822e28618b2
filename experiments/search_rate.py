"""Trials a second of whole campaigns, from the first proposal to the last row: `python experiments/search_rate.py`.

Each campaign is new, in a store of its own, with two worker processes; the full proof runs in every trial. Repeats of a
config within a campaign are answered from its rows and count as trials, as they do for users; their share is shown.
"""

from __future__ import annotations

import platform
import statistics
import tempfile
from pathlib import Path

from flywheel.measure.record import TrialRecord
from flywheel.search.run import run_search
from flywheel.search.spec import CampaignSpec
from flywheel.store.sql import open_store

BARS = {"llama3-8b": 8.0, "llama3.2-1b": 25.0}
SEEDS = (0, 1, 2)


def campaign(model: str, seed: int) -> tuple[float, list[TrialRecord]]:
    """Wall seconds and rows of one campaign with the default budget."""
    spec = CampaignSpec(model, "h100", seed=seed, measure="predict")
    with tempfile.TemporaryDirectory() as folder:
        url = str(Path(folder) / "store.db")
        result = run_search(spec, url)
        with open_store(url) as store:
            return result.elapsed_s, store.trials(result.name)


def main() -> None:
    """Print the table."""
    print(f"Python {platform.python_version()}, 2 worker processes, h100, bf16, context 512, predicted")
    print(f"{'model':<12}{'seed':>5}{'trials':>8}{'repeats':>9}{'tasks':>9}{'seconds':>9}{'trials/s':>10}")
    for model, bar in BARS.items():
        rates = []
        for seed in SEEDS:
            elapsed_s, rows = campaign(model, seed)
            rates.append(len(rows) / elapsed_s)
            repeats = sum(row.source == "store" for row in rows)
            tasks = round(statistics.mean(row.tasks or 0 for row in rows))
            print(f"{model:<12}{seed:>5}{len(rows):>8}{repeats:>9}{tasks:>9,}{elapsed_s:>9.1f}{rates[-1]:>10.1f}")
        print(f"{model}: median {statistics.median(rates):.1f} trials/s, bar {bar:.0f}")


if __name__ == "__main__":
    main()
