"""Builds a tokenizer from all of its files as transformers does, or refuses it by file and field.

Two kinds of classes: most names of `tokenizer_class` take tokenizer.json as it is; some build normalizer,
pre-tokenizer and decoder anew around its vocabulary. Special and added tokens of the other files come on top.
Truncation and padding that were saved belong to somebody's call, and are reset. A stranger's files, so this runs in the
tokenizer's process.

Source: huggingface/transformers, `tokenization_utils_base.py` (`_from_pretrained`) and
`tokenization_utils_tokenizers.py`, release 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from flywheel.errors import TokenizerError
from flywheel.models.tokenizer_classes import rebuild, rebuilt_class
from flywheel.models.tokenizer_files import (
    ADDED,
    SETTINGS,
    SPECIAL,
    TOKENIZER,
    Templates,
    object_of,
    read_templates,
    text_of,
)

Token = str | AddedToken
_Given = dict[str, Any]

_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_DECODER: Final = "added_tokens_decoder"
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")
_SIDES: Final = ("padding_side", "truncation_side")
_SIZES: Final = ("model_max_length", "max_len")
_ENDS: Final = ("add_bos_token", "add_eos_token")
"""Fields that transformers leaves to the post-processor of tokenizer.json."""
_CLEAN_BPE: Final = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
_UNKNOWN: Final = (
    "init_inputs", "fast_tokenizer_files", "vocab", "merges", "tokenizer_object", "gguf_file", "post_processor",
    "tokenizer_padding", "tokenizer_truncation", "fix_mistral_regex", "trust_remote_code",
)  # fmt: skip
"""Fields of tokenizer_config.json with an effect in transformers that flywheel does not have."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A tokenizer. `special` are its special tokens by the names that templates know. It may split texts `anew`,
    otherwise than tokenizer.json says."""

    fast: Tokenizer
    special: Mapping[str, str]
    templates: Templates
    anew: bool

    @property
    def end_id(self) -> int | None:
        """The id of its end-of-text token."""
        ids = (self.fast.token_to_id(self.special[name]) for name in ("eos_token", "unk_token") if name in self.special)
        return None if "eos_token" not in self.special else next((found for found in ids if found is not None), None)


def load(folder: Path) -> Loaded:
    """The tokenizer of a checkpoint's directory. Raises TokenizerError, and what the library raises for a
    tokenizer.json."""
    text = text_of(folder, TOKENIZER) or ""
    settings = object_of(folder, SETTINGS) or {}
    _check_settings(folder, settings)
    templates = read_templates(folder, settings)
    made = rebuilt_class(folder, settings, text)
    alone = made is None and _DECODER in settings  # then only the library reads tokenizer.json, which is quick
    document = {} if alone else _document(folder, text)
    given, added = _tokens(folder, settings, document)
    fast, anew = (_as_saved(folder, text), False) if made is None else rebuild(folder, made, given, document)
    if fast.padding is not None:  # a saved call's token counts all the same
        given.setdefault("pad_token", fast.padding["pad_token"])
    fast.no_truncation()
    fast.no_padding()
    fast.encode_special_tokens = settings.get("split_special_tokens", False)
    named, extra = _special(folder, given)
    _add(fast, added, named, extra)
    if made is not None and made.adds_again is not None:
        fast.add_special_tokens([made.adds_again(each) for each in (*named.values(), *extra)])
    if settings.get("clean_up_tokenization_spaces") and (settings.get(_CLEAN_BPE) or not isinstance(fast.model, BPE)):
        raise TokenizerError(
            folder / SETTINGS, "clean_up_tokenization_spaces: takes spaces from text that was shown already; set false"
        )
    return Loaded(fast, {name: str(token) for name, token in named.items()}, templates, anew)


def _check_settings(folder: Path, settings: _Given) -> None:
    """Raises TokenizerError for a field that transformers refuses, or whose effect flywheel does not have."""
    for field, allowed, why in _FIELDS:
        if field in settings and not allowed(settings[field]):
            raise TokenizerError(folder / SETTINGS, f"{field}: {why}")


def _runs_code(given: object) -> bool:
    return given is not None and (not isinstance(given, dict) or given.get("AutoTokenizer") is not None)


_FIELDS: Final[Sequence[tuple[str, Callable[[Any], bool], str]]] = (
    *((field, lambda given: not given, "is not supported") for field in _UNKNOWN),
    ("auto_map", lambda given: not _runs_code(given), "names code of the repository, which flywheel does not run"),
    ("split_special_tokens", lambda given: isinstance(given, bool), "is neither true nor false"),
    *((side, lambda given: given in ("left", "right"), "is neither left nor right") for side in _SIDES),
    *((size, lambda given: isinstance(given, int | float | None), "is no number") for size in _SIZES),
    ("model_input_names", lambda given: isinstance(given, list | str), "is no list"),
    ("chat_control_tokens", lambda given: isinstance(given, list | None), "is no list"),
)
"""(field of tokenizer_config.json, whether a value may stay, what is wrong with others)."""


def _document(folder: Path, text: str) -> _Given:
    """The content of tokenizer.json. Unlike `parse_json`, this does not look for names that come twice: it would take
    twice as long, and the library looks."""
    try:
        found = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise TokenizerError(folder / TOKENIZER, f"is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(found, dict):
        raise TokenizerError(folder / TOKENIZER, "is not a JSON object")
    return found


def _as_saved(folder: Path, text: str) -> Tokenizer:
    """The tokenizer of tokenizer.json."""
    fast = Tokenizer.from_str(text)
    if getattr(fast.model, "dropout", None):
        raise TokenizerError(folder / TOKENIZER, "model.dropout: is not 0, so a text has other tokens each time")
    return fast


def _token(file: Path, field: str, given: object, marked: bool = True) -> Token:
    """A token as the files write it: its text, or its text and flags. An object is `marked` by its `__type` where it
    may be something else. Raises TokenizerError."""
    if isinstance(given, str | AddedToken):
        return given
    if not isinstance(given, dict) or (marked and given.get("__type") != "AddedToken"):
        raise TokenizerError(file, f"{field}: is no token")
    parts = {name: part for name, part in given.items() if name != "__type"}
    flags = {name: part for name, part in parts.items() if name != "content"}
    content = parts.get("content")
    if not isinstance(content, str) or any(name not in _FLAGS or not isinstance(flags[name], bool) for name in flags):
        raise TokenizerError(file, f"{field}: is no token of a content and the flags {', '.join(_FLAGS)}")
    return AddedToken(content, **flags)


def _tokens(folder: Path, settings: _Given, document: _Given) -> tuple[_Given, dict[int, AddedToken]]:
    """(settings with tokens as tokens, tokens to add by the numbers that order them)."""
    given = {name: value for name, value in settings.items() if name not in _ENDS}
    file = folder / SETTINGS
    if "additional_special_tokens" in given and not given.get("extra_special_tokens"):
        given["extra_special_tokens"] = given.pop("additional_special_tokens")
    own = {
        name: given.pop(name)
        for name in list(given)
        if name not in _NAMED and name.endswith("_token") and isinstance(given[name], str)
    }
    if isinstance(given.get("extra_special_tokens"), dict):
        own |= given.pop("extra_special_tokens")
    if own:
        given["model_specific_special_tokens"] = own
    added: dict[int, AddedToken] = {}
    texts: dict[str, AddedToken] = {}
    if _DECODER in given:
        for number, token in _pairs(file, _DECODER, given[_DECODER]):
            field = f"{_DECODER}.{number[:60]}"
            try:
                place = int(number)
            except ValueError:
                raise TokenizerError(file, f"{field}: is no token id") from None
            added[place] = texts[_content(token)] = _flagged(file, field, token)
    else:
        _read_special_map(folder, given)
        for place, flagged in _older(folder, given, document):
            added[place] = texts[str(flagged)] = flagged
    for name in _NAMED:
        if given.get(name) is not None:
            token = _token(file, name, given[name])
            given[name] = texts.get(str(token), token)
    return given, added


def _pairs(file: Path, field: str, given: object) -> list[tuple[str, Any]]:
    if not isinstance(given, dict):
        raise TokenizerError(file, f"{field}: is no object")
    return list(given.items())


def _content(given: object) -> str:
    return str(given["content"]) if isinstance(given, dict) and "content" in given else ""


def _flagged(file: Path, field: str, given: object) -> AddedToken:
    """A token that must have flags."""
    token = _token(file, field, given, marked=False)
    if isinstance(token, str):
        raise TokenizerError(file, f"{field}: is no object")
    return token


def _read_special_map(folder: Path, given: _Given) -> None:
    """Put special_tokens_map.json, which transformers reads only without `added_tokens_decoder`, into the settings."""
    file = folder / SPECIAL
    for name, value in (object_of(folder, SPECIAL) or {}).items():
        if name == "extra_special_tokens" and isinstance(value, list):
            kept = list(given.get(name) or [])
            for each in value:
                if isinstance(each, dict) and "special" in each:
                    raise TokenizerError(file, f"{name}: says again that a token is special")
                token = _special_token(file, name, each) if isinstance(each, dict) else each
                kept += [token] if token not in kept else []
            value = kept
        elif name == "additional_special_tokens" and isinstance(value, dict):
            raise TokenizerError(file, f"{name}: is no list")
        elif isinstance(value, dict) and name != "extra_special_tokens":
            value = _special_token(file, name, value)
        if not name.endswith(("_token", "_special_tokens")):
            raise TokenizerError(file, f"{name[:60]!r} is no special token")
        given[name] = value
    if isinstance(given.get("extra_special_tokens"), dict):
        given.setdefault("model_specific_special_tokens", {}).update(given.pop("extra_special_tokens"))


def _special_token(file: Path, field: str, given: Mapping[str, Any]) -> AddedToken:
    return _flagged(file, field, {**given, "special": True})


def _older(folder: Path, given: _Given, document: _Given) -> list[tuple[int, AddedToken]]:
    """(number, token) of added_tokens.json and of tokenizer.json."""
    found: list[tuple[int, AddedToken]] = []
    known = {str(given[name]) for name in _NAMED if isinstance(given.get(name), str | AddedToken)}
    extra = given.get("extra_special_tokens")
    known |= {str(each) for each in (extra if isinstance(extra, list) else []) if isinstance(each, str | AddedToken)}
    for text, place in (object_of(folder, ADDED) or {}).items():
        if type(place) is not int:
            raise TokenizerError(folder / ADDED, f"{text[:60]!r}: has no token id")
        special = text in known
        found.append((place, AddedToken(text, normalized=not special, special=special)))
    file, tokens = folder / TOKENIZER, document.get("added_tokens")
    if not isinstance(tokens, list):
        raise TokenizerError(file, "added_tokens: is no list")
    for place, each in enumerate(tokens):
        field = f"added_tokens.{place}"
        if not isinstance(each, dict) or type(each.get("id")) is not int:
            raise TokenizerError(file, f"{field}: has no id")
        found.append((each["id"], _flagged(file, field, {name: each[name] for name in each if name != "id"})))
    return found


def _special(folder: Path, given: _Given) -> tuple[dict[str, Token], list[Token]]:
    """(special tokens by name, further ones), in the order in which transformers adds them."""
    file = folder / SETTINGS
    named: dict[str, Token | None] = {name: given.get(name) for name in _NAMED}
    further = given.get("extra_special_tokens", given.get("additional_special_tokens"))
    for name, token in further.items() if isinstance(further, dict) else ():
        named[name] = _token(file, f"extra_special_tokens.{name[:60]}", token)
    if not isinstance(further, list | dict | None):
        raise TokenizerError(file, "extra_special_tokens: is neither a list nor an object")
    own = {
        name: token
        for name, token in given.items()
        if name.endswith("_token") and name not in _NAMED and (isinstance(token, str | AddedToken) or _is_marked(token))
    }
    stated = given.get("model_specific_special_tokens")
    own |= dict(_pairs(file, "model_specific_special_tokens", {} if stated is None else stated))
    for name, token in own.items():
        named[name] = _token(file, name[:60], token)
    each = further if isinstance(further, list) else []
    extra = [_token(file, f"extra_special_tokens.{place}", token) for place, token in enumerate(each)]
    return {name: token for name, token in named.items() if token is not None}, extra


def _is_marked(given: object) -> bool:
    return isinstance(given, dict) and given.get("__type") == "AddedToken"


def _add(fast: Tokenizer, added: Mapping[int, AddedToken], named: Mapping[str, Token], extra: list[Token]) -> None:
    """Add the tokens that the files name. The library numbers those that its vocabulary lacks."""
    wanted: list[Token] = [added[number] for number in sorted(added)]
    known = {token.content for token in fast.get_added_tokens_decoder().values()} | {str(token) for token in wanted}
    for token in (*named.values(), *extra):
        if str(token) not in known and token not in wanted:
            wanted.append(token)
    special = {str(token) for token in named.values()}
    made = [AddedToken(token, special=True) if isinstance(token, str) else token for token in wanted]
    for each in made:
        each.special = each.special or str(each) in special
    fast.add_tokens(made)
