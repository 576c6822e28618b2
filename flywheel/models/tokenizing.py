"""The process in which a stranger's tokenizer runs: a program of its own, with little memory and time.

Reads a line of JSON with the path of a checkpoint's directory, `{"open": path}`, then one a request:
`{"encode": text}`, `{"decode": [ids, ...]}`, `{"spell": ids}` or `{"chat": messages, "variables": object}`. Answers
each with a line: `{"done": ...}`; `{"refused": text}` for a request at fault; `{"file": name, "why": text}` for a file
at fault; or `{"error": text}` for what the library raises, and the end. Ends with its stdin, and with its parent.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from flywheel.errors import RequestError, TokenizerError
from flywheel.lifetime import die_with_parent
from flywheel.process import leave_stdout, limit_memory, limit_work

_UNFINISHED: Final = "\ufffd"
_FALLBACK: Final = re.compile("<0x([0-9A-F]{2})>")

MAX_BYTES: Final = 4 * 2**30
"""Address space. The largest published tokenizers take a tenth of it."""
MAX_SECONDS: Final = 40
"""Processor time of a request, if whoever asked does not end it before."""


def main() -> None:
    """Serve until stdin ends. The argument is the number of the process that started this one."""
    die_with_parent(int(sys.argv[1]))
    limit_memory(MAX_BYTES)
    limit_work(MAX_SECONDS)
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    leave_stdout()  # the library prints there
    sys.excepthook = partial(_report, answers)
    from flywheel.models.tokenizer_loading import load

    loaded: Any = None
    for line in sys.stdin.buffer:
        limit_work(MAX_SECONDS)
        request = json.loads(line)
        try:
            if loaded is None:
                folder = Path(request["open"])
                loaded = load(folder)
                _answer(answers, done=about(loaded))
            else:
                _answer(answers, done=done(loaded, request))
        except RequestError as error:
            _answer(answers, refused=str(error))
        except TokenizerError as error:
            _answer(answers, file=str(error.file.relative_to(folder)), why=error.why)


def about(loaded: Any) -> dict[str, Any]:
    """What the other side has to know of a tokenizer. `template` is the name of the file that has its template."""
    file = next(iter(loaded.templates.named.values()), (None, ""))[0]
    return {"end_id": loaded.end_id, "anew": loaded.anew, "template": file}


def done(loaded: Any, request: Mapping[str, Any]) -> Any:
    """What a request asks of a tokenizer. Raises RequestError, TokenizerError, and what the library raises."""
    if "chat" in request:
        from flywheel.models.templating import render

        text = render(loaded.templates, request["chat"], loaded.special, request.get("variables", {}))
        return None if text is None else _encoded(loaded, "messages", text, special=False)
    if "encode" in request:
        return _encoded(loaded, "prompt", request["encode"], special=True)
    if "spell" in request:
        return [_spelled(loaded.fast, token_id) for token_id in request["spell"]]
    return [loaded.fast.decode(ids) for ids in request["decode"]]


def _encoded(loaded: Any, what: str, text: str, special: bool) -> list[int]:
    """Token ids of a text. Raises RequestError for one that is no Unicode text."""
    lone = next((letter for letter in text if "\ud800" <= letter <= "\udfff"), None)
    if lone is not None:
        raise RequestError(f"{what}: the text has half a character, U+{ord(lone):04X} (a lone surrogate)")
    ids: list[int] = loaded.fast.encode(text, add_special_tokens=special).ids
    return ids


def _spelled(tokenizer: Any, token_id: int) -> tuple[str, list[int] | None]:
    """A token as text within a text, and its bytes; None where the library does not tell them.

    Source: huggingface/tokenizers, `pre_tokenizers/byte_level.rs` (letters of bytes), `decoders/byte_fallback.rs`.
    """
    alone, twice = (tokenizer.decode([token_id] * times, skip_special_tokens=False) for times in (1, 2))
    text = twice[len(alone) :]  # at a text's beginning, a decoder may leave out a space
    if _UNFINISHED not in text:
        return text, list(text.encode("utf-8", "replace"))
    letters = tokenizer.id_to_token(token_id) or ""
    fallback = _FALLBACK.fullmatch(letters)
    if fallback:
        return text, [int(fallback[1], 16)]
    known = _letters()
    return text, [known[letter] for letter in letters] if all(letter in known for letter in letters) else None


@cache
def _letters() -> dict[str, int]:
    """The letter with which a tokenizer of bytes writes each byte."""
    printed = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _answer(answers: IO[str], **said: object) -> None:
    answers.write(json.dumps(said) + "\n")
    answers.flush()


def _report(answers: IO[str], kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What the library raises for a malformed file is Exception itself, and for a bug a PanicException."""
    _answer(answers, error=" ".join(str(error).split())[:120] or kind.__name__)


if __name__ == "__main__":
    main()
