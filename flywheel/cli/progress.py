"""Show a running search on stderr: a live panel on a terminal, occasional lines elsewhere."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING, Final, Protocol, Self

from flywheel.cli.interrupt import SIGNALS
from flywheel.cli.text import amount, counts, duration, note, percent, us, us_of
from flywheel.ir.show import escaped
from flywheel.process import handling

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from flywheel.search.campaign import Progress
    from flywheel.search.run import Start
    from flywheel.search.spec import CampaignSpec

QUIET_S: Final = 10.0
"""Longest time in seconds between two plain lines."""
SETTLED_S: Final = 2.0
"""Seconds until a rate is given: start-up distorts an earlier one."""
DRAINING: Final = "finishing the trials under way; again to abort"
TREND_WIDTH: Final = 32
_BARS: Final = "▁▂▃▄▅▆▇█"
_REFRESH_HZ: Final = 8


class Reporter(Protocol):
    """Shows a search. It is told of the start and of each trial, and is a context manager around both."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def start(self, start: Start) -> None:
        """The campaign is known and about to run."""
        ...

    def watch(self, progress: Progress) -> None:
        """A trial has ended."""
        ...

    def drain(self) -> None:
        """The search was interrupted. Called from a signal handler."""
        ...

    def abort(self) -> None:
        """The search was interrupted again. Called from a signal handler or another thread."""
        ...


def make_reporter() -> Reporter:
    """The live panel where stderr is a terminal that can draw it, else plain lines."""
    if sys.stderr is None or not sys.stderr.isatty():
        return PlainLines()
    from rich.console import Console

    console = Console(stderr=True)
    return PlainLines() if console.is_dumb_terminal else LivePanel(console)


def seconds_left(spec: CampaignSpec, trials: int, new_trials: int, elapsed_s: float) -> float | None:
    """Seconds until the trials or the time run out, whichever comes first; None until there is a rate."""
    limits = [] if spec.time_s is None else [spec.time_s - elapsed_s]
    if new_trials:
        limits.append((spec.trials - trials) * elapsed_s / new_trials)
    return max(0.0, min(limits)) if limits else None


def trend(values: Sequence[float]) -> str:
    """The best latency so far, trial by trial, as at most TREND_WIDTH bars (lower is faster), and how it changed."""
    width = min(TREND_WIDTH, len(values))
    ends = [values[(number + 1) * len(values) // width - 1] for number in range(width)]
    low, high = min(ends), max(ends)
    steps = len(_BARS) - 1
    bars = "".join(_BARS[round((value - low) / (high - low) * steps) if high > low else 0] for value in ends)
    return bars if values[0] == values[-1] else f"{bars} {us(values[0])} to {us(values[-1])}"


class PlainLines:
    """A line at the start, at each improvement, and after QUIET_S without one."""

    def __init__(self) -> None:
        self._spec: CampaignSpec | None = None
        self._spoke = monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing."""

    def start(self, start: Start) -> None:
        """Write what is searched, and the size of the space."""
        self._spec = start.spec
        self._spoke = monotonic()
        known = f", resuming after {amount(start.known, 'trial')}" if start.known else ""
        note(
            f"{start.spec.work}: {start.dimensions} knobs, {start.configurations:.1e} configurations, "
            f"sampler {start.spec.sampler}{known}"
        )

    def watch(self, progress: Progress) -> None:
        """Write one line where there is news."""
        if not progress.improved and monotonic() - self._spoke < QUIET_S:
            return
        self._spoke = monotonic()
        assert self._spec is not None
        best = progress.best
        standing = "none feasible yet"
        if best is not None:
            found = f"{us_of(best)} {best.kind}, {percent(best.floor_fraction)} of floor"
            standing = f"best {found}, {best.title}"
        width = len(str(self._spec.trials))
        pace = f"  {progress.new_trials / progress.elapsed_s:.1f} trials/s" if progress.elapsed_s > SETTLED_S else ""
        note(f"trials {progress.trials:>{width}}/{self._spec.trials}  {standing}{pace}")

    def drain(self) -> None:
        """Write that the search will stop. A signal handler must not use buffered streams."""
        os.write(2, f"flywheel: {DRAINING}\n".encode())

    def abort(self) -> None:
        """Do nothing: the terminal needs no repair."""


class LivePanel:
    """A panel that is redrawn in place and removed when the search ends."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self._start: Start | None = None
        self._progress: Progress | None = None
        self._began = monotonic()
        self._improved: tuple[int, float] | None = None
        self._draining = False
        self._bests: list[float] = []
        self._live = Live(
            get_renderable=self._render, console=console, refresh_per_second=_REFRESH_HZ, transient=True,
            redirect_stdout=False,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def start(self, start: Start) -> None:
        """Draw the panel for the first time."""
        self._start, self._began = start, monotonic()
        self._live.start(refresh=True)

    def watch(self, progress: Progress) -> None:
        """Keep the progress for the next redraw."""
        self._progress = progress
        if progress.best is not None and progress.best.objective_us is not None:
            self._bests.append(progress.best.objective_us)
        if progress.improved:
            self._improved = progress.record.trial, monotonic()

    def drain(self) -> None:
        """Note the interrupt for the next redraw."""
        self._draining = True

    def abort(self) -> None:
        """Remove the panel; an interrupt during this would leave half of it."""
        if self._start is None:
            return
        in_main = threading.current_thread() is threading.main_thread()
        with handling(SIGNALS, lambda number, frame: None) if in_main else nullcontext():
            self._live.stop()

    def _render(self) -> RenderableType:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        start, progress = self._start, self._progress
        if start is None:
            return Text()
        trials = progress.trials if progress is not None else start.known
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(start.spec.trials, trials, width=32), f"{trials}/{start.spec.trials}", *self._pace(start)
        )
        body = Table.grid(padding=(0, 2))
        body.add_column(style="dim")
        body.add_row("best", self._best())
        if self._bests and self._live.console.encoding.startswith("utf"):
            body.add_row("trend", trend(self._bests))
        body.add_row("trials", bar)
        body.add_row("outcomes", counts(progress.outcomes) if progress is not None else "none")
        body.add_row("improved", self._last())
        if self._draining:
            body.add_row("stopping", Text(DRAINING, style="yellow"))
        title = Text(escaped(start.spec.work), style="bold")
        return Panel(body, title=title, title_align="left", subtitle=f"{start.spec.sampler}, seed {start.spec.seed}",
                     subtitle_align="right", border_style="dim", width=min(78, self._live.console.width))  # fmt: skip

    def _best(self) -> RenderableType:
        from rich.text import Text

        best = self._progress.best if self._progress is not None else None
        if best is None:
            return "none yet"
        floor = f"floor {us(best.floor_us)}, {percent(best.floor_fraction)} reached"
        return Text.assemble((us_of(best), "bold green"), f" {best.kind}; {floor}")

    def _pace(self, start: Start) -> tuple[str, str]:
        progress, elapsed_s = self._progress, monotonic() - self._began
        if progress is None or not progress.elapsed_s:
            return "", "starting"
        left_s = seconds_left(start.spec, progress.trials, progress.new_trials, elapsed_s)
        rate = f"{progress.new_trials / progress.elapsed_s:.1f}/s"
        return rate, "" if left_s is None else f"{duration(left_s)} left"

    def _last(self) -> str:
        if self._improved is None or self._progress is None:
            return "not in this run"
        trial, when = self._improved
        since = self._progress.record.trial - trial
        return f"at trial {trial}, {amount(since, 'trial')} and {duration(monotonic() - when)} ago"
