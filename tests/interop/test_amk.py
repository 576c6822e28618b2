from __future__ import annotations

import json
from typing import Any

import pytest

from flywheel.errors import IrFormatError
from flywheel.interop.amk import read_results, schedule_id
from flywheel.ir.config import ScheduleConfig, config_to_dict

# The two headers of AutoMegaKernel: what its log.py writes, and what its program.md documents.
WRITTEN = (
    "experiment tag loop model gpu regime correctness latency_us pct_of_roofline schedule_id kernel_id description"
)
DOCUMENTED = (
    "experiment tag loop model gpu regime kept correctness latency_us pct_of_roofline schedule_or_kernel_id description"
)
DEEP = config_to_dict(ScheduleConfig(pipelining_depth=4))
SHALLOW = config_to_dict(ScheduleConfig(pipelining_depth=1))
FIELDS = {"experiment": "1", "tag": "kept", "loop": "schedule", "model": "toy(1L)", "gpu": "rtx5090",
          "regime": "single-stream", "correctness": "PASS", "kept": "keep"}  # fmt: skip


def table(header: str, *rows: dict[str, Any], end: str = "\n") -> str:
    names = header.split()
    lines = ["\t".join(names)]
    lines += ["\t".join(str({**FIELDS, **row}.get(name, "")) for name in names) for row in rows]
    return end.join(lines) + end


def depths(text: str, corpus: str = "") -> list[int]:
    return [config.pipelining_depth for config in read_results(text, corpus).configs]


def corpus_of(*schedules: dict[str, Any]) -> str:
    return "".join(json.dumps({"model": "toy(1L)", "schedule": schedule}) + "\n" for schedule in schedules)


def test_a_schedule_column_holds_the_config_itself() -> None:
    header = f"{WRITTEN} schedule"
    rows = ({"latency_us": 30.0, "schedule": json.dumps(SHALLOW)}, {"latency_us": 20.5, "schedule": json.dumps(DEEP)})
    assert depths(table(header, *rows)) == [4, 1]


@pytest.mark.parametrize(("header", "column"), [(WRITTEN, "schedule_id"), (DOCUMENTED, "schedule_or_kernel_id")])
def test_ids_are_looked_up_in_the_corpus(header: str, column: str) -> None:
    knobs = {**DEEP, "kernel_knobs": {"cpasync": 1}}
    text = table(header, {"latency_us": 9, column: schedule_id(knobs)}, {"latency_us": 8, column: "sch_0000000000"})
    found = read_results(text, corpus_of(SHALLOW, knobs))
    assert [config.pipelining_depth for config in found.configs] == [4]
    assert sum(found.skipped.values()) == 1
    assert read_results(text).configs == ()


def test_an_id_is_of_the_schedule_as_its_json_sorts_it() -> None:
    # From its code: "sch_" and ten digits of the SHA-1 of json.dumps(schedule, sort_keys=True).
    assert schedule_id({"b": 1, "a": {"d": 2, "c": 3}}) == schedule_id({"a": {"c": 3, "d": 2}, "b": 1})
    assert schedule_id({}) == "sch_bf21a9e8fb"


def test_only_schedules_that_passed_are_priors() -> None:
    header = f"{WRITTEN} schedule"
    rows = [
        {"correctness": "FAIL"}, {"correctness": "REJECTED"}, {"loop": "instruction"}, {"loop": "1"},
        {"loop": "2", "latency_us": 5},
    ]  # fmt: skip
    found = read_results(table(header, *({"schedule": json.dumps(DEEP), **row} for row in rows)))
    assert len(found.configs) == 1
    assert sorted(found.skipped.values()) == [2, 2]


def test_the_best_of_each_work_comes_before_the_second_of_any() -> None:
    header = f"{WRITTEN} schedule"
    speeds = [("a", 10, 1), ("a", 20, 2), ("b", 1000, 3), ("b", 2000, 4), ("a", "", 5)]
    rows = [
        {"model": model, "latency_us": latency_us,
         "schedule": json.dumps(config_to_dict(ScheduleConfig(pipelining_depth=depth)))}
        for model, latency_us, depth in speeds
    ]  # fmt: skip
    assert depths(table(header, *rows)) == [1, 3, 2, 4, 5]


def test_a_config_is_proposed_once() -> None:
    row = {"schedule": json.dumps(DEEP), "latency_us": 3}
    assert depths(table(f"{WRITTEN} schedule", row, {**row, "latency_us": 2})) == [4]


def test_columns_that_say_nothing_are_named_and_ignored() -> None:
    found = read_results(table(f"{WRITTEN} schedule mood", {"schedule": json.dumps(DEEP), "mood": "good"}))
    assert found.ignored == ("experiment", "tag", "pct_of_roofline", "kernel_id", "description", "mood")
    assert len(found.configs) == 1


def test_windows_line_ends_and_blank_lines_do_not_matter() -> None:
    text = table(f"{WRITTEN} schedule", {"schedule": json.dumps(DEEP)}, end="\r\n")
    assert depths(text + "\r\n") == [4]


def test_a_line_with_other_cells_is_skipped() -> None:
    found = read_results(table(f"{WRITTEN} schedule", {"schedule": json.dumps(DEEP)}) + "1\tkept\n")
    assert len(found.configs) == 1
    assert found.skipped == {"cells that do not match the columns": 1}


@pytest.mark.parametrize(
    ("text", "corpus", "message"),
    [
        ("a\tb\n", "", "line 1: no column 'correctness'"),
        (table(f"{WRITTEN} schedule", {"schedule": "{"}), "", "line 2: schedule: JSON"),
        (table(f"{WRITTEN} schedule", {"schedule": '{"pipelining_depth": "two"}'}), "", "line 2: schedule: config"),
        (table(WRITTEN), "{}\n", "corpus line 1: no object 'schedule'"),
        (table(WRITTEN), "\n{\n", "corpus line 2: JSON"),
    ],
)
def test_what_is_no_table_or_no_schedule_is_named_by_its_line(text: str, corpus: str, message: str) -> None:
    with pytest.raises(IrFormatError, match=message):
        read_results(text, corpus)
