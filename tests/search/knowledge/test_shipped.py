from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from effort import sample

from flywheel.errors import StoreError
from flywheel.ir import TARGETS, validate
from flywheel.lowering.lower import lower
from flywheel.models.catalog import CATALOG
from flywheel.search.knowledge.shipped import find_shipped, shipped_starts
from flywheel.search.knowledge.warm import NEIGHBOURS, starts_of
from flywheel.search.opening import open_campaign
from flywheel.search.space import make_space
from flywheel.search.spec import CampaignSpec, with_name
from flywheel.search.workload import Workload, make_workload
from flywheel.store import schedule as files
from flywheel.store.schedule import SHIPPED, Shipped, shipped_schedules
from flywheel.store.sql import open_store
from flywheel.vm.pack import pack_any

ROOT = Path(__file__).parents[3]


def name_of(each: Shipped) -> str:
    return each.name


@pytest.mark.parametrize("each", sample(shipped_schedules()), ids=name_of)
def test_each_shipped_schedule_lowers_and_is_proved_and_packed_on_its_gpu(each: Shipped) -> None:
    asked = each.schedule
    workload = make_workload(asked.model, asked.gpu, asked.dtype, asked.context, asked.batch)

    program = lower(workload.graph, asked.config, workload.target)

    assert validate(program, strict=True).ok
    pack_any(program)


@pytest.mark.parametrize("each", shipped_schedules(), ids=name_of)
def test_each_shipped_schedule_says_where_it_is_from_and_its_table_has_it(each: Shipped) -> None:
    asked = each.schedule
    weights = "" if asked.weights == asked.dtype else f"-{asked.weights}"
    assert each.name == f"{asked.model}-{asked.gpu}-{asked.dtype}{weights}-c{asked.context}-b{asked.batch}.json"
    rows = (ROOT / each.table).read_text(encoding="utf-8").splitlines()
    assert [row for row in rows if row.startswith(f"{each.campaign}\t{each.trial}\t") and str(each.median_us) in row]


def test_the_same_work_takes_its_schedule_as_it_is() -> None:
    for each in shipped_schedules():
        asked = each.schedule
        weights = None if asked.weights == asked.dtype else asked.weights
        fit = find_shipped(make_workload(asked.model, asked.gpu, asked.dtype, asked.context, asked.batch, weights))
        assert fit is not None
        assert (fit.config, fit.shipped, fit.exact) == (asked.config, each, True)


@pytest.mark.parametrize(
    ("context", "batch", "taken"), [(1024, 1, "c512-b1"), (8192, 1, "c4096-b1"), (64, 3, "c512-b4")]
)
def test_another_context_or_batch_takes_the_nearest_carried_into_its_space(
    context: int, batch: int, taken: str
) -> None:
    workload = make_workload("llama3.2-1b", "h200", "bf16", context, batch)
    fit = find_shipped(workload)
    assert fit is not None
    assert (fit.shipped.name, fit.exact) == (f"llama3.2-1b-h200-bf16-{taken}.json", False)
    assert make_space(workload).to_choice(fit.config) is not None
    assert validate(lower(workload.graph, fit.config, workload.target), strict=True).ok


def test_a_checkpoint_of_the_same_shapes_takes_it_and_other_work_does_not() -> None:
    spec = replace(CATALOG["qwen3-0.6b"], name="mine", rope_theta=1e4, max_position=4096)
    work = Workload("/models/mine", spec, TARGETS["h200"], "bf16", 512)
    assert find_shipped(work) is not None
    assert find_shipped(replace(work, target=TARGETS["h100"])) is None
    assert find_shipped(replace(work, dtype="f16")) is None
    assert find_shipped(replace(work, spec=replace(spec, n_layers=27))) is None


def test_a_measured_search_on_that_gpu_begins_with_them_and_others_do_not(tmp_path: Path) -> None:
    def starts(**asked: Any) -> list[str]:
        spec = CampaignSpec(model="smollm2-135m", **asked)
        space = make_space(make_workload(spec.model, spec.gpu, spec.dtype, spec.context))
        with open_store(tmp_path / f"{len(list(tmp_path.iterdir()))}.db") as store:
            campaign = store.campaign(open_campaign(with_name(spec, spec.measure), space, store, fresh=False))
            assert campaign is not None
            assert all(space.to_choice(start.config) is not None for start in starts_of(campaign))
            return [f"{start.model} {start.gpu} {start.context}" for start in starts_of(campaign)]

    assert starts(gpu="h200", measure="cuda")[0] == "qwen3-0.6b h200 512"
    assert 1 <= len(starts(gpu="h200", measure="cuda")) <= NEIGHBOURS
    assert starts(gpu="h200", measure="cuda", warm=False) == []
    assert starts(gpu="h200", measure="predict") == []
    assert starts(gpu="a100", measure="cuda") == []


def test_a_start_that_is_known_is_not_there_twice() -> None:
    space = make_space(make_workload("llama3-8b", "h200", "bf16", 512))
    nearest, *rest = shipped_starts(space, 3, ())
    assert (nearest.distance, nearest.model) == (0.0, "llama3-8b")
    assert shipped_starts(space, 2, [nearest.config.config_id]) == rest
    assert shipped_starts(space, 0, ()) == [nearest]  # the work's own, however many starts there are already


def test_the_own_schedule_comes_first_and_names_its_weights() -> None:
    """Bytes of int8 and fp8 are as many, so their works are not apart."""
    space = make_space(make_workload("llama3-8b", "h200", "bf16", 512, 1, "int8"))
    own, other = shipped_starts(space, 2, ())
    assert (own.weights, other.weights, other.distance) == ("int8", "fp8", 0.0)
    assert shipped_starts(space, 0, ()) == [own]
    assert [start.weights for start in shipped_starts(space, 1, [own.config.config_id])] == ["fp8"]


def test_a_search_begins_with_its_own_shipped_schedule_whatever_its_store_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = make_space(make_workload("llama3-8b", "h200", "bf16", 512))
    (own,) = shipped_starts(space, 0, ())
    choices = [{**space.known_good()[0], "depth": depth} for depth in (0, 2, 3)]
    others = [replace(own, config=space.to_config(choice)) for choice in choices]
    monkeypatch.setattr("flywheel.search.opening.choose_starts", lambda *_: list(others))
    spec = CampaignSpec(model="llama3-8b", gpu="h200", measure="cuda")
    with open_store(tmp_path / "store.db") as store:
        campaign = store.campaign(open_campaign(with_name(spec, "cuda"), space, store, fresh=False))
        assert campaign is not None
        assert starts_of(campaign) == [*others, own]


def test_a_file_that_does_not_say_what_it_took_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = next(SHIPPED.glob("*.json")).read_text(encoding="utf-8")
    (tmp_path / "bad.json").write_text(whole.replace('"median_us"', '"mean_us"'), encoding="utf-8")
    monkeypatch.setattr(files, "SHIPPED", tmp_path)
    with pytest.raises(StoreError, match=r"bad\.json: says neither what it took nor where it is from$"):
        files.shipped_schedules.__wrapped__()
