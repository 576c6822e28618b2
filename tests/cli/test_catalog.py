from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from click.testing import Result

from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.measure.floor import weight_bytes_read
from flywheel.models.catalog import CATALOG
from flywheel.models.decoder import decode_step
from flywheel.models.families import FAMILIES
from flywheel.models.footprint import bytes_per_token

Run = Callable[..., Result]


@pytest.mark.parametrize("name", ["smollm2-135m", "mistral-7b", "qwen2.5-7b"])
def test_the_bytes_of_a_token_are_those_that_its_program_reads(name: str) -> None:
    program = lower(decode_step(CATALOG[name], 64), ScheduleConfig(), TARGETS["l4"])
    assert bytes_per_token(CATALOG[name], DType.BF16) == weight_bytes_read(program)


def test_models_have_floors_on_the_gpus_that_are_asked_for(run: Run) -> None:
    document = json.loads(run("models", "--gpu", "h100", "--gpu", "l4", "--json").stdout)
    assert [model["name"] for model in document["models"]] == list(CATALOG)
    llama = document["models"][0]
    assert llama["floor_us"]["h100"] == pytest.approx(llama["bytes_per_token"] / 3350e3)
    assert llama["floor_us"]["l4"] > llama["floor_us"]["h100"]
    text = run("models", "--gpu", "h100").stdout
    assert "h100 floor" in text
    assert "8.03 B" in text


def test_dtype_scales_the_bytes(run: Run) -> None:
    half, full = (json.loads(run("models", "--dtype", dtype, "--json").stdout)["models"][0] for dtype in ("f16", "f32"))
    assert full["bytes_per_token"] == 2 * half["bytes_per_token"]


def test_targets_lists_every_gpu(run: Run) -> None:
    document = json.loads(run("targets", "--json").stdout)
    assert [target["name"] for target in document["targets"]] == list(TARGETS)
    assert {target["cost_model"] for target in document["targets"]} == {"measured", "scaled"}
    assert len(run("targets").stdout.splitlines()) == len(TARGETS) + 1


def test_families_are_listed_with_their_keys_and_the_refused_with_reasons(run: Run) -> None:
    found = json.loads(run("models", "--family", "--json").stdout)
    assert [each["model_type"] for each in found["families"]] == list(FAMILIES)
    assert "model_type" in found["families"][0]["keys"]["used"]
    assert found["refused"]["mixtral"] == "its layers choose among experts"
    text = run("models", "--family").stdout
    assert all(name in text for name in (*FAMILIES, "mixtral", "is_causal (true)"))
