"""The command `flywheel`, and `python -m flywheel`: what signals mean before and after a command runs."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

INTERRUPTED: Final = 130
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def main() -> int:
    """Entry point; the exit code.

    A signal during the first imports, or while the interpreter ends, ends the process at once: an exception would get
    lost in either. In between `cli.interrupt` has a say. A signal that the shell has ignored stays so.
    """
    heard = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    for number in heard:
        signal.signal(number, _end)
    from flywheel.cli.interrupt import interrupt
    from flywheel.cli.main import main as run
    from flywheel.process import collect_rarely

    collect_rarely()
    try:
        for number in heard:
            signal.signal(number, interrupt)
        code = run()
    except KeyboardInterrupt:  # before the command began
        _end(signal.SIGINT, None)
    if code != INTERRUPTED:
        for number in heard:
            signal.signal(number, _end)
    return code


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, b"flywheel: interrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":  # a pool's child imports this module too
    sys.exit(main())
