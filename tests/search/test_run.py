from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from patience import HANG_S

from flywheel.errors import ConfigError, InvalidProgramError, UnknownNameError, UsageError
from flywheel.search.run import Start, run_search
from flywheel.search.spec import CampaignSpec
from flywheel.store.sql import open_store

TINY = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 160, "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    """A model of one layer, by its path."""
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


def campaign(model: str, **changes: Any) -> CampaignSpec:
    base = {"context": 32, "measure": "predict", "trials": 6, "jobs": 1, "name": "tiny"}
    return CampaignSpec(model, "l4", **{**base, **changes})


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_search_runs_is_announced_and_resumes(tiny: str, url: str, jobs: int) -> None:
    starts: list[Start] = []
    done: list[Any] = []
    result = run_search(campaign(tiny, jobs=jobs), url, announce=starts.append, watch=done.append)
    assert (result.stopped, result.trials, len(done)) == ("trials", 6, 6)
    assert (starts[0].name, starts[0].known) == ("tiny", 0)
    assert starts[0].configurations > 10**4
    again = run_search(campaign(tiny, jobs=jobs, trials=8), url, announce=starts.append)
    assert (again.trials, again.new_trials, starts[1].known) == (8, 2, 6)
    assert run_search(campaign(tiny, jobs=jobs), url, fresh=True, announce=starts.append).name == "tiny.2"
    with open_store(url) as store:
        assert all(0 < record.floor_fraction <= 1 for record in store.trials("tiny") if record.floor_fraction)


def test_any_number_of_processes_leaves_the_same_rows(tiny: str, url: str) -> None:
    for jobs in (1, 2, 3, 5):
        run_search(campaign(tiny, jobs=jobs, trials=20, name=f"by {jobs}"), url)
    with open_store(url) as store:
        alone, *others = ([row.config_id for row in store.trials(f"by {jobs}")] for jobs in (1, 2, 3, 5))
    assert others == [alone] * 3


def test_two_searches_at_once_into_one_campaign_lose_nothing(tiny: str, url: str) -> None:
    run_search(campaign(tiny, trials=1), url)
    with ThreadPoolExecutor(2) as both:
        results = list(both.map(lambda _: run_search(campaign(tiny, trials=10), url), range(2)))
    with open_store(url) as store:
        records = store.trials("tiny")
    assert [record.trial for record in records] == list(range(1 + sum(result.new_trials for result in results)))
    assert all(result.new_trials for result in results)


@pytest.mark.parametrize(
    ("changes", "error", "fact"),
    [
        ({"sampler": "nsga"}, UnknownNameError, "sampler 'nsga'"),
        ({"fix": {"depth": "5"}}, UsageError, "knob depth='5'"),
        ({"context": 65}, ConfigError, "context 65 is not in 1..64"),
        ({"dtype": "int4"}, UnknownNameError, "dtype 'int4' is not one of bf16, f16, f32"),
    ],
)
def test_a_search_that_cannot_start_leaves_no_campaign(
    tiny: str, url: str, changes: dict[str, Any], error: type[Exception], fact: str
) -> None:
    with pytest.raises(error) as caught:
        run_search(campaign(tiny, **changes), url)
    assert fact in str(caught.value)
    with open_store(url) as store:
        assert store.campaigns() == []


def test_a_model_that_no_schedule_can_run_is_refused_before_there_is_a_store(tmp_path: Path) -> None:
    """Not as trials that are all rejected: the GPU's worker would refuse every one of them."""
    document = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 528,
        "vocab_size": 512, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(document))
    store = tmp_path / "trials.db"
    with pytest.raises(InvalidProgramError) as caught:
        run_search(campaign(str(tmp_path)), str(store))
    name, _, fact = str(caught.value).partition(": ")
    assert name == str(tmp_path)
    assert fact.startswith("no schedule has kernels: task ")
    assert fact.endswith(": head_dim=528 is above 512")
    assert not store.exists()


def test_nothing_is_left_outside_the_store_file(tmp_path: Path) -> None:
    url = str(tmp_path / "store.db")
    run_search(CampaignSpec("smollm2-135m", "h100", context=16, trials=3, jobs=2, measure="predict"), url)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store.db"]


def test_workers_die_with_a_killed_coordinator(tmp_path: Path) -> None:
    script = (
        "from flywheel.search.run import run_search\n"
        "from flywheel.search.spec import CampaignSpec\n"
        "if __name__ == '__main__':\n"
        "    spec = CampaignSpec('smollm2-135m', 'h100', context=16, trials=100000, jobs=2, measure='predict')\n"
        f"    run_search(spec, {str(tmp_path / 'store.db')!r}, watch=lambda _: print('trial', flush=True))\n"
    )
    (tmp_path / "search.py").write_text(script)
    with subprocess.Popen([sys.executable, tmp_path / "search.py"], stdout=subprocess.PIPE) as coordinator:
        assert coordinator.stdout is not None
        coordinator.stdout.readline()
        threads = Path(f"/proc/{coordinator.pid}/task").iterdir()
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
        coordinator.kill()
    assert len(children) >= 2
    deadline = monotonic() + HANG_S
    while any(map(runs, children)) and monotonic() < deadline:
        sleep(0.1)
    assert not any(map(runs, children))


def runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_search_that_predicts_ends_where_nobody_chose_a_budget_and_nothing_more_can_be_told(
    tiny: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flywheel.search.run.PREDICTED_PATIENCE", 5)
    alike = run_search(campaign(tiny, trials=60), url, given=())
    assert alike.stopped == "patience"
    assert 5 < alike.trials < 60
    chosen = run_search(campaign(tiny, trials=alike.trials + 1), url, given=("trials",))
    assert (chosen.stopped, chosen.trials) == ("trials", alike.trials + 1)
