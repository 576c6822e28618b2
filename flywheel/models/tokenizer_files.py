"""The files of a checkpoint beside its weights: their names, and how a tokenizer's are read.

Loading, downloads, bundles and quantised copies all use these names. Source: huggingface/transformers,
`tokenization_utils_base.py` and `utils/hub.py`, release 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flywheel.errors import IrFormatError, TokenizerError
from flywheel.ir.files import parse_json, read_text

MODEL: Final = "config.json"
GENERATION: Final = "generation_config.json"
TOKENIZER: Final = "tokenizer.json"
SETTINGS: Final = "tokenizer_config.json"
SPECIAL: Final = "special_tokens_map.json"
ADDED: Final = "added_tokens.json"
TEMPLATE: Final = "chat_template.jinja"
TEMPLATES: Final = "additional_chat_templates"
"""A folder of further templates, `NAME.jinja`."""

PATTERNS: Final = (MODEL, GENERATION, TOKENIZER, SETTINGS, SPECIAL, ADDED, TEMPLATE, f"{TEMPLATES}/*.jinja")
"""Everything that flywheel reads beside the weights."""
OTHERS: Final = ("tokenizer.model", "vocab.json", "merges.txt", "chat_template.json")
"""Files of the same tokenizer that only other programs read."""

_DEFAULT: Final = "default"
_MAX_BYTES: Final = 4 * 1024**2
_MAX_TOKENIZER_BYTES: Final = 256 * 1024**2


def beside_weights(folder: Path) -> Iterator[str]:
    """The names of the files of PATTERNS that a checkpoint's directory has, relative to it."""
    for pattern in PATTERNS:
        yield from (str(file.relative_to(folder)) for file in sorted(folder.glob(pattern)) if file.is_file())


def text_of(folder: Path, name: str) -> str | None:
    """The text of a file; None where there is none. Raises TokenizerError for one that cannot be read."""
    file = folder / name
    try:
        if not file.is_file():
            return None
        return read_text(file, _MAX_TOKENIZER_BYTES if name == TOKENIZER else _MAX_BYTES)
    except (IrFormatError, OSError, ValueError) as error:
        raise TokenizerError(file, f"cannot be read: {' '.join(str(error).split())[:200]}") from None


def object_of(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is no file. Raises TokenizerError."""
    text = text_of(folder, name)
    if text is None:
        return None
    try:
        found = parse_json(text, long_integers=True)  # transformers 4 wrote 10^30 for no length
    except IrFormatError as error:
        raise TokenizerError(folder / name, f"is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise TokenizerError(folder / name, "is not a JSON object")
    return found


@dataclass(frozen=True, slots=True)
class Templates:
    """The chat templates of a tokenizer, by name: (name of the file, text)."""

    folder: Path
    named: Mapping[str, tuple[str, str]]

    def default(self) -> tuple[Path, str]:
        """(file, text) of the template for conversations without tools. Raises TokenizerError where none is called
        `default`."""
        if _DEFAULT in self.named:
            name, text = self.named[_DEFAULT]
            return self.folder / name, text
        name = next(iter(self.named.values()))[0]
        known = ", ".join(sorted(self.named))[:200]
        raise TokenizerError(self.folder / name, f"no chat template is called {_DEFAULT}; there are {known}")


def read_templates(folder: Path, settings: Mapping[str, Any]) -> Templates:
    """The templates of a directory; those in files of their own go before those of tokenizer_config.json. Raises
    TokenizerError."""
    found: dict[str, tuple[str, str]] = {}
    for name in [TEMPLATE, *sorted(f"{TEMPLATES}/{each.name}" for each in (folder / TEMPLATES).glob("*.jinja"))]:
        text = text_of(folder, name)
        if text is not None:
            found[_DEFAULT if name == TEMPLATE else Path(name).name.removesuffix(".jinja")] = (name, text)
    if "file" in found:  # transformers takes it for chat_template.jinja
        raise TokenizerError(folder / TEMPLATES / "file.jinja", "is a name that transformers does not keep apart")
    if not found:
        found = {name: (SETTINGS, text) for name, text in _in_settings(folder, settings.get("chat_template")).items()}
    return Templates(folder, found)


def _in_settings(folder: Path, given: object) -> dict[str, str]:
    """The templates that tokenizer_config.json gives: one, an object, or a list of them with their names."""
    file = folder / SETTINGS
    if isinstance(given, list):
        if not all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in given):
            raise TokenizerError(file, "chat_template: is a list of something else than named templates")
        given = {each["name"]: each.get("template") for each in given}
    named: dict[str, Any] = given if isinstance(given, dict) else {} if given is None else {_DEFAULT: given}
    wrong = next((name for name, text in named.items() if not isinstance(text, str)), None)
    if wrong is not None:
        raise TokenizerError(file, f"chat_template: {wrong[:60]!r} is no text")
    return named
