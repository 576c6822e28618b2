from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from flywheel.store.schedule import SHIPPED, load_schedule, shipped_schedules

Run = Callable[..., Result]
NAME = "llama3-8b-h100-bf16-c512-b1"


def test_every_shipped_schedule_is_listed_with_its_latency_and_tokens_a_second(run: Run) -> None:
    listed = json.loads(run("schedules", "--json").stdout)["schedules"]
    assert [each["name"] for each in listed] == sorted(path.stem for path in SHIPPED.glob("*.json"))
    eight = next(each for each in listed if each["batch"] == 8)
    assert eight["tokens_per_s"] == pytest.approx(8e6 / eight["median_us"])
    assert len(run("schedules").stdout.splitlines()) == len(listed) + 1


def test_a_model_and_a_gpu_narrow_the_list(run: Run) -> None:
    listed = json.loads(run("schedules", "--model", "Llama3-8b", "--gpu", "2xh200", "--json").stdout)["schedules"]
    assert {(each["model"], each["gpu"]) for each in listed} == {("llama3-8b", "2xh200")}
    none = run("schedules", "--gpu", "l4")
    assert (none.exit_code, none.stdout.partition(";")[0]) == (0, "no schedule of gpu l4 comes with flywheel")


def test_one_is_written_as_the_file_that_ships(run: Run) -> None:
    result = run("schedules", NAME, "--output", "best.json")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "wrote best.json\n")
    assert Path("best.json").read_bytes() == (SHIPPED / f"{NAME}.json").read_bytes()
    shipped = next(each for each in shipped_schedules() if each.stem == NAME)
    assert load_schedule("best.json") == shipped.schedule
    assert run("schedules", NAME, "-o", "-").stdout == Path("best.json").read_text(encoding="utf-8")


def test_one_is_shown_by_a_name_that_begins_only_one(run: Run) -> None:
    shown = run("schedules", "llama3-8b-h100-bf16-c").stdout
    assert shown.startswith("llama3-8b on h100, bf16, context 512: measured 5,0")
    assert "NVIDIA H100 80GB HBM3" in shown


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("lama3-8b-h100-bf16-c512-b1",), f"did you mean {NAME}"),
        (("llama3-8b-h",), "11 shipped schedules begin with it"),
        (("--output", "all.json"), "give its NAME"),
        (("--gpu", "h1000"), "GPU 'h1000': did you mean h100 or h200?"),
        (("--model", "./nope"), "nope"),
        ((NAME, "--gpu", "h200"), "--gpu narrows the list"),
    ],
)
def test_what_does_not_name_one_schedule_is_a_usage_error(words: tuple[str, ...], expected: str, run: Run) -> None:
    result = run("schedules", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert expected in result.stderr
    assert not Path("all.json").exists()
