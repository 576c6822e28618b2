"""Stations that die, hang and differ: on this machine, and on a real Ray cluster of this machine's own."""

from __future__ import annotations

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep
from types import ModuleType
from typing import Any

import pytest
from effort import FULL, LONG

from flywheel.children import fork_server_pid
from flywheel.errors import FlywheelError, NoGpuError, StoreError, UsageError
from flywheel.ir import ScheduleConfig
from flywheel.measure.outcome import Crashed, Measured, Predicted, TimedOut
from flywheel.search.space import make_space
from flywheel.search.trials.engine import InlineEngine
from flywheel.search.trials.fleet import STARTS, Fleet, Host, Look
from flywheel.search.trials.forks import expect_forks
from flywheel.search.trials.processes import ProcessHost
from flywheel.search.trials.station import Measuring, Predicting, Setup
from flywheel.vm.client import Limits
from flywheel.vm.watching import Patience

LIMITS = Limits(start_s=120, answer_s=120)
Fleets = Callable[..., Any]


def nothing_known(program_id: str, environment: object) -> None:
    return None


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A Ray cluster of two nodes, each with a processor, one with what it takes for a GPU and the other for three."""
    with tempfile.TemporaryDirectory(prefix="fw", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)  # sockets want short names
        patch.setenv("PYTHONPATH", f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}")
        from ray.cluster_utils import Cluster

        bare = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
        made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1, **bare})
        made.add_node(num_cpus=1, num_gpus=3)
        yield made
        made.shutdown()


HOSTS = ("processes", "ray")
EVERYWHERE = pytest.mark.parametrize("fleets", HOSTS, indirect=True)
"""What is a host's own to do is tested on both kinds. What the fleet does with either: on Ray in the full form only."""

RAY_IS_LONG = pytest.mark.parametrize("fleets", [HOSTS[0], pytest.param(HOSTS[1], marks=LONG)], indirect=True)

DEATHS = [
    ("processes", "child"), ("processes", "station"), pytest.param("ray", "station", marks=LONG), ("ray", "child")
]  # fmt: skip


@pytest.fixture(params=HOSTS if FULL else HOSTS[:1])
def fleets(request: pytest.FixtureRequest, toy_measures: ModuleType) -> Fleets:
    """Makes fleets of two hosts, in processes or on the cluster."""

    @contextmanager
    def on_processes(setup: Setup, look: Look = nothing_known, **options: Any) -> Iterator[Fleet]:
        with Fleet([ProcessHost(f"process {number}", setup) for number in range(2)], look, **options) as fleet:
            yield fleet

    @contextmanager
    def on_ray(setup: Setup, look: Look = nothing_known, **options: Any) -> Iterator[Fleet]:
        from flywheel.search.trials.cluster import RayHost, connect

        with connect(address) as found:
            assert (found.cpus, found.gpus) == (2, 4)
            hosts = [RayHost(f"actor {number}", setup, gpus=1, pulse=found.pulse) for number in range(2)]
            with Fleet(hosts, look, **options) as fleet:
                yield fleet

    if request.param == "processes":
        return on_processes
    address = request.getfixturevalue("cluster").address
    return on_ray


@pytest.fixture
def configs(lab: Any) -> list[ScheduleConfig]:
    """Of depths 4 (the one where toys fail), 0, 1, 2 and 3."""
    space = lab.space()
    return [space.to_config({**space.known_good()[0], "depth": depth}) for depth in (4, 0, 1, 2, 3)]


@pytest.fixture
def measuring(lab: Any, toy_measures: ModuleType, tmp_path: Path) -> Callable[..., Setup]:
    """Setups whose children have toy benches with a fault, and `attempts()` at it by station."""

    def make(fault: str = "none", *, once: bool = False, limits: Limits = LIMITS, **more: Any) -> Setup:
        means = Measuring(partial(toy_measures.make_toy, str(tmp_path), fault, once), limits=limits, **more)
        return Setup(lab.workload, means, toy_measures.here)

    return make


def attempts(folder: Path) -> list[str]:
    return (folder / "attempts").read_text().split()


def outcomes(fleet: Fleet, configs: Sequence[ScheduleConfig]) -> list[Any]:
    return [finish().outcome for finish in [fleet.submit(config) for config in configs]]


@EVERYWHERE
def test_a_fleet_finds_what_one_process_finds(lab: Any, fleets: Fleets, toy_measures: ModuleType) -> None:
    def look(program_id: str, environment: object) -> Any:
        return seen(program_id)

    seen = lab.bench().seen
    with fleets(Setup(lab.workload, Predicting(toy_measures.smooth)), look) as fleet:
        lab.run(lab.spec(name="fleet", trials=14), fleet)
    lab.run(lab.spec(name="inline", trials=14), InlineEngine(lab.bench()))
    found, inline = (
        [(record.program_id, record.predicted_us) for record in lab.store.trials(name)] for name in ("fleet", "inline")
    )
    assert found == inline
    # Only the second campaign could be answered by the first.
    assert {record.source for record in lab.store.trials("inline")} == {"store"}


def test_a_config_that_kills_its_station_crashes_alone(lab: Any, fleets: Fleets, toy_measures: ModuleType) -> None:
    with fleets(Setup(lab.workload, Predicting(toy_measures.deadly))) as fleet:
        result = lab.run(lab.spec(sampler="grid", trials=28), fleet, lab.space(threads="320"))
    assert result.outcomes == {"predicted": 6, "crashed": 1}
    (dead,) = [record for record in lab.store.trials("toy") if record.outcome == "crashed"]
    assert '"pipelining_depth":4' in dead.config
    assert "then again:" in dead.reason
    assert (dead.program_id is None, dead.tasks is None, dead.floor_us is None) == (False, False, False)


def test_a_rival_that_is_refused_today_is_none(
    fleets: Fleets, measuring: Callable[..., Setup], configs: list[ScheduleConfig]
) -> None:
    with fleets(measuring()) as fleet:
        fleet.ready()
        alone = fleet.submit(configs[1], (replace(configs[2], pipelining_depth=-1),))()
        against = fleet.submit(configs[1], (configs[2],))()
    assert isinstance(alone.outcome, Measured)
    assert alone.contest is not None and against.contest is not None
    assert (len(alone.contest.times_us), len(against.contest.times_us)) == (0, 2)


@pytest.mark.parametrize(("fleets", "victim"), DEATHS if FULL else DEATHS[:3], indirect=["fleets"])
def test_a_death_costs_one_retry_on_another_worker(
    fleets: Fleets, measuring: Callable[..., Setup], configs: list[ScheduleConfig], tmp_path: Path, victim: str
) -> None:
    with fleets(measuring(victim, once=True), ahead=1) as fleet:
        fleet.ready()
        found = outcomes(fleet, configs)
    assert [type(outcome) for outcome in found] == [Measured] * 5
    tried = attempts(tmp_path)
    assert len(tried) == len(set(tried)) == 2


@pytest.mark.parametrize("victim", ["child", "station"])
def test_two_deaths_are_the_programs_outcome_and_not_the_fleets(
    fleets: Fleets, measuring: Callable[..., Setup], configs: list[ScheduleConfig], tmp_path: Path, victim: str
) -> None:
    with fleets(measuring(victim), ahead=1) as fleet:
        crashed, *others = outcomes(fleet, [*configs, *configs[1:]])
    assert isinstance(crashed, Crashed)
    assert not crashed.transient
    assert "then again:" in crashed.reason
    assert [type(outcome) for outcome in others] == [Measured] * 8
    assert len(attempts(tmp_path)) == 2


def test_a_hang_is_killed_and_the_others_go_on(
    fleets: Fleets, measuring: Callable[..., Setup], configs: list[ScheduleConfig], tmp_path: Path
) -> None:
    with fleets(measuring("hang", limits=Limits(start_s=120, answer_s=2)), ahead=1) as fleet:
        late, *others = outcomes(fleet, configs)
    assert isinstance(late, TimedOut)
    assert [type(outcome) for outcome in others] == [Measured] * 4
    assert len(attempts(tmp_path)) == 1


@RAY_IS_LONG
def test_the_next_config_is_prepared_while_one_is_measured(
    fleets: Fleets, measuring: Callable[..., Setup], configs: list[ScheduleConfig], toy_measures: ModuleType,
    tmp_path: Path,
) -> None:  # fmt: skip
    setup = measuring("wait", compile_ahead=partial(toy_measures.mark_shallow, str(tmp_path)))
    with fleets(setup, ahead=1) as fleet:
        fleet._posts[1].up = False  # one host alone must do both
        assert [type(outcome) for outcome in outcomes(fleet, configs[:2])] == [Measured] * 2


def test_a_worker_is_sent_what_was_wrapped_before_its_turn_also_of_rivals(
    fleets: Fleets, measuring: Callable[..., Setup], configs: list[ScheduleConfig], toy_measures: ModuleType,
    tmp_path: Path,
) -> None:  # fmt: skip
    setup = measuring(wrap=partial(toy_measures.parcel, str(tmp_path)))
    with fleets(setup, ahead=1) as fleet:
        found = fleet.submit(configs[1], configs[2:4])()
    assert isinstance(found.outcome, Measured)
    assert found.contest is not None and len(found.contest.times_us) == 3
    assert len((tmp_path / "wrapped").read_text().split()) == 3


def test_two_gpus_measure_side_by_side(lab: Any, toy_measures: ModuleType, tmp_path: Path) -> None:
    pairs, trials = 6, 16
    means = Measuring(partial(toy_measures.Paired, str(tmp_path), pairs), limits=LIMITS)
    hosts = [ProcessHost(f"process {number}", Setup(lab.workload, means, toy_measures.here)) for number in range(2)]
    with Fleet(hosts, nothing_known, ahead=1, measured=True) as fleet:
        fleet.ready()
        lab.run(lab.spec(sampler="local", trials=trials, measure="cuda"), fleet)
    assert {row.outcome for row in lab.store.trials("toy")} == {"measured"}
    assert len(list(tmp_path.glob("begun-*"))) == 2 * pairs


def test_kernels_are_compiled_beside_all_else_and_for_nobody_who_has_gone(
    fleets: Fleets, configs: list[ScheduleConfig], measuring: Callable[..., Setup], toy_measures: ModuleType,
    tmp_path: Path,
) -> None:  # fmt: skip
    compile_all = partial(toy_measures.mark_until_stopped, str(tmp_path))
    with fleets(measuring(compile_all=compile_all)) as fleet:
        (outcome,) = outcomes(fleet, configs[1:2])
        assert isinstance(outcome, Measured)
        assert (tmp_path / "begun").exists()
        assert not (tmp_path / "stopped").exists()
    assert (tmp_path / "stopped").exists()


def test_a_row_says_where_it_was_measured(lab: Any, fleets: Fleets, measuring: Callable[..., Setup]) -> None:
    with fleets(measuring(), ahead=1, measured=True) as fleet:
        places = fleet.ready()
        lab.run(lab.spec(trials=6), fleet)
    assert [place.gpu for place in places] == ["NVIDIA H100"] * 2
    rows = lab.store.trials("toy")
    assert {(row.gpu_name, row.host, row.outcome) for row in rows} == {("NVIDIA H100", places[0].host, "measured")}


@pytest.mark.parametrize("trials", [pytest.param(300, marks=pytest.mark.slow), 25], ids=["long", "short"])
def test_a_campaign_under_fire_ends_with_every_row_once_and_the_right_best(
    lab: Any, fleets: Fleets, toy_measures: ModuleType, trials: int
) -> None:
    means = Measuring(toy_measures.Reckless, limits=Limits(start_s=120, answer_s=1.5))
    with fleets(Setup(lab.workload, means, toy_measures.here), ahead=1, measured=True) as fleet:
        fleet.ready()
        result = lab.run(lab.spec(measure="cuda", trials=trials), fleet, make_space(lab.workload))
    rows = [record for record in lab.store.trials("toy") if record.source != "final"]
    assert [row.trial for row in rows] == list(range(trials))
    assert {row.outcome for row in rows} <= {"measured", "rejected", "crashed", "timed_out"}
    assert sum(row.outcome in ("crashed", "timed_out") for row in rows) <= 0.2 * trials
    fastest = min(row.latency_us for row in rows if row.latency_us is not None)
    assert result.best.latency_us == fastest


def test_workers_with_different_gpus_are_refused_in_one_line(measuring: Callable[..., Setup]) -> None:
    setup = measuring()
    hosts: list[Host] = [ProcessHost(gpu, setup, {"TOY_GPU": gpu}) for gpu in ("NVIDIA H100", "NVIDIA L4")]
    with Fleet(hosts, nothing_known, measured=True) as fleet, pytest.raises(UsageError) as caught:
        fleet.ready()
    message = str(caught.value)
    assert message.startswith("workers: gpu is NVIDIA ")
    assert "NVIDIA L4" in message and "NVIDIA H100" in message and "\n" not in message


def test_a_station_that_is_killed_while_it_starts_is_started_again(
    lab: Any, fleets: Fleets, toy_measures: ModuleType, tmp_path: Path
) -> None:
    capture = partial(toy_measures.die_at_first, str(tmp_path), STARTS - 1)
    with fleets(Setup(lab.workload, Predicting(toy_measures.smooth), capture)) as fleet:
        assert lab.run(lab.spec(trials=6), fleet).outcomes == {"predicted": 6}
    assert len(list(tmp_path.glob("death *"))) == STARTS - 1


def test_a_child_that_is_killed_while_it_starts_is_started_again(
    lab: Any, fleets: Fleets, toy_measures: ModuleType, configs: list[ScheduleConfig], tmp_path: Path
) -> None:
    means = Measuring(partial(toy_measures.make_at_last, str(tmp_path), STARTS - 1), limits=LIMITS)
    with fleets(Setup(lab.workload, means, toy_measures.here)) as fleet:
        assert [type(outcome) for outcome in outcomes(fleet, configs)] == [Measured] * 5


@pytest.mark.parametrize("who", ["GPU worker", "process 0", "the process that forks others"])
def test_a_search_says_who_is_stopped_and_starts_another(
    who: str, lab: Any, toy_measures: ModuleType, configs: list[ScheduleConfig], tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    hasty = Patience(say_s=0.3, stopped_s=1.0)
    make, capture = partial(toy_measures.make_toy, str(tmp_path)), toy_measures.here
    match who:
        case "GPU worker":
            make = partial(toy_measures.make_after_a_stop, str(tmp_path))
        case "process 0":
            capture = partial(toy_measures.stop_at_first, str(tmp_path))
        case _:
            expect_forks()
            os.kill(fork_server_pid(), signal.SIGSTOP)
    setup = Setup(lab.workload, Measuring(make, limits=replace(LIMITS, patience=hasty)), capture)
    with Fleet([ProcessHost("process 0", setup, patience=hasty)], nothing_known) as fleet:
        assert [type(outcome) for outcome in outcomes(fleet, configs[:1])] == [Measured]
    said = capfd.readouterr().err
    if who == "GPU worker":  # a station writes where its fork server does, which is older than this test
        assert (tmp_path / "stopped").exists()
    else:
        assert re.search(rf"^flywheel: {who} \(process \d+\) is stopped, and has not answered", said, re.MULTILINE)


def test_workers_that_cannot_start_are_news_not_an_outcome(lab: Any, toy_measures: ModuleType) -> None:
    setup = Setup(lab.workload, Predicting(toy_measures.smooth), partial(int, "not a number"))
    with Fleet([ProcessHost("process 0", setup)], nothing_known) as fleet:
        with pytest.raises(FlywheelError, match=r"^worker process 0: died with exit code 1, before its first trial$"):
            lab.run(lab.spec(), fleet)
        with pytest.raises(FlywheelError, match="before its first trial"):
            fleet.submit(lab.space().to_config(lab.space().known_good()[0]))()
    assert lab.configs() == []


def test_a_worker_whose_gpu_is_gone_ends_the_search_when_it_is_the_last(
    lab: Any, configs: list[ScheduleConfig], toy_measures: ModuleType, tmp_path: Path
) -> None:
    setup = Setup(lab.workload, Measuring(partial(toy_measures.make_broken, str(tmp_path))), toy_measures.here)
    with Fleet([ProcessHost("process 0", setup)], nothing_known) as fleet:
        fleet.ready()
        with pytest.raises(NoGpuError, match="fell off the bus"):
            fleet.submit(configs[0])()


def test_a_store_that_fails_ends_the_search_and_no_worker(
    lab: Any, configs: list[ScheduleConfig], measuring: Callable[..., Setup]
) -> None:
    asked = []

    def look(program_id: str, environment: object) -> None:
        asked.append(program_id)
        if len(asked) == 1:
            raise StoreError("store: gone")

    with Fleet([ProcessHost("process 0", measuring())], look) as fleet:
        with pytest.raises(StoreError, match="gone"):
            fleet.submit(configs[1])()
        assert isinstance(fleet.submit(configs[1])().outcome, Measured)


def test_nothing_runs_when_a_fleet_has_ended(lab: Any, measuring: Callable[..., Setup]) -> None:
    hosts = [ProcessHost(f"process {number}", measuring("hang")) for number in range(2)]
    space = lab.space()
    with pytest.raises(KeyboardInterrupt), Fleet(hosts, nothing_known, ahead=1) as fleet:
        fleet.ready()
        pids = [host.pid for host in hosts]
        fleet.submit(space.to_config({**space.known_good()[0], "depth": 4}))
        sleep(0.5)
        raise KeyboardInterrupt
    assert all(pid is not None and not Path(f"/proc/{pid}").exists() for pid in pids)


@LONG
def test_a_node_that_dies_costs_its_trials_one_retry(
    lab: Any, cluster: Any, configs: list[ScheduleConfig], toy_measures: ModuleType
) -> None:
    from flywheel.search.trials.cluster import RayHost, connect

    node = cluster.add_node(num_cpus=1, num_gpus=1, resources={"doomed": 1})
    setup = Setup(lab.workload, Predicting(toy_measures.smooth))
    with connect(cluster.address) as found:
        hosts = [RayHost(f"actor {number}", setup, gpus=1, pulse=found.pulse) for number in range(3)]
        with Fleet(hosts, nothing_known) as fleet:
            fleet.ready()
            waiting = [fleet.submit(config) for config in configs * 4]
            cluster.remove_node(node, allow_graceful=False)
            waiting += [fleet.submit(config) for config in configs * 4]
            assert all(isinstance(finish().outcome, Predicted) for finish in waiting)
    for _ in range(60):  # Ray counts a dead node for a while, and other tests count nodes
        with connect(cluster.address) as found:
            if (found.cpus, found.gpus) == (2, 4):
                return
        sleep(1)
    pytest.fail("Ray still counts the node that was removed a minute ago")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "127.0.0.1:99999"])
def test_a_cluster_that_is_not_there_is_refused_at_once(address: str) -> None:
    from flywheel.search.trials.cluster import connect

    with pytest.raises(UsageError, match=rf"^ray: .*{address}"), connect(address):
        pass


def test_more_workers_than_the_cluster_has_are_refused(lab: Any, cluster: Any) -> None:
    from flywheel.search.trials.sites import open_site

    spec = lab.spec(engine="ray", ray_address=cluster.address, workers=99)
    with (
        pytest.raises(UsageError, match=r"^--workers 99: the Ray cluster has \d processors$"),
        open_site(spec, lab.workload.target),
    ):
        pass


@LONG
def test_a_worker_of_two_gpus_has_both_on_one_node(lab: Any, cluster: Any, toy_measures: ModuleType) -> None:
    from flywheel.search.trials.cluster import RayHost, connect

    with connect(cluster.address) as found:
        assert (found.sets_of(2), found.sets_of(3), found.sets_of(4)) == (1, 1, 0)
        host = RayHost("pair", Setup(lab.workload, Predicting(toy_measures.smooth)), gpus=2, pulse=found.pulse)
        try:
            assert host.start().host
        finally:
            host.end(now=True)
