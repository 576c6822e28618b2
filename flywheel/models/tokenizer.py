"""Text to token ids and back, and the ids that end a text: what lies beside a checkpoint's weights.

The files are a stranger's: whatever they hold, the answer is what was asked for or one UsageError that names the file.
Source: huggingface/tokenizers; huggingface/transformers, `generation/configuration_utils.py` (`eos_token_id`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flywheel.errors import IrFormatError, UsageError
from flywheel.ir.files import parse_json

_TOKENIZER: Final = "tokenizer.json"
_ENDS: Final = ("generation_config.json", "config.json")
_MAX_TOKENIZER_BYTES: Final = 256 * 1024**2
_MAX_CONFIG_BYTES: Final = 4 * 1024**2


class Tokenizer:
    """The tokenizer of a checkpoint's directory. Raises UsageError where it has none, or none that can be read."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Fast

        text = _read(folder / _TOKENIZER, _MAX_TOKENIZER_BYTES)
        if text is None:
            raise UsageError(f"{str(folder)!r} has no {_TOKENIZER}, which a text prompt needs; give token ids instead")
        try:
            self._tokenizer: Any = Fast.from_str(text)
        # What the library raises for a malformed file is Exception itself.
        except Exception as error:
            raise UsageError(f"{str(folder / _TOKENIZER)!r} is no tokenizer: {_one_line(error)}") from error

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, with the special tokens that the model expects around it."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, without special tokens; ids that the tokenizer does not know are left out."""
        text: str = self._tokenizer.decode(list(token_ids))
        return text


def has_tokenizer(folder: Path) -> bool:
    """Whether the directory of a checkpoint brings its tokenizer along."""
    return (folder / _TOKENIZER).is_file()


def end_ids(folder: Path) -> frozenset[int]:
    """Ids that end a text: `eos_token_id` of generation_config.json, else of config.json; none where neither says.

    Raises UsageError where it is neither an id nor a list of ids.
    """
    for name in _ENDS:
        text = _read(folder / name, _MAX_CONFIG_BYTES)
        if text is None:
            continue
        try:
            content: object = parse_json(text)
        except IrFormatError as error:
            raise UsageError(f"{str(folder / name)!r} is not JSON: {_one_line(error)}") from error
        given = content.get("eos_token_id") if isinstance(content, dict) else None
        if given is None:
            continue
        ids = given if isinstance(given, list) else [given]
        if any(isinstance(number, bool) or not isinstance(number, int) for number in ids):
            raise UsageError(f"{str(folder / name)!r}: eos_token_id is neither an integer nor a list of integers")
        return frozenset(ids)
    return frozenset()


def _read(file: Path, limit: int) -> str | None:
    """The file's text; None where there is no file."""
    try:
        if not file.is_file():
            return None
        with file.open("rb") as stream:
            raw = stream.read(limit + 1)
        if len(raw) > limit:
            raise UsageError(f"{str(file)!r} is larger than {limit} bytes")
        return raw.decode("utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(f"{str(file)!r} cannot be read: {type(error).__name__}") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:120]
