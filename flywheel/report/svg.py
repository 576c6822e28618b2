"""SVG by hand: elements as text, in which everything is escaped, and axes with round ticks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, floor, isfinite, log10
from typing import Final

from flywheel.ir.show import markup as words

STYLE: Final = (
    "svg{font:12px system-ui,sans-serif;fill:#1d2733}"
    ".axis{stroke:#8a96a3;stroke-width:1;fill:none}.grid{stroke:#e6eaee;stroke-width:1;fill:none}.ink{stroke:#1d2733}"
    ".paper{fill:#fff}.rim{stroke:#fff}.halo{paint-order:stroke;stroke:#fff;stroke-width:3}"
    ".faint{fill:#5b6875}.end{text-anchor:end}.middle{text-anchor:middle}"
    ".predicted{color:#4269a5}.measured{color:#d9631e}.floor{color:#b3123c}.failed{color:#8a96a3}.final{color:#7a2f0a}"
    ".bar{color:#3b76a8}.f1{color:#d8dee6}.f2{color:#a9c3d9}.f3{color:#6f9fc4}.f4{color:#3b76a8}.f5{color:#1d4f84}"
    ".state{stroke:currentColor;fill:none}.swatch{fill:currentColor;stroke:#8a96a3;stroke-width:.5}"
    ".runs{stroke:#8a96a3;stroke-width:5;fill:none}"
    ".multiply{color:#0f6b5f}.stage{color:#63b5a5}.other{color:#a79ad2}.starve{color:#e2562f}.wait{color:#dbe1e7}"
    ".idle{color:#fff}"
    "@media(prefers-color-scheme:dark){svg{fill:#dde3ea}.axis{stroke:#6b7784}.grid{stroke:#2a323b}.ink{stroke:#dde3ea}"
    ".paper{fill:#12171d}.rim,.halo{stroke:#12171d}.faint{fill:#9aa7b4}"
    ".predicted{color:#86aee8}.measured{color:#f08a4b}.floor{color:#f2698a}.final{color:#f9c09b}"
    ".bar{color:#5b9bd1}.f1{color:#27313b}.f2{color:#34506b}.f3{color:#427aa8}.f4{color:#6aabdd}.f5{color:#b5dbf9}"
    ".runs{stroke:#6b7784}.multiply{color:#4fd0b4}.stage{color:#2d7d6f}.other{color:#7c70b8}.starve{color:#e8663f}"
    ".wait{color:#2b343e}.idle{color:#12171d}}"
)
"""The style of every picture, in light and in dark mode. A page contains it once.

Each kind of row has a class whose `color` its marks use. Predicted and measured never share a colour.
"""


def element(name: str, /, *children: str, **attributes: float | str | None) -> str:
    """The text of `<name ...>children</name>`. Attributes are escaped, and left out if None. Children are markup
    already.

    `class_` stands for class, and other underscores for hyphens.
    """
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{words(_number(value) if not isinstance(value, str) else value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{said}>{''.join(children)}</{name}>" if children else f"<{name}{said}/>"


def label(x: float, y: float, text: str, class_: str | None = None, **attributes: float | str | None) -> str:
    """Text at a place."""
    return element("text", words(text), x=x, y=y, class_=class_, **attributes)


def tip(text: str) -> str:
    """A tooltip. It must be the first child of its element."""
    return element("title", words(text))


def picture(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole picture, for a page or for `standalone`."""
    return element(
        "svg", element("title", words(title)), *parts, xmlns="http://www.w3.org/2000/svg", role="img",
        viewBox=f"0 0 {_number(width)} {_number(height)}", width=width, height=height,
    )  # fmt: skip


def standalone(drawing: str) -> str:
    """A picture as a file, with its background."""
    head, _, rest = drawing.partition(">")
    back = element("rect", width="100%", height="100%", class_="paper")
    return f"{head}>{element('style', STYLE)}{back}{rest}\n"


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """The `d` of a path through the points."""
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def dots(points: Iterable[tuple[float, float]]) -> str:
    """The `d` of a path that draws a dot at each point when it is stroked with round caps."""
    return "".join(f"M{_number(x)} {_number(y)}h0" for x, y in points)


def strokes(lines: Iterable[tuple[float, float, float]]) -> str:
    """The `d` of a path of level lines, each x, y, length."""
    return "".join(f"M{_number(x)} {_number(y)}h{_number(length)}" for x, y, length in lines)


@dataclass(frozen=True, slots=True)
class PlotAxis:
    """Maps low..high to start..end pixels, linearly, or logarithmically with `log`; low < high, and 0 < low with
    `log`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        if self.log:
            share = log10(value / self.low) / log10(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        """About `most` round values within the axis, 1, 2 or 5 times a power of ten apart."""
        if self.log and self.high / self.low > 20:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            rounds = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [value for value in rounds if self.low <= value <= self.high]
        rough = (self.high - self.low) / most
        power = 10.0 ** floor(log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        first, last = ceil(self.low / step), floor(self.high / step)
        return [number * step for number in range(first, last + 1)]


def short(value: float) -> str:
    """A tick's number, with no more digits than it needs."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,.6g}"


def _number(value: float) -> str:
    if not isfinite(value):
        raise ValueError(f"{value} is not finite, so it has no place in a picture")
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
