"""The cost model against what an H200 was measured to do: a slice of the campaigns in results/gpu/calibration.tsv."""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from flywheel.cost_model import MACHINES, predict
from flywheel.cost_model.calibrate import score
from flywheel.errors import ConfigError
from flywheel.ir import ScheduleConfig, config_from_dict
from flywheel.lowering.lower import lower
from flywheel.plan import program_id
from flywheel.search.knowledge.calibrating import Config, split
from flywheel.search.workload import make_workload

RECORDED = Path(__file__).parents[2] / "results" / "gpu" / "calibration.tsv"


def held_back(model: str, weights: str) -> list[Config]:
    """The random schedules to which the built-in constants were not fitted, by latency."""
    with RECORDED.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    rows = [row for row in rows if (row["model"], row["weights"]) == (model, weights)]
    drawn = {row["config_id"] for row in rows if row["sampler"] == "random"}
    rows = [row for row in rows if row["source"] in ("search", "seed")]
    configs = [Config(row["config"], row["config_id"], row["program_id"], float(row["latency_us"])) for row in rows]
    kept = [config for config in split(configs, 0.6)[1] if config.config_id in drawn]
    return sorted(kept, key=lambda config: config.latency_us)


def without_pages(config: ScheduleConfig) -> ScheduleConfig:
    """What a GPU is given for a config of when activations lay in pages: the same if each had its own, and hand-offs by
    counters if they shared them."""
    shared = config.page_allocation == "graph_color"
    tiling = {name: own for name, own in config.tiling.items() if not shared or name != "hand_off"}
    return replace(config, tiling=tiling, page_allocation="none")


@pytest.mark.parametrize("weights", ["bf16", "fp8", "int4"])
@pytest.mark.parametrize("model", ["llama3.2-1b", "llama3-8b"])
def test_schedules_that_were_held_back_are_ranked_and_predicted(model: str, weights: str) -> None:
    work = make_workload(model, "h200", "bf16", 512, weights=weights)
    configs = held_back(model, weights)
    assert len(configs) > 40
    predicted, measured = [], []
    for config in configs if weights == "int4" else configs[::2]:
        with suppress(ConfigError):  # says what no schedule can say any more
            asked = config_from_dict(json.loads(config.config))
            today = without_pages(asked)
            program = lower(work.graph, today, work.target)
            if today == asked and program_id(program) != config.program_id:
                continue
            predicted.append(predict(program, MACHINES["h200"]).latency_us)
            measured.append(config.latency_us)
    assert len(measured) >= 10, "most recorded configs are lowered otherwise today than when they were measured"
    found = score(predicted, measured)
    assert found.spearman is not None and found.spearman >= (0.89 if weights == "int4" else 0.9)
    assert found.median_error <= 0.08
