from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flywheel.report.svg import PlotAxis, dots, element, label, picture, short, standalone, tip

numbers = st.floats(-1e6, 1e6)


@given(st.text())
def test_any_text_is_well_formed_xml(text: str) -> None:
    drawing = standalone(picture(10, 10, text, [label(0, 0, text), element("g", tip(text), id=text)]))
    assert ElementTree.fromstring(drawing).tag.endswith("svg")


def test_strangers_text_is_escaped() -> None:
    said = label(0, 0, '<script>alert("x")</script>\x1b[2J')
    assert "<script" not in said
    assert "\x1b" not in said
    ElementTree.fromstring(said)


@given(numbers, st.floats(1e-3, 1e6), st.floats(0, 1))
def test_an_axis_maps_its_ends_to_its_pixels_and_keeps_order(low: float, width: float, share: float) -> None:
    axis = PlotAxis(low, low + width, 10, 110)
    assert axis(low) == pytest.approx(10)
    assert axis(low + width) == pytest.approx(110)
    assert 10 - 1e-6 <= axis(low + width * share) <= 110 + 1e-6


@given(st.floats(1e-3, 1e6), st.floats(1.001, 1e4), st.booleans())
def test_ticks_lie_on_the_axis_and_are_not_many(low: float, ratio: float, log: bool) -> None:
    axis = PlotAxis(low, low * ratio, 0, 100, log=log)
    ticks = axis.ticks()
    assert len(ticks) <= 20
    assert all(low * (1 - 1e-9) <= tick <= low * ratio * (1 + 1e-9) for tick in ticks)
    assert ticks == sorted(ticks)


def test_a_place_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="nan"):
        dots([(0.0, float("nan"))])


def test_tick_numbers_have_no_needless_digits() -> None:
    assert [short(value) for value in (1000.0, 0.5, 12345.0)] == ["1,000", "0.5", "12,345"]
