from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from effort import LONG

from flywheel.errors import NoGpuError, UsageError
from flywheel.ir import TARGETS
from flywheel.measure.device import Device
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials import forks, sites
from flywheel.search.trials.engine import InlineEngine
from flywheel.search.trials.fleet import Fleet
from flywheel.search.trials.processes import ProcessHost
from flywheel.search.trials.sites import open_engine, open_site
from flywheel.search.trials.station import Predicting, Setup

H100 = TARGETS["h100"]
BOARD = Device("NVIDIA H100 80GB HBM3", None, 85_520_809_984)
GPUS = [
    ("GPU-a", Device("NVIDIA L4")), ("GPU-b", BOARD), ("GPU-p", Device("NVIDIA H100 PCIe", None, 85_520_809_984)),
    ("GPU-c", BOARD),
]  # fmt: skip


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an L4, two H100s and an H100 on a PCIe card, and all that measuring takes."""
    monkeypatch.setattr(sites, "list_gpus", lambda: GPUS)
    monkeypatch.setattr(sites, "missing_modules", list)


def hosts(lab: Any, **options: Any) -> list[ProcessHost]:
    with open_site(CampaignSpec("small", "h100", **options), H100) as site:
        made = site.make_hosts(Setup(lab.workload, Predicting(lab.measure)))
    return [host for host in made if isinstance(host, ProcessHost)]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize(("workers", "used"), [(None, ["GPU-b", "GPU-c"]), (1, ["GPU-b"])])
def test_every_gpu_of_the_wanted_model_gets_a_worker_of_its_own(lab: Any, workers: int | None, used: list[str]) -> None:
    made = hosts(lab, workers=workers)
    assert [host.name for host in made] == used
    assert [host._environ for host in made] == [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in used]


@pytest.mark.usefixtures("gpus")
def test_a_worker_of_two_ranks_has_two_gpus_of_the_wanted_model(lab: Any) -> None:
    setup = Setup(lab.workload, Predicting(lab.measure))
    with open_site(CampaignSpec("small", "2xh100"), H100, 2) as site:
        (host,) = site.make_hosts(setup)
    assert isinstance(host, ProcessHost)
    assert host._environ == {"CUDA_VISIBLE_DEVICES": "GPU-b,GPU-c"}
    with pytest.raises(NoGpuError, match=r"^--gpu 4xh100 needs 4 h100: this machine has 2; --measure predict"):
        open_site(CampaignSpec("small", "4xh100"), H100, 4).__enter__()
    with pytest.raises(UsageError, match=r"^--workers 2: this machine has 1 x 2 h100 GPUs$"):
        open_site(CampaignSpec("small", "2xh100", workers=2), H100, 2).__enter__()


@pytest.mark.usefixtures("gpus")
def test_more_workers_than_gpus_are_refused(lab: Any) -> None:
    with pytest.raises(UsageError, match=r"^--workers 3: this machine has 2 h100 GPUs$"):
        hosts(lab, workers=3)


@pytest.mark.usefixtures("gpus")
def test_predictions_take_processes_wherever_gpus_are(lab: Any) -> None:
    assert [host.name for host in hosts(lab, measure="predict", jobs=2)] == ["process 0", "process 1"]
    assert len(hosts(lab, measure="predict", jobs=2, workers=3)) == 3


@pytest.mark.parametrize("jobs", [2, 3, 8, None])
def test_predicted_trials_side_by_side_are_as_many_on_any_number_of_processes(
    lab: Any, jobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forks, "usable_cores", lambda: 64)
    spec = lab.spec(jobs=jobs)
    with (
        open_site(spec, lab.workload.target) as site,
        open_engine(spec, site, lab.workload, lab.store) as (engine, _),
    ):
        assert engine.width == 3


def test_processes_are_one_a_usable_core_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "usable_cores", lambda: 5)
    assert (forks.jobs_of(None), forks.jobs_of(1), forks.jobs_of(40)) == (5, 1, 40)
    monkeypatch.setattr(forks, "usable_cores", lambda: 500)
    assert forks.jobs_of(None) == forks.MOST_JOBS


def test_a_machine_without_a_gpu_measures_nothing(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "list_gpus", list)
    with pytest.raises(NoGpuError, match=r"^--measure cuda needs an h100: this machine has no GPU$"):
        hosts(lab, measure="cuda")


@pytest.mark.parametrize(("jobs", "kind"), [(1, InlineEngine), (2, Fleet)])
def test_one_process_that_predicts_is_this_one(lab: Any, jobs: int, kind: type) -> None:
    spec = lab.spec(jobs=jobs)
    with (
        open_site(spec, lab.workload.target) as site,
        open_engine(spec, site, lab.workload, lab.store) as (engine, environment),
    ):
        assert isinstance(engine, kind)
        assert environment.host


def test_an_engine_that_is_not_installed_is_named(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sites, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"^--engine ray needs ray: pip install .*\[ray\]'$"):
        hosts(lab, engine="ray")


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ({"engine": "slurm"}, "engine='slurm' is not one of local, ray"),
        ({"ray_address": "head:6379"}, "ray_address='head:6379' is for engine='ray'"),
        ({"workers": 0}, "workers=0 is less than 1"),
    ],
)
def test_an_engine_that_makes_no_sense_is_refused(options: dict[str, Any], fact: str) -> None:
    with pytest.raises(UsageError) as caught:
        CampaignSpec("small", "h100", **options)
    assert fact in str(caught.value)


@LONG
def test_a_ray_cluster_of_this_machine_lets_in_nobody_without_its_token(lab: Any) -> None:
    """In processes of their own: Ray reads what it is told of tokens when it is imported."""
    script = (
        "import os, subprocess, sys\n"
        "from flywheel.ir import TARGETS\n"
        "from flywheel.search.trials.sites import open_site\n"
        "from flywheel.search.spec import CampaignSpec\n"
        "with open_site(CampaignSpec('smollm2-135m', 'h100', measure='predict', engine='ray'), TARGETS['h100']):\n"
        "    import ray\n"
        "    address = ray.get_runtime_context().gcs_address\n"
        "    stranger = {name: value for name, value in os.environ.items() if not name.startswith('RAY_')}\n"
        "    code = f'import ray; ray.init({address!r}, log_to_driver=False)'\n"
        "    done = subprocess.run([sys.executable, '-c', code], env=stranger, capture_output=True, text=True)\n"
        "    print(done.returncode, 'InvalidAuthToken' in done.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "1 True\n", done.stderr
