from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from flywheel.measure.comparison import Comparison, Entry
from flywheel.measure.latency import MeasuredLatency
from flywheel.measure.outcome import Incorrect, Measured
from flywheel.measure.verdict import judge
from flywheel.report.bars import OURS_COLOUR, RIVAL_COLOUR, bars
from flywheel.report.svg import standalone
from flywheel.rivals.lineup import RANK_RIVALS, RIVALS, Rival

PASSED = judge(error=0.01, where="logits", positions=(511,), dtype="BF16")
WRONG = judge(error=1.0, where="logits", positions=(511,), dtype="BF16")
WIDEST_CHARACTER = 6.7
"""The mean width, in px, of characters of the longest names, as a browser draws them."""


def entry(name: str, median_us: float) -> Entry:
    latency = MeasuredLatency(median_us, median_us * 0.99, median_us * 1.02, 20, 3, "flushed", median_us)
    return Entry(name, "some way", Measured(latency, PASSED), ((median_us,) * 20,), (median_us,))


def comparison(context: int, *entries: Entry) -> Comparison:
    return Comparison(context, 2_000_000_000, 400.0, 450.0, entries)


def test_bars_are_as_long_as_the_times_and_ours_has_a_colour_of_its_own() -> None:
    drawing = bars("m on a GPU", [comparison(512, entry("flywheel", 500.0), entry("cublas", 1000.0))])
    ElementTree.fromstring(standalone(drawing))
    found = re.findall(r'width="([\d.]+)" height="18" fill="(#\w+)"', drawing)
    assert [colour for _, colour in found] == [OURS_COLOUR, RIVAL_COLOUR]
    ours, rival = (float(width) for width, _ in found)
    assert rival == pytest.approx(2 * ours, abs=0.02)
    assert "500 us, 90.0% of the read ceiling" in drawing
    assert "weights alone: 450.0 us" in drawing
    assert "weights alone: 400.0 us" in drawing


def test_every_context_has_its_group() -> None:
    drawing = bars("m", [comparison(context, entry("flywheel", float(context))) for context in (512, 4096)])
    assert drawing.index("context 512") < drawing.index("context 4,096")
    assert drawing.count('height="18"') == 2


def test_a_rival_that_multiplies_dequantised_weights_says_so() -> None:
    held = [comparison(512, *(entry(name, 500.0) for name in ("flywheel", "cublas", "tinygemm")))]
    drawing = bars("m, int4 weights, bf16", held, "bf16")
    assert "PyTorch, CUDA graph (bf16)" in drawing and "(bf16): with the dequantised weights" in drawing
    assert "tinygemm int4, CUDA graph<" in drawing and "flywheel<" in drawing
    assert "dequantised" not in bars("m, bf16", held)


def test_who_has_no_time_has_a_line_and_no_bar() -> None:
    wrong = Entry("<compile>", "compiled", Incorrect(WRONG, "wrong"))
    drawing = bars("m", [comparison(512, entry("flywheel", 500.0), wrong)])
    ElementTree.fromstring(drawing)
    assert "incorrect: not timed" in drawing
    assert "&lt;compile&gt;" in drawing
    assert drawing.count('height="18"') == 1


def test_a_picture_without_any_time_still_shows_the_floors() -> None:
    wrong = Entry("flywheel", "a program", Incorrect(WRONG, "wrong"))
    drawing = bars("m", [comparison(512, wrong)])
    ElementTree.fromstring(drawing)
    assert "weights alone: 450.0 us" in drawing


@pytest.mark.parametrize("rival", [*RIVALS.values(), *RANK_RIVALS.values()], ids=lambda rival: rival.name)
def test_the_names_of_all_rivals_fit_beside_the_bars(rival: Rival) -> None:
    drawing = bars("m", [comparison(512, entry(rival.name, 500.0))])
    (end,) = re.findall(rf'<text [^>]*x="([0-9.]+)"[^>]*>{re.escape(rival.label)}<', drawing)
    assert len(rival.label) * WIDEST_CHARACTER <= float(end)
