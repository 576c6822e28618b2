from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from click.testing import Result

from flywheel.ir import load_program
from flywheel.ir.validate import weight_bytes
from flywheel.plan import program_id
from flywheel.report.layer import operation

Run = Callable[..., Result]


def test_the_summary_counts_what_is_in_the_program(run: Run, program: Path) -> None:
    loaded = load_program(program)
    facts = json.loads(run("inspect", str(program), "--json").stdout)
    assert facts["program_id"] == program_id(loaded)
    assert facts["tasks"] == len(loaded.tasks) == sum(row["tasks"] for row in facts["operations"])
    assert facts["weight_bytes"] == weight_bytes(loaded) == facts["buffers"]["WEIGHT"]["bytes"]
    assert facts["load"]["sms"] == facts["load"]["sms_of_target"] == 58
    assert 0 < facts["load"]["balance"] <= 1
    assert facts["depth"] > 10
    assert facts["config"]["pipelining_depth"] == facts["variant"]["prefetch_depth"]


def test_the_text_has_units_and_sections(run: Run, program: Path) -> None:
    text = run("inspect", str(program)).stdout
    for word in ("sm_89", "KiB ring", "KV_CACHE", "MB", "fusion", "operations"):
        assert word in text


def test_an_invalid_program_is_described_without_what_it_lacks(run: Run) -> None:
    empty = {"ir_version": "0.2.0", "buffers": [], "counters": [], "tasks": []}
    dangling = {"id": 0, "op": "COPY", "inputs": [9], "outputs": [8], "out_counter": 0}
    result = run("inspect", "-", "--json", stdin=json.dumps({**empty, "tasks": [dangling]}))
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["valid"] is False
    assert (facts["program_id"], facts["load"], facts["predicted_us"]) == (None, None, None)
    assert run("inspect", "-", stdin=json.dumps(empty)).exit_code == 0


def test_an_operation_is_a_label_without_its_layer() -> None:
    names = {"L3.q_proj": "q_proj", "lm_head": "lm_head", "Layer.x": "Layer.x", "L.x": "L.x"}
    assert {label: operation(label) for label in names} == names


def test_strings_of_a_file_cannot_steer_the_terminal(run: Run, program: Path) -> None:
    document = json.loads(program.read_text(encoding="utf-8"))
    document["meta"]["odd"] = "a\x1b[2Jb\nc\ud800d"
    result = run("inspect", "-", stdin=json.dumps(document))
    assert result.exit_code == 0
    assert "odd a\\x1b[2Jb\\nc\\ud800d" in result.stdout
    assert "\x1b[2J" not in result.stdout
