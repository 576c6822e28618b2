"""Searches for what several GPUs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from flywheel.errors import NoGpuError, UnknownNameError
from flywheel.ir import TARGETS
from flywheel.lowering.lower import lower
from flywheel.measure.device import Device
from flywheel.plan import variant_of
from flywheel.search.knowledge.warm import identity_of, work_of
from flywheel.search.run import run_search
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec
from flywheel.search.trials import measuring
from flywheel.search.trials.device import settle_measure
from flywheel.search.workload import gpus_of, make_workload
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
    monkeypatch.setattr("flywheel.vm.gpu.peers.count_gpus", lambda: 1)
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
