"""The process in which a stranger's tokenizer runs: a program of its own, with little memory.

Reads a line of JSON with the tokenizer's path, `{"open": path}`, then one a request, `{"encode": text}` or
`{"decode": ids}`. Answers each with a line, `{"done": ...}`, or `{"error": text}` and the end. Ends with its stdin.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from flywheel.process import limit_memory

MAX_BYTES: Final = 4 * 2**30
"""Address space. The largest published tokenizers take a tenth of it."""


def main() -> None:
    """Serve until stdin ends."""
    limit_memory(MAX_BYTES)
    from tokenizers import Tokenizer as Fast

    sys.excepthook = _report
    tokenizer: Any = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if tokenizer is None:
            tokenizer = Fast.from_str(Path(request["open"]).read_text(encoding="utf-8"))
            _answer(done=None)
        elif "encode" in request:
            _answer(done=tokenizer.encode(request["encode"]).ids)
        else:
            _answer(done=tokenizer.decode(request["decode"]))


def _answer(**said: object) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What the library raises for a malformed file is Exception itself, and for a bug a PanicException."""
    _answer(error=" ".join(str(error).split())[:120])


if __name__ == "__main__":
    main()
