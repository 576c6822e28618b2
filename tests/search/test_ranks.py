"""Searches for what several GPUs share."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from effort import sample

from flywheel.errors import NoGpuError, UnknownNameError
from flywheel.ir import TARGETS, config_to_dict
from flywheel.lowering.lower import lower
from flywheel.measure.device import Device
from flywheel.models.catalog import CATALOG
from flywheel.plan import program_id, variant_of
from flywheel.search.gains import gained, workload_of
from flywheel.search.knobs import KNOBS
from flywheel.search.knowledge.shipped import find_shipped, shipped_starts
from flywheel.search.knowledge.warm import carry, distance, identity_of, work_of
from flywheel.search.run import run_search
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials import measuring
from flywheel.search.trials.device import settle_measure
from flywheel.search.workload import Workload, gpus_of, make_workload
from flywheel.store.sql import open_store
from flywheel.vm.pack import PackedRanks
from flywheel.vm.worker import Parcel


def spec_of(measure: str = "auto") -> CampaignSpec:
    return CampaignSpec("smollm2-135m", "3xh200", context=64, trials=3, jobs=1, measure=measure, sampler="random")


def test_a_gpu_with_a_number_in_front_is_so_many_of_them() -> None:
    assert gpus_of("h200") == (1, "h200")
    assert gpus_of("3xh200") == (3, "h200")
    three = make_workload("smollm2-135m", "3xh200", "bf16", 64)
    assert (three.ranks, three.target.name, three.gpu) == (3, "h200", "3xh200")
    assert three == make_workload("smollm2-135m", "h200", "bf16", 64, ranks=3)
    with pytest.raises(UnknownNameError):
        make_workload("smollm2-135m", "3xh2000", "bf16", 64)


def test_tiles_are_those_of_what_one_gpu_has() -> None:
    one, three = (make_space(make_workload("smollm2-135m", gpu, "bf16", 64)) for gpu in ("l4", "3xl4"))
    rows = [next(each.values for each in space.dimensions if each.name == "rows.gate_up") for space in (one, three)]
    assert max(rows[1]) < max(rows[0])
    for choice in three.known_good():
        assert three.to_choice(three.to_config(choice)) == choice


@pytest.mark.parametrize(
    ("gpu", "dtype", "said"), [("l4", "bf16", None), ("3xl4", "bf16", {"bits": 16}), ("3xl4", "f32", None)]
)
def test_gpus_send_each_other_summands_in_the_steps_half_type(
    gpu: str, dtype: str, said: dict[str, int] | None
) -> None:
    space = make_space(make_workload("smollm2-135m", gpu, dtype, 64))
    assert [each.name for each in space.dimensions] == [knob.name for knob in KNOBS]
    assert {json.dumps(space.to_config(choice).tiling.get("exchange")) for choice in space.known_good()} == {
        json.dumps(said)
    }


@pytest.mark.parametrize(("ranks", "batch"), sample([(2, 1), (4, 8)]))
def test_every_value_of_every_knob_changes_a_program_of_several_gpus(ranks: int, batch: int) -> None:
    spec = replace(CATALOG["llama3.2-1b"], n_layers=2, vocab=4096)
    work = Workload(spec.name, spec, TARGETS["h200"], "bf16", 512, batch, ranks=ranks)
    space = make_space(work)
    base = space.known_good()[1]
    for each in space.dimensions:
        configs = [space.to_config({**base, each.name: value}) for value in each.values]
        programs = [program_id(lower(work.graph, config, work.target)) for config in configs]
        dead = [pair for pair in combinations(range(len(programs)), 2) if programs[pair[0]] == programs[pair[1]]]
        assert not dead, each.name


def test_a_schedule_of_several_gpus_survives_its_config_and_its_summands_become_short() -> None:
    space = make_space(make_workload("smollm2-135m", "3xl4", "bf16", 64))
    good = space.known_good()[0]
    config = space.to_config(good)
    assert space.to_choice(config) == space.nearest(config) == good
    tiling = {name: own for name, own in config.tiling.items() if name != "exchange"}
    for spelled in (replace(config, tiling=tiling), replace(config, tiling={**tiling, "exchange": {"bits": 32}})):
        assert space.to_choice(spelled) is None and space.nearest(spelled) == good


def test_schedules_are_carried_between_one_gpu_and_several_by_what_each_gpu_has() -> None:
    one, two = (make_space(make_workload("llama3-8b", gpu, "bf16", 512)) for gpu in ("h200", "2xh200"))
    there = carry(one.known_good()[0], one.workload, two)
    back = carry(there, two.workload, one)
    for name in ("rows.qkv", "rows.gate_up", "rows.lm_head"):
        assert abs(int(there[name]) - int(one.known_good()[0][name]) / 2) < 16
        assert abs(int(there[name]) - int(back[name]) / 2) < 16
    assert back.keys() == one.known_good()[0].keys()
    assert distance(one.workload, two.workload) == 1.0


@pytest.mark.parametrize(("model", "gpus"), [("qwen3-0.6b", "2xh200"), ("llama3-8b", "8xh200")])
def test_shipped_schedules_of_other_numbers_of_gpus_are_carried_over_and_lower_there(model: str, gpus: str) -> None:
    several = make_space(make_workload(model, gpus, "bf16", 512))
    fit = find_shipped(several.workload)
    assert fit is not None and not fit.exact
    starts = [fit.config, *(start.config for start in shipped_starts(several, 2, ()))]
    assert all(several.to_choice(config) is not None for config in starts)
    lower(several.workload.graph, fit.config, several.workload.target)


def test_a_search_predicts_and_its_rows_say_how_many_gpus(tmp_path: Path) -> None:
    store = str(tmp_path / "trials.db")
    result = run_search(spec_of(), store)
    assert result.best is not None
    assert result.best.gpu == "3xh200"
    assert result.best.is_predicted
    with open_store(store, create=False) as opened:
        campaign = opened.campaign(result.name)
        assert {row.gpu for row in opened.trials(result.name)} == {"3xh200"}
    assert campaign is not None
    work = work_of(campaign)
    assert work is not None
    assert identity_of(work) == identity_of(make_workload("smollm2-135m", "3xh200", "bf16", 64))


@pytest.mark.parametrize(
    ("measure", "line"),
    [("cuda", "--measure cuda needs 3 h200: this machine has 1"),
     ("auto", "--gpu 3xh200 needs 3 h200: this machine has 1; --measure predict searches without them")],
)  # fmt: skip
def test_a_machine_with_fewer_gpus_measures_no_programs_of_several(measure: str, line: str) -> None:
    with pytest.raises(NoGpuError) as caught:
        settle_measure(measure, TARGETS["h200"], Device("NVIDIA H200", 132, 141 * 2**30), [], 3, 1)
    assert str(caught.value) == line
    assert settle_measure(measure, TARGETS["h200"], Device("NVIDIA H200", 132, 141 * 2**30), [], 3, 3) == "cuda"
    assert settle_measure("predict", TARGETS["h200"], None, [], 3) == "predict"


def test_a_bench_of_two_ranks_takes_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.vm.gpu.driver.count_gpus", lambda: 1)
    with pytest.raises(NoGpuError, match=r"^2 ranks need 2 GPUs: 1 is here$"):
        measuring.make_bench("smollm2-135m", "bf16", 64, ranks=2)


def test_a_program_of_several_gpus_goes_to_its_worker_packed_and_its_kernel_is_compiled_for_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = make_workload("smollm2-135m", "3xh200", "bf16", 64)
    space = make_space(workload)
    program = lower(workload.graph, space.to_config(space.known_good()[0]), workload.target)
    compiled: list[dict[str, object]] = []
    monkeypatch.setattr(measuring, "compile_variant", lambda *_, **options: compiled.append(options))
    measuring.compile_ahead("bf16", program)
    assert [options["ranked"] for options in compiled] == [True]
    parcel = measuring.wrap(program)
    assert isinstance(parcel, Parcel)
    packed = parcel.open()
    assert isinstance(packed, PackedRanks)
    assert packed.program.ranks == len(packed.parts) == 3
    assert {(part.variant.threads, part.variant.rows) for part in packed.parts} == {
        (variant_of(program).threads, compiled[0]["rows"])
    }


def test_a_campaign_of_before_still_says_what_it_gained_over_the_first_schedule(tmp_path: Path) -> None:
    # Then GPUs sent each other summands of 32 bits unless a schedule said otherwise.
    url = str(tmp_path / "trials.db")
    found = run_search(CampaignSpec("smollm2-135m", "3xh100", trials=3), url)
    with open_store(url) as store:
        campaign = store.campaign(found.name)
        assert campaign is not None
        rows, space = store.trials(found.name), make_space(workload_of(campaign))
    first = space.to_config(space.known_good()[0])
    before = replace(first, tiling={name: own for name, own in first.tiling.items() if name != "exchange"})
    old = {"config": json.dumps(config_to_dict(before)), "config_id": before.config_id}
    renamed = [replace(row, **old) if row.config_id == first.config_id else row for row in rows]
    start, was = gained(space, rows), gained(space, renamed)
    assert start is not None and was is not None
    assert start.over_start == was.over_start is not None
