from __future__ import annotations

from dataclasses import replace

import pytest

from flywheel.errors import ConfigError, UnknownNameError
from flywheel.ir import TARGETS, ScheduleConfig
from flywheel.models.catalog import CATALOG, resolve_model
from flywheel.search.workload import Workload, default_context, find_target, found_for_another, make_workload
from flywheel.store.schedule import Schedule


def test_names_become_records() -> None:
    workload = make_workload("llama3-8b", "h100", "f16", 512)
    assert (workload.spec, workload.target) == (CATALOG["llama3-8b"], TARGETS["h100"])
    assert workload.graph.context == 512
    assert workload.graph.dtype.name == "F16"


def test_contexts_and_dtypes_are_checked_at_once() -> None:
    with pytest.raises(ConfigError, match=r"^llama3-8b: context 8193 is not in 1\.\.8192$"):
        make_workload("llama3-8b", "h100", "bf16", 8193)
    with pytest.raises(UnknownNameError, match=r"^dtype 'int4' is not one of bf16, f16, f32$"):
        Workload("m", CATALOG["llama3-8b"], TARGETS["h100"], "int4", 8)


def test_unknown_gpus_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"^GPU 'h1000': did you mean h100.* It is not one of a100, .*generic$"):
        find_target("h1000")


@pytest.mark.parametrize("asked", ["H100", " h100", "h100"])
def test_the_case_of_a_gpu_does_not_matter(asked: str) -> None:
    assert make_workload("Llama3-8B", asked, "bf16", 64).target is TARGETS["h100"]
    assert make_workload("Llama3-8B", asked, "bf16", 64).model == "llama3-8b"


def test_the_default_context_is_cut_to_what_the_model_has() -> None:
    spec = CATALOG["llama3-8b"]
    assert (default_context(spec), default_context(replace(spec, max_position=256))) == (512, 256)


def test_a_schedule_is_of_another_model_unless_the_sizes_are_the_same() -> None:
    config = ScheduleConfig()
    schedule = Schedule("llama3-8b", "h200", "bf16", 512, 1, config, config.config_id, None, "bf16")
    own = resolve_model("llama3-8b")
    assert found_for_another(schedule, own) is None
    assert found_for_another(schedule, replace(own, name="Meta-Llama-3-8B")) is None
    assert found_for_another(schedule, resolve_model("qwen3-8b")) == "llama3-8b on h200, bf16, context 512"
    gone = replace(schedule, model="/nowhere/model", batch=4)
    assert found_for_another(gone, own) == "/nowhere/model on h200, bf16, context 512, batch 4"
