from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

import flywheel
from flywheel.measure.latency import GUESSED, RESOLUTION, SEEN, rounded
from flywheel.store.schedule import SHIPPED

Run = Callable[..., Result]
H100, H200 = "llama3-8b-h100-bf16-c512-b1", "llama3-8b-h200-bf16-c512-b1"
SMALLER, EIGHT = "llama3.2-1b-h100-bf16-c512-b1", "llama3-8b-h200-bf16-c512-b8"


def median_us(name: str) -> float:
    measured: float = json.loads((SHIPPED / f"{name}.json").read_text(encoding="utf-8"))["measured"]["median_us"]
    return measured


def test_two_gpus_are_compared_by_the_best_that_was_measured_on_each(run: Run) -> None:
    document = json.loads(run("compare", "h100", "h200", "--model", "llama3-8b", "--json").stdout)
    assert (document["a"]["latency_us"], document["b"]["latency_us"]) == (median_us(H100), median_us(H200))
    assert document["difference"]["slower"] == pytest.approx(median_us(H200) / median_us(H100) - 1)
    assert document["difference"]["low"] < document["difference"]["slower"] < document["difference"]["high"] < 0
    assert document["changed"]["rows.o"] == [16, 32]
    assert not any(name.startswith("tiling.") for name in document["changed"])  # all are knobs
    assert run("compare", "h100", "h200", "--model", "llama3-8b").stdout.splitlines()[1].startswith("A  h100 ")


def test_a_file_a_shipped_schedule_and_a_campaign_are_sides(run: Run, searched: Path) -> None:
    assert run("schedules", H200, "--output", "best.json").exit_code == 0
    same = json.loads(run("compare", "best.json", H200, "--json").stdout)
    assert (same["difference"]["slower"], same["difference"]["sure"], same["changed"]) == (0.0, False, {})
    assert "a step of B takes as long as one of A" in run("compare", "best.json", H200).stdout
    at = ("--store", str(searched))
    document = json.loads(run("compare", "sma", "small", *at, "--json").stdout)
    assert (document["a"]["name"], document["a"]["kind"]) == ("small", "predicted")
    mixed = run("compare", "small", H200, *at)
    assert mixed.exit_code == 0
    assert "one is measured, the other predicted" in mixed.stdout


def test_the_whole_name_of_a_shipped_schedule_goes_before_the_beginning_of_a_campaigns(run: Run) -> None:
    store = Path("names.db")
    for name in (f"{H200}-predict", H100):
        flywheel.search(model="smollm2-135m", gpu="l4", measure="predict", trials=1, name=name, store=store)
    document = json.loads(run("compare", H200, H100, "--store", store, "--json").stdout)
    assert (document["a"]["latency_us"], document["b"]["model"]) == (median_us(H200), "smollm2-135m")


def test_predictions_are_compared_with_their_ranges_and_no_digits_beyond(run: Run) -> None:
    """Between GPUs by the ranges; on one GPU, whose predictions err alike, by what they can tell apart."""
    store = Path("two.db")
    for gpu in ("h100", "h200", "l4"):
        flywheel.search(model="smollm2-135m", gpu=gpu, measure="predict", trials=2, name=gpu + "s", store=store)
    at = ("--store", store)

    def compared(*names: str) -> tuple[dict[str, Any], str]:
        return json.loads(run("compare", *names, *at, "--json").stdout), run("compare", *names, *at).stdout

    document, text = compared("h200s", "l4s")
    assert document["a"]["predicted_range_us"] == list(SEEN.around(document["a"]["latency_us"]))
    assert document["b"]["predicted_range_us"] == list(GUESSED.around(document["b"]["latency_us"]))
    assert document["difference"]["sure"]
    assert f"A is        predicted, {SEEN.words(document['a']['latency_us'])}; {SEEN.why}" in text
    assert f" {rounded(document['b']['latency_us'])} " in text
    assert f"{document['b']['latency_us']:,.1f}" not in text
    assert "by predictions; that is more than their errors may make" in text
    near, text = compared("h100s", "h200s")
    assert near["difference"]["low"] < 0.0 < near["difference"]["high"]
    assert "by predictions; that is no more than their errors may make" in text
    same, _ = compared("h100s", "h100s")
    assert (same["difference"]["low"], same["difference"]["high"]) == (-RESOLUTION, RESOLUTION)
    assert run("compare", "h200s", "l4s", *at, "--picture", "both.svg").exit_code == 0
    assert f"{rounded(document['b']['latency_us'])} us" in Path("both.svg").read_text(encoding="utf-8")


def test_a_slower_second_is_code_3_beyond_the_threshold_only(run: Run) -> None:
    slower = median_us(H100) / median_us(H200) - 1
    over = run("compare", H200, H100, "--fail-if-slower", f"{slower * 100 - 1:.0f}%", "--json")
    assert (over.exit_code, json.loads(over.stdout)["failed"]) == (3, True)
    assert "slower than A" in over.stderr
    assert run("compare", H200, H100, "--fail-if-slower", f"{slower * 100 + 1:.0f}").exit_code == 0
    assert run("compare", H100, H200, "--fail-if-slower", "0%").exit_code == 0


def test_the_picture_has_both_bars(run: Run) -> None:
    assert run("compare", "h100", "h200", "--model", "llama3-8b", "--picture", "both.svg").exit_code == 0
    drawing = Path("both.svg").read_text(encoding="utf-8")
    assert drawing.count('class="measured"') == 2
    assert f"{median_us(H100):,.1f} us" in drawing


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nothing", H200), "'nothing' is no file, no GPU, no campaign"),
        (("h100", "h200"), "--model says of which model"),
        (("l4", "h200", "--model", "llama3-8b"), "nothing was measured of llama3-8b on l4, bf16, context 512"),
        (("h100", "h200", "--model", "llama3-8b", "--context", "4096"), "of llama3-8b on h100, bf16, context 4096"),
        ((H100, H200, "--context", "512"), "--context goes with GPUs"),
        (("best.json", "best.json", "--context", "99999"), "--context goes with GPUs"),
        (("best.json", H100, "--model", "nonsense"), "--model goes with GPUs"),
        ((SMALLER, H100, "--fail-if-slower", "2%"), "one work; these differ in model"),
        ((H100, EIGHT, "--fail-if-slower", "2%"), "one work; these differ in batch"),
        (("empty.json", H100), "empty.json: JSON: Expecting value"),
        ((H100, H200, "--fail-if-slower", "two"), "is not a percentage"),
        (("small", H200, "--fail-if-slower", "2%"), "not one of each"),
        ((H100, H200, "-o", "a.svg", "--picture", "b.svg"), "-o and --picture are one option; give it once"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_code_2(
    words: tuple[str, ...], expected: str, run: Run, searched: Path
) -> None:
    Path("empty.json").touch()
    Path("best.json").write_bytes((SHIPPED / f"{H200}.json").read_bytes())
    result = run("compare", *words, "--store", str(searched))
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert expected in result.stderr


def test_different_works_are_compared_with_a_word(run: Run) -> None:
    for other, named in ((SMALLER, ["model"]), (EIGHT, ["batch"])):
        result = run("compare", H100, other)
        assert f"not the same: they differ in {', '.join(named)}" in result.stdout
        assert json.loads(run("compare", H100, other, "--json").stdout)["different"] == named
    assert "not the same" not in run("compare", H100, H200).stdout


def test_a_file_that_is_named_as_a_gpu_does_not_hide_it(run: Run) -> None:
    Path("h100").touch()
    assert run("compare", "h100", "h200", "--model", "llama3-8b").exit_code == 0
    assert run("compare", "h100", H200).stderr == "flywheel: h100: JSON: Expecting value: line 1 column 1 (char 0)\n"


@pytest.mark.parametrize(
    ("changed", "fact"),
    [
        ({"measured": None}, "has no latency to compare"),
        ({"measured": {}}, "measured.p10_us is None, no time in us"),
        ({"measured": {"p10_us": 1, "median_us": "fast", "p90_us": 3}}, "measured.median_us is 'fast', no time in us"),
        ({"measured": {"p10_us": 1, "median_us": -5, "p90_us": 3}}, "measured.median_us is -5, no time in us"),
        ({"measured": {"p10_us": 1, "median_us": 1e308, "p90_us": 3}}, "measured.median_us is 1e+308, no time in us"),
        ({"measured": {"p10_us": 5, "median_us": 4, "p90_us": 6}}, "not in ascending order"),
        ({"measured": None, "predicted": {"latency_us": True}}, "predicted.latency_us is True, no time in us"),
        ({"batch": 0}, "batch is 0, less than 1"),
        ({"batch": 99}, "batch 99 is not in 1..8"),
        ({"context": -1}, "context is -1, less than 1"),
        ({"gpu": "zz"}, "GPU 'zz' is not one of"),
        ({"gpu": "999999xh200"}, "GPU '999999xh200'"),
        ({"dtype": "f8"}, "dtype 'f8' is not one of"),
        ({"weights": "zz"}, "zz"),
    ],
)
def test_a_strangers_schedule_with_a_number_or_a_name_that_none_has_is_a_bad_file(
    changed: dict[str, object], fact: str, run: Run
) -> None:
    document = json.loads((SHIPPED / f"{H200}.json").read_text(encoding="utf-8"))
    Path("odd.json").write_text(json.dumps({**document, **changed}), encoding="utf-8")
    result = run("compare", "odd.json", H200)
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1)
    assert result.stderr.startswith("flywheel: schedule odd.json: ") and fact in result.stderr
