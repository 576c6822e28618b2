"""Text to token ids and back, by the files beside a checkpoint's weights.

The files may come from a stranger. Whatever they hold, the answer is the requested one, a TokenizerError that names the
file, or a RequestError that says what is wrong with the request. Source: huggingface/tokenizers.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import IO, Any, Final, Self

from flywheel.children import start_child
from flywheel.errors import RequestError, TokenizerError, UsageError
from flywheel.installing import install_line
from flywheel.models.tokenizer_files import TOKENIZER
from flywheel.process import child_environment

_READ_BYTES: Final = 2**16
"""Most bytes that a pipe holds."""
LIMIT_S: Final = 30.0
"""Longest that reading a tokenizer, encoding a prompt or decoding a text may take."""


class Tokenizer:
    """The tokenizer of a checkpoint's directory. It runs in a process of its own until `close`, since a file can make
    the library panic, take all memory or match a pattern for hours.

    Raises UsageError where the directory has none, and TokenizerError where it has none that can be read. Each method
    raises TokenizerError where the library fails, dies or has no answer within LIMIT_S; the next call starts another
    process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not has_tokenizer(folder):
            raise UsageError(f"{str(folder)!r} has no {TOKENIZER}, which a text prompt needs; give token ids instead")
        self._process: subprocess.Popen[bytes] | None = None
        self._template: str | None = None
        found = self._begin()
        self._template = found["template"]
        self.end_id: Final[int | None] = found["end_id"]
        """The id of its end-of-text token; None where it has none."""
        self.splits_anew: Final[bool] = found["anew"]
        """Whether it splits texts otherwise than tokenizer.json says."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _begin(self) -> Any:
        """Start a process and let it read the files. Returns what it says of them."""
        words = [sys.executable, "-P", "-m", "flywheel.models.tokenizing", str(os.getpid())]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, process_group=0,
                bufsize=0, env=child_environment(TOKENIZERS_PARALLELISM="false"),
            )  # fmt: skip

        try:
            self._process = start_child(start)
        except OSError as error:
            raise self._failure({}, f"its process cannot be started: {error.strerror or error}") from None
        try:
            return self._tell({"open": str(self._folder)})
        except TokenizerError:
            self.close()
            raise

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the model expects around it. Raises RequestError for half
        a character."""
        ids: list[int] = self._ask({"encode": text})
        return ids

    def chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> list[int]:
        """Token ids of a conversation up to the beginning of the next answer, by the model's chat template.

        Messages have a `role` and a `content`, a text or a list of parts `{"type": "text", "text": ...}`. `variables`
        are values of JSON for further variables of the template, by name, such as `enable_thinking`. Raises UsageError
        also where there is no template, and RequestError where the template refuses the conversation or does not read a
        variable.
        """
        if not _has_jinja():
            raise UsageError(f"a chat needs jinja2 3.1.6 or newer: {install_line('hf')}")
        ids: list[int] | None = self._ask(
            {"chat": [dict(message) for message in messages], "variables": dict(variables or {})}
        )
        if ids is None:
            raise UsageError("messages: the model has no chat template")
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, without special tokens. Ids that the tokenizer does not know are left out."""
        return self.decode_each([token_ids])[0]

    def decode_each(self, all_ids: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of each of some lists of ids."""
        texts: list[str] = self._ask({"decode": [list(token_ids) for token_ids in all_ids]})
        return texts

    def spell(self, token_ids: Sequence[int]) -> list[tuple[str, tuple[int, ...] | None]]:
        """(text within a text, bytes) of each token alone, special tokens too; None where its bytes are not known."""
        found: list[tuple[str, list[int] | None]] = self._ask({"spell": list(token_ids)})
        return [(text, None if raw is None else tuple(raw)) for text, raw in found]

    def _ask(self, request: Mapping[str, object]) -> Any:
        """The answer, from a new process if an earlier request ended the last one."""
        if self._process is None:
            self._begin()
        return self._tell(request)

    def _tell(self, request: Mapping[str, object]) -> Any:
        """The answer. If none comes, the process is ended, so that no late answer is taken for the next request's."""
        answer = None
        try:
            answer = json.loads(self._line(request))
        finally:
            if answer is None or "error" in answer:
                self.close()
        if "refused" in answer:
            raise RequestError(answer["refused"])
        if "file" in answer:
            raise TokenizerError(self._folder / answer["file"], answer["why"], self._folder)
        if "error" in answer:
            raise self._failure(request, f"fails: {answer['error']}")
        return answer["done"]

    def _failure(self, request: Mapping[str, object], why: str) -> TokenizerError:
        """The error of a request that ends the process. A chat template is more likely to loop than a tokenizer."""
        name = (self._template if "chat" in request else None) or TOKENIZER
        return TokenizerError(self._folder / name, why, self._folder)

    def _line(self, request: Mapping[str, object]) -> bytes:
        """The process's next line, within LIMIT_S, reading while it writes."""
        said = json.dumps(request).encode() + b"\n"
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, parts = monotonic() + LIMIT_S, [b""]
        if len(said) <= select.PIPE_BUF:  # an empty pipe takes it at once
            _send(process.stdin, said)
        else:
            threading.Thread(target=_send, args=(process.stdin, said), daemon=True).start()
        answered = select.poll()  # select.select takes no descriptor above 1023
        answered.register(process.stdout, select.POLLIN)
        while not parts[-1].endswith(b"\n"):
            if not answered.poll(1000 * max(0.0, deadline - monotonic())):
                raise self._failure(request, f"has no answer after {LIMIT_S:g} s")
            parts.append(process.stdout.read(_READ_BYTES) or b"")
            if not parts[-1]:
                code = process.wait()
                died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise self._failure(request, f"ends the library that reads it, with {died}")
        return b"".join(parts)


def _send(stream: IO[bytes], request: bytes) -> None:
    """Write it all, or as much as the process takes before it ends."""
    view = memoryview(request)
    with suppress(OSError, ValueError):
        while view:
            view = view[stream.write(view) or 0 :]


def _has_jinja() -> bool:
    """Whether there is a jinja2 whose sandbox holds strangers' templates. Source: CVE-2025-27516, mended in 3.1.6."""
    try:
        found = re.findall(r"\d+", version("jinja2"))
    except PackageNotFoundError:
        return False
    return [int(part) for part in found[:3]] >= [3, 1, 6]


def has_tokenizer(folder: Path) -> bool:
    """Whether the directory of a checkpoint has a tokenizer."""
    return (folder / TOKENIZER).is_file()


def no_tokenizer(field: str) -> UsageError:
    """The error of a request's field that a model without a tokenizer cannot serve."""
    return UsageError(f"{field}: the model has no tokenizer; give token ids")
