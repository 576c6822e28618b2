"""The process in which a stranger's tokenizer runs: a program of its own, with little memory.

Reads a line of JSON with the tokenizer's path, `{"open": path}`, then one a request: `{"encode": text}`,
`{"decode": [ids, ...]}`, `{"spell": ids}` or `{"chat": messages}`. Answers each with a line, `{"done": ...}`, or
`{"error": text}` and the end. Ends with its stdin.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from flywheel.process import limit_memory

_CONFIG: Final = "tokenizer_config.json"
_TEMPLATE: Final = "chat_template.jinja"
_UNFINISHED: Final = "\ufffd"
_FALLBACK: Final = re.compile("<0x([0-9A-F]{2})>")

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
            path = Path(request["open"])
            tokenizer = Fast.from_str(path.read_text(encoding="utf-8"))
            _answer(done=None)
        elif "chat" in request:
            text = _chat_text(path.parent, request["chat"])
            _answer(done=None if text is None else tokenizer.encode(text, add_special_tokens=False).ids)
        elif "encode" in request:
            _answer(done=tokenizer.encode(request["encode"]).ids)
        elif "spell" in request:
            _answer(done=[_spelled(tokenizer, token_id) for token_id in request["spell"]])
        else:
            _answer(done=[tokenizer.decode(ids) for ids in request["decode"]])


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


def _chat_text(folder: Path, messages: list[dict[str, str]]) -> str | None:
    """The messages, and the beginning of an answer, as the model's template writes them; None without a template.

    Source: huggingface/transformers, `utils/chat_template_utils.py`.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    config: dict[str, Any] = {}
    if (folder / _CONFIG).is_file():
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    template = config.get("chat_template")
    if (folder / _TEMPLATE).is_file():
        template = (folder / _TEMPLATE).read_text(encoding="utf-8")
    if isinstance(template, list):  # named ones, of which one is the default
        template = next((each["template"] for each in template if each.get("name") == "default"), None)
    if template is None:
        return None

    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **given: json.dumps(value, ensure_ascii=False, **given)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    special = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in config.items()
        if name.endswith("_token") and token is not None
    }
    return environment.from_string(template).render(messages=messages, add_generation_prompt=True, **special)


def _answer(**said: object) -> None:
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """What the library raises for a malformed file is Exception itself, and for a bug a PanicException."""
    _answer(error=" ".join(str(error).split())[:120])


if __name__ == "__main__":
    main()
