from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import imagined
import pytest
from effort import LONG

from flywheel.cost_model import MODEL_VERSION, predict
from flywheel.cost_model.calibrate import price_here
from flywheel.cost_model.calibration import dump_calibration
from flywheel.cost_model.links import Link
from flywheel.cost_model.machine import machine_for
from flywheel.errors import UnknownNameError, UsageError, WorkerDiedError
from flywheel.measure.ceiling import Ceiling, PeerLink
from flywheel.measure.environment import Environment
from flywheel.measure.latency import GpuState, MeasuredLatency
from flywheel.measure.outcome import Measured
from flywheel.measure.verdict import judge
from flywheel.plan import program_id
from flywheel.search.knowledge.calibrating import LEAST_CONFIGS, Calibrated, calibrate, select, split
from flywheel.search.knowledge.pricing import open_pool
from flywheel.search.rows import to_record
from flywheel.search.spec import CampaignSpec, to_campaign
from flywheel.search.trials.evaluate import Evaluation
from flywheel.store.sql import Store, open_store

VERDICT = judge(error=0.0, where="logits", positions=[1], dtype="BF16")
CALM = GpuState(throttle="none", strangers=0)


class Lab:
    """A store of campaigns on the GPU `few`, measured by an imagined machine."""

    def __init__(self, store: Store, environment: Environment) -> None:
        self.store = store
        self._environment = replace(environment, gpu="Few", driver="1", nvrtc="13", kernels="abc")
        self._clock = 0

    def campaign(self, name: str, number: int, measure: str = "cuda", **changes: Any) -> CampaignSpec:
        model = imagined.SPECS[number]
        spec = CampaignSpec(model.name, "few", context=256, measure=measure, name=name, **changes)
        made = to_campaign(spec, name, decoder=asdict(model), created_at="2026-01-01T00:00:00+00:00")
        self.store.create_campaign(made)
        return spec

    def measure(
        self, name: str, number: int, count: int, *, seed: int = 0, factor: float = 1.0, source: str = "search",
        state: GpuState = CALM, first: int = 0, **where: Any,
    ) -> None:  # fmt: skip
        """`count` trials of a new campaign, `factor` times what the truth would be."""
        spec, chance = self.campaign(name, number), random.Random(f"{name} {seed}")
        for trial, program in enumerate(imagined.programs(number, max(60, first + count), seed)[first : first + count]):
            us = factor * predict(program, imagined.TRUTH).latency_us * chance.gauss(1.0, 0.02)
            outcome = Measured(MeasuredLatency(us, us, us, 30, 3, "flushed", gpu_state=state), VERDICT)
            self._clock += 1
            row = to_record(
                name, trial, spec, program.config, Evaluation(outcome, program_id(program)),
                replace(self._environment, **where), source=source, ask_s=None,
                created_at=f"2026-01-02T00:{self._clock // 60 % 60:02}:{self._clock % 60:02}+00:00",
            )  # fmt: skip
            self.store.append(row)


@pytest.fixture
def lab(tmp_path: Path, environment: Environment, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    for module in ("workload", "knowledge.warm"):
        monkeypatch.setattr(f"flywheel.search.{module}.TARGETS", {"few": imagined.TARGET})
    with open_store(tmp_path / "store.db") as store:
        yield Lab(store, environment)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits that end before they are good."""
    monkeypatch.setattr("flywheel.cost_model.calibrate._ROUNDS", 2)


def run(lab: Lab, *names: str, **options: Any) -> Calibrated:
    return calibrate(select(lab.store, "few", names), options.pop("ceiling", None), 0.5, **options)


@LONG
def test_held_back_configs_of_two_models_are_predicted_and_ranked(lab: Lab) -> None:
    lab.measure("a", 0, 120)
    lab.measure("b", 1, 120)
    told: list[str] = []
    found = run(lab, watch=told.append)
    assert [(work.model, work.after.n, work.fitted) for work in found.works] == [("small", 60, 50), ("wide", 60, 50)]
    for work in found.works:
        assert work.after.spearman is not None and work.after.spearman >= imagined.RANKED
        assert work.after.median_error <= 0.04 < work.before.median_error
    provenance = found.calibration.provenance
    assert provenance["campaigns"] == ["a", "b"]
    assert (provenance["gpu_name"], provenance["gpu_driver"], provenance["kernels"]) == ("Few", "1", "abc")
    assert provenance["before"] == MODEL_VERSION
    assert told[0] == "fitting to 100 programs"


@pytest.mark.usefixtures("quick")
def test_the_same_rows_give_the_same_file_in_any_number_of_processes(lab: Lab) -> None:
    lab.measure("a", 0, 20)
    once = dump_calibration(run(lab).calibration)
    with open_pool(2) as pool:
        assert dump_calibration(run(lab, pool=pool).calibration) == once


@pytest.mark.usefixtures("quick")
def test_what_a_probe_measured_bounds_the_fit(lab: Lab) -> None:
    lab.measure("a", 0, 20)
    ceiling = Ceiling("Few", "1", "host", 190.0, "ring", 0.6, "2026-01-01T00:00:00+00:00")
    found = run(lab, ceiling=ceiling)
    machine = found.calibration.machine
    assert machine.read_gbs <= 190.0 and machine.visibility_us >= 0.6
    assert found.probed == found.calibration.provenance["probed"] == {"read_gbs": 190.0, "visibility_us": 0.6}


@pytest.mark.usefixtures("quick")
def test_only_the_named_constants_move(lab: Lab) -> None:
    lab.measure("a", 0, 20)
    ceiling = Ceiling("Few", "1", "host", 1e-3, "ring", 4.9, "2026-01-01T00:00:00+00:00")
    stock = machine_for(imagined.TARGET)
    found = run(lab, ceiling=ceiling, only=("consumer.chunk_us", "vector.fetch_us"))
    machine = found.calibration.machine
    assert machine.consumer.chunk_us != stock.consumer.chunk_us and machine.vector.fetch_us != stock.vector.fetch_us
    moved = replace(
        stock, source="calibrated", consumer=replace(stock.consumer, chunk_us=machine.consumer.chunk_us),
        vector=replace(stock.vector, fetch_us=machine.vector.fetch_us),
    )  # fmt: skip
    assert machine == moved
    assert found.calibration.provenance["only"] == ["consumer.chunk_us", "vector.fetch_us"]
    assert found.probed == {}


@pytest.mark.usefixtures("quick")
def test_what_a_probe_measured_bounds_a_named_constant(lab: Lab) -> None:
    lab.measure("a", 0, 20)
    ceiling = Ceiling("Few", "1", "host", 190.0, "ring", 0.6, "2026-01-01T00:00:00+00:00")
    found = run(lab, ceiling=ceiling, only=("read_gbs",))
    assert found.probed == {"read_gbs": 190.0}
    assert found.calibration.machine.read_gbs <= 190.0
    with pytest.raises(ValueError, match="no constant named fp9_times"):
        run(lab, only=("fp9_times",))


@pytest.mark.usefixtures("quick")
def test_a_probed_link_becomes_that_of_the_machine_and_moves_nothing_else(lab: Lab) -> None:
    lab.measure("a", 0, 20)
    link = PeerLink("Few", "1", "host", 1, 1.25, 0.5, 380.0, 390.0, "2026-01-01T00:00:00+00:00")
    alone, linked = (run(lab, links=links).calibration.machine for links in ([], [link]))
    assert alone.link is None
    assert linked == replace(alone, link=Link(1.25, 0.5, 380.0))


def test_what_is_held_back_depends_on_the_configs_alone(lab: Lab) -> None:
    lab.measure("a", 0, 40)
    (work,) = select(lab.store, "few").works
    fitted, kept = split(work.configs, 0.25)
    assert (len(fitted), len(kept)) == (30, 10)
    again, rest = split(work.configs[::-1], 0.25)
    assert {config.config_id for config in kept} == {config.config_id for config in rest}
    assert not {config.config_id for config in again} & {config.config_id for config in kept}
    more = split(work.configs, 0.5)[1]
    assert {config.config_id for config in kept} < {config.config_id for config in more}
    assert [len(part) for part in split(work.configs, 0.999)] == [2, 38]


def test_rows_of_another_machine_never_mix(lab: Lab) -> None:
    lab.measure("old kernels", 0, 20, kernels="old", factor=9.0)
    lab.measure("other driver", 0, 20, driver="2", factor=9.0)
    lab.measure("other gpu", 0, 20, gpu="Few Plus", factor=9.0)
    lab.measure("here", 0, 20)
    found = select(lab.store, "few")
    assert (found.campaigns, found.elsewhere, found.place["kernels"]) == (("here",), 60, "abc")
    assert max(config.latency_us for config in found.works[0].configs) < 1000
    assert select(lab.store, "few", ["old kernels"]).place["kernels"] == "old"
    both = select(lab.store, "few", kernels=["old", "unheard of"])
    assert (both.campaigns, both.elsewhere, both.kernels) == (("here", "old kernels"), 40, ("old",))


def test_rows_that_the_store_or_a_final_gave_do_not_count(lab: Lab) -> None:
    lab.measure("a", 0, 20)
    lab.measure("answered", 0, 20, source="store", factor=9.0)
    lab.measure("final", 0, 20, source="final", factor=9.0)
    assert select(lab.store, "few").campaigns == ("a",)


def test_a_config_that_was_measured_often_counts_once_by_its_median(lab: Lab) -> None:
    for name, factor in (("a", 1.0), ("b", 1.0), ("c", 50.0)):
        lab.measure(name, 0, 20, factor=factor)
    (work,) = select(lab.store, "few").works
    assert len(work.configs) == len({config.config_id for config in work.configs}) <= 20
    assert max(config.latency_us for config in work.configs) < 1000


@pytest.mark.parametrize("state", [GpuState(throttle="power", strangers=0), GpuState(throttle="none", strangers=1)])
def test_disturbed_rows_count_only_where_nothing_else_suffices(lab: Lab, state: GpuState) -> None:
    lab.measure("disturbed", 0, 20, state=state, factor=9.0)
    (work,) = select(lab.store, "few").works
    assert (len(work.configs), work.disturbed) == (20, True)
    lab.measure("calm", 0, 20, first=20)
    (work,) = select(lab.store, "few").works
    assert (len(work.configs), work.disturbed) == (20, False)
    assert max(config.latency_us for config in work.configs) < 1000


def test_too_few_configs_are_counted_in_one_line(lab: Lab) -> None:
    with pytest.raises(UsageError, match="has nothing measured on an few"):
        select(lab.store, "few")
    lab.measure("a", 0, LEAST_CONFIGS - 1)
    wanted = "^calibrate: 15 of small, bf16, context 256 measured on Few, driver 1, kernels abc; one model needs 16"
    with pytest.raises(UsageError, match=wanted):
        select(lab.store, "few")
    lab.measure("b", 1, LEAST_CONFIGS)
    found = select(lab.store, "few")
    assert [work.workload.model for work in found.works] == ["wide"]
    assert found.few == {"small, bf16, context 256": LEAST_CONFIGS - 1}


def test_campaigns_that_cannot_be_meant_are_named(lab: Lab) -> None:
    lab.measure("a", 0, 20)
    lab.campaign("guesses", 0, measure="predict")
    with pytest.raises(UsageError, match="campaign 'guesses' has measure=predict, not cuda"):
        select(lab.store, "few", ["a", "guesses"])
    with pytest.raises(UnknownNameError, match="no campaign 'b'"):
        select(lab.store, "few", ["b"])
    with pytest.raises(UnknownNameError, match="GPU 'many'"):
        select(lab.store, "many")


@pytest.mark.usefixtures("quick")
def test_programs_that_are_others_today_are_left_out(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.measure("a", 0, 30)
    changed: list[int] = []

    def identity(program: Any) -> str:
        changed.append(1)
        return "another" if len(changed) % 3 == 0 else program_id(program)

    monkeypatch.setattr("flywheel.search.knowledge.calibrating.program_id", identity)
    (work,) = run(lab).works
    assert work.changed > 0
    assert work.after.n + work.changed == 15
    monkeypatch.setattr("flywheel.search.knowledge.calibrating.program_id", lambda program: "another")
    with pytest.raises(UsageError, match="0 programs to fit to, beside 15 that are lowered otherwise today"):
        run(lab)


def test_a_process_that_dies_is_one_line_and_none_is_left(lab: Lab) -> None:
    samples = imagined.samples(0, 60)[:4]
    with open_pool(2) as pool:
        price = pool(samples)
        assert price([imagined.TRUTH]) == price_here(samples)([imagined.TRUTH])
        first, second = multiprocessing.active_children()
        first.kill()
        with pytest.raises(WorkerDiedError, match=r"^a process that predicts: died with .*; --jobs 1 goes without$"):
            price([imagined.TRUTH])
    assert not first.is_alive() and not second.is_alive()
