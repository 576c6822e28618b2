"""What a campaign gained over the schedules that were known before."""

from __future__ import annotations

from pathlib import Path

from flywheel.search.gains import gained, gains_in, workload_of
from flywheel.search.run import run_search
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec
from flywheel.store.sql import open_store


def test_a_second_search_of_a_store_knew_what_the_first_one_knew(tmp_path: Path) -> None:
    """Though the store answers its seeds."""
    url, gains = str(tmp_path / "trials.db"), []
    for name in ("first", "second"):
        run_search(CampaignSpec("smollm2-135m", "h100", name=name, trials=6, warm=False), url)
    with open_store(url) as store:
        for campaign in map(store.campaign, ("first", "second")):
            assert campaign is not None
            whole = gained(make_space(workload_of(campaign)), store.trials(campaign.name))
            few = gains_in(store, campaign)
            assert whole is not None and few is not None
            gains += [(whole.start, whole.seed), (few.start, few.seed)]
        assert {row.source for row in store.trials("second")} == {"store"}
    known = [(start and start.config_id, seed and seed.config_id) for start, seed in gains]
    assert len(set(known)) == 1
    start, seed = known[0]
    assert start != seed
