"""The classes of tokenizers: which one transformers takes for a model, and those that build their parts anew.

Source: huggingface/transformers, `models/auto/tokenization_auto.py` and
`models/{cohere,gemma,gpt2,llama,qwen2}/tokenization_*.py`, release 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from flywheel.errors import TokenizerError
from flywheel.models.families import FAMILIES
from flywheel.models.family import AS_SAVED
from flywheel.models.tokenizer_files import MODEL, SETTINGS, TOKENIZER, object_of

_Given = dict[str, Any]

_PLAIN: Final = (AS_SAVED, "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer")
"""Names of `tokenizer_class`, without "Fast", that take tokenizer.json as it is."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """A class that builds its tokenizer anew: its special tokens where the settings have none."""

    build: Callable[[_Given, BPE], Tokenizer]
    model: Mapping[str, Any]
    defaults: Mapping[str, str | None]
    adds_again: Callable[[str | AddedToken], AddedToken] | None = None
    """What it adds again of each special token, as special."""
    space: bool | None = None  # add_prefix_space where the settings do not say; null is not allowed beside False


def rebuilt_class(folder: Path, settings: _Given, text: str) -> Rebuilt | None:
    """The class that transformers takes for this model and `tokenizer_class`, if it is not tokenizer.json's own. Raises
    TokenizerError for a class that flywheel does not have."""
    config = object_of(folder, MODEL) or {}
    kind = config.get("model_type")
    file = folder / (SETTINGS if settings.get("tokenizer_class") else MODEL)
    name = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if name is not None and not isinstance(name, str):
        raise TokenizerError(file, "tokenizer_class: is no name")
    family = next((each for each in FAMILIES.values() if kind and kind in (each.name, each.text_of)), None)
    if kind and family is None:
        raise TokenizerError(folder / MODEL, f"model_type: {str(kind)[:60]!r} has a tokenizer that is not known")
    own = None if family is None else family.tokenizer
    bare = (name or "").removesuffix("Fast")
    if settings.get("tokenizer_class") == "" and bare in ("", own):  # a name that no class has
        return None
    if own is not None and (own == AS_SAVED or not bare or (family is not None and family.tokenizer_wins)):
        return _REBUILT.get(own)
    if not bare or bare in _PLAIN or (bare == "LlamaTokenizer" and '"ByteLevel"' in text):
        return None
    if bare not in _REBUILT:
        known = ", ".join((*_PLAIN, *_REBUILT))
        raise TokenizerError(file, f"tokenizer_class: {bare[:60]!r} is none of {known}")
    return _REBUILT[bare]


def rebuild(folder: Path, made: Rebuilt, given: _Given, document: _Given) -> tuple[Tokenizer, bool]:
    """(a tokenizer of the class, with the vocabulary, merges, post-processor and padding of tokenizer.json; whether it
    splits texts otherwise than tokenizer.json says)."""
    model = document.get("model")
    if not isinstance(model, dict):
        raise TokenizerError(folder / TOKENIZER, "model: is no object")
    vocabulary, merges = model.get("vocab"), model.get("merges", [])
    if model.get("type") != "BPE" or not isinstance(vocabulary, dict) or not isinstance(merges, list):
        raise TokenizerError(folder / TOKENIZER, "model: is no BPE, of which the tokenizer_class makes its tokenizer")
    for field, absent in (("add_prefix_space", made.space), ("legacy", None)):
        if not isinstance(given.get(field, absent), bool if field in given and absent is False else bool | None):
            raise TokenizerError(folder / SETTINGS, f"{field}: is neither true nor false")
    empty = {**document, "model": {**model, "vocab": {}, "merges": []}, "added_tokens": []}
    shell = Tokenizer.from_str(json.dumps(empty))
    pairs: list[Any] = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
    fast = made.build(given, BPE(vocab=vocabulary, merges=pairs, dropout=None, **made.model))
    if shell.post_processor is not None:
        fast.post_processor = shell.post_processor
    for name, text in made.defaults.items():
        given.setdefault(name, text)
    if shell.padding is not None:
        given.setdefault("pad_token", shell.padding["pad_token"])
    return fast, any(_split(fast, text) != _split(shell, text) for text in _TEXTS)


_TEXTS: Final = ("a  1 b22c", " it's E\u0301\n\n y", "\u8a9e\u3001 \U0001f600!? \t.x")
"""What classes are known to split in different ways."""


def _split(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces of a text that become tokens each by itself."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _llama(given: _Given, model: BPE) -> Tokenizer:
    fast = Tokenizer(model)
    spaced = given.get("add_prefix_space") in (True, None)
    scheme = "never" if not spaced else "always" if given.get("legacy") else "first"
    fast.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if spaced else []
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return fast


_QWEN2_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gemma(given: _Given, model: BPE) -> Tokenizer:
    fast = Tokenizer(model)
    model.unk_token = str(given.get("unk_token", _GEMMA_TOKENS["unk_token"]))
    fast.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.normalizer = normalizers.Replace(" ", "▁")
    return fast


def _cohere(given: _Given, model: BPE) -> Tokenizer:
    fast = Tokenizer(model)
    fast.normalizer = normalizers.NFC()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=bool(given.get("add_prefix_space")))
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), letters])
    fast.decoder = decoders.ByteLevel()
    return fast


def _qwen2(given: _Given, model: BPE) -> Tokenizer:
    fast = Tokenizer(model)
    fast.decoder = decoders.ByteLevel()
    fast.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated", invert=False)
    letters = pre_tokenizers.ByteLevel(add_prefix_space=bool(given.get("add_prefix_space")), use_regex=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([words, letters])
    return fast


def _gpt2(given: _Given, model: BPE) -> Tokenizer:
    fast = Tokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(given.get("add_prefix_space")))
    fast.decoder = decoders.ByteLevel()
    return fast


_END: Final = "<|endoftext|>"
_GEMMA_TOKENS: Final[Mapping[str, str | None]] = MappingProxyType(
    {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"}
)
_REBUILT: Final[Mapping[str, Rebuilt]] = MappingProxyType(
    {
        "LlamaTokenizer": Rebuilt(
            _llama, {"fuse_unk": True, "byte_fallback": True},
            {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        ),
        "Qwen2Tokenizer": Rebuilt(
            _qwen2, {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False},
            {"unk_token": _END, "eos_token": _END, "pad_token": _END},
            adds_again=lambda token: AddedToken(str(token), special=True),
        ),
        "GPT2Tokenizer": Rebuilt(
            _gpt2, {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False},
            {"unk_token": _END, "bos_token": _END, "eos_token": _END}, space=False,
        ),
        "GemmaTokenizer": Rebuilt(_gemma, {"fuse_unk": True, "byte_fallback": True}, _GEMMA_TOKENS),
        "CohereTokenizer": Rebuilt(
            _cohere, {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False},
            {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>",
             "pad_token": "<PAD>", "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"},
            adds_again=lambda token: AddedToken(token, special=True) if isinstance(token, str) else token,
            space=False,
        ),
    }
)  # fmt: skip
