"""The command `flywheel`, and `python -m flywheel`: what signals mean before, while and after a command runs."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Entry point; the exit code.

    A signal during the imports, or while the interpreter ends, ends the process at once: an exception would get lost in
    either. In between it raises KeyboardInterrupt where a command does not say otherwise.
    """
    for number in SIGNALS:
        signal.signal(number, _end)
    from flywheel.cli.main import main as run

    for number in SIGNALS:
        signal.signal(number, _interrupt)
    code = run()
    for number in SIGNALS:
        signal.signal(number, _end)
    if code == INTERRUPTED:  # at once: the end of an interpreter waits for processes that are still starting
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)
    return code


class _Interrupted(KeyboardInterrupt):
    """A signal. Of KeyboardInterrupt itself Python remembers that it passed through `exec`, and then dies of SIGINT."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise _Interrupted


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"flywheel: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":  # a pool's child imports this module too
    sys.exit(main())
