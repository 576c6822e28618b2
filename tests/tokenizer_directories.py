"""Directories of tokenizers as they are published, changed in each field of each file; and what transformers makes of
them, which is what flywheel has to make of them.

`directories()` are fixed ones, each with one field changed. `directory(seed)` has some changes at random.
`differences` says how flywheel's tokenizer of a directory differs from transformers' AutoTokenizer.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from mutations import mutate_by_type, mutate_document

from flywheel.errors import TokenizerError

Files = dict[str, Any]
"""A directory: an object for each JSON file, a text for each template."""

TEXTS: Final = (
    "", "hello", " hello  world 12 345", "a  1 b", "it's  Ünïcodé e\u0301 \u00e9 <s> </s>x",
    "<|im_start|>user\nhi<|im_end|>", "line\n\n line\t<|new|> <|new|>x <|alone|> [PAD]",
    "<|begin|>ab<|end|> <unk> <|endoftext|>a", "語 \U0001f600!?... don't",
)  # fmt: skip
CHATS: Final = (
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be  brief"}, {"role": "user", "content": "a <|im_end|> b"},
     {"role": "assistant", "content": "it's 12"}, {"role": "user", "content": "x\n"}],
)  # fmt: skip
_CHATML: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OTHER: Final = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
_EVERY: Final = (
    "{{ [bos_token, eos_token, unk_token, pad_token, sep_token, cls_token, mask_token, image_token, x_token] "
    "| join('|') }}"
)
_BYTES: Final = [chr(code) for code in (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x144))]
"""The letters of the library's ByteLevel."""
_PIECES: Final = ("he", "ll", "hell", "hello", "Ġw", "or", "Ġwor", "ĠĠ", "ab", "12", "Ġ1", "us", "er")
_MERGES: Final = (
    "h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "Ġ Ġ", "a b", "1 2", "Ġ 1", "u s", "e r",
)  # fmt: skip
_QWEN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3: Final = _QWEN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")


def _added(content: str, number: int | None = None, special: bool = True, **flags: bool) -> dict[str, Any]:
    given = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": special, **flags}
    return {**({} if number is None else {"id": number}), "content": content, **given}


def _level(**given: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **given}


def _split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _begins(token: str, number: int) -> dict[str, Any]:
    """A post-processor that puts a token before a text."""
    one = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": one, "pair": [*one, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}}}  # fmt: skip


def _document(
    vocabulary: Sequence[str], merges: Sequence[str], added: Sequence[str], **sections: Any
) -> dict[str, Any]:
    numbers = {piece: number for number, piece in enumerate(dict.fromkeys(vocabulary))}
    tokens = [_added(token, numbers.get(token, len(numbers) + place)) for place, token in enumerate(added)]
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
             "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             **sections.pop("model", {}), "vocab": numbers, "merges": list(merges)}  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None,
        "pre_tokenizer": _level(), "post_processor": None, "decoder": _level(), **sections, "model": model,
    }  # fmt: skip


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _letters() -> list[str]:
    return [*_BYTES, *_PIECES]


def _decoder_of(document: dict[str, Any]) -> dict[str, Any]:
    """`added_tokens_decoder` of a tokenizer.json, as transformers 4 wrote it beside it."""
    return {str(each["id"]): {name: each[name] for name in each if name != "id"} for each in document["added_tokens"]}


def _llama3() -> Files:
    count = len(_letters())
    names = ["<|begin|>", "<|end|>", "<|im_start|>", "<|im_end|>"]
    document = _document(
        _letters(), _MERGES, names, post_processor=_begins("<|begin|>", count),
        pre_tokenizer=_sequence(_split(_LLAMA3), _level(use_regex=False)), model={"ignore_merges": True},
    )  # fmt: skip
    settings = {
        "added_tokens_decoder": _decoder_of(document), "bos_token": "<|begin|>", "clean_up_tokenization_spaces": True,
        "chat_template": _CHATML, "eos_token": "<|im_end|>", "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072, "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    return {"config.json": {"model_type": "llama"}, "tokenizer.json": document, "tokenizer_config.json": settings,
            "special_tokens_map.json": {"bos_token": _added("<|begin|>"), "eos_token": "<|im_end|>"}}  # fmt: skip


def _sentencepiece(names: Sequence[str] = ("<unk>", "<s>", "</s>"), **sections: Any) -> dict[str, Any]:
    letters = ["▁", "\n\n", *"abcdehilmnorstuwx'12"]
    first = [*names, *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    pieces = ["he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "▁▁", "ab", "us", "er"]
    merges = ["h e", "l l", "he ll", "hell o", "▁ hello", "▁ w", "o r", "▁w or", "▁ ▁", "a b", "u s", "e r"]
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    backward = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return _document(
        [*first, *pieces], merges, names,
        **{"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replaced]},
           "pre_tokenizer": None, "post_processor": _begins("<s>", 1),
           "decoder": {"type": "Sequence", "decoders": [backward, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
           "model": {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}, **sections},
    )  # fmt: skip


_NAMED: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


_NONE: Final = 1000000000000000019884624838656
"""What transformers 4 wrote for no greatest length."""


def _llama2() -> Files:
    marked = {name: {"__type": "AddedToken", **_added(token)} for name, token in _NAMED.items()}
    settings = {**marked, "add_bos_token": True, "add_eos_token": False, "clean_up_tokenization_spaces": False,
                "legacy": False, "model_max_length": _NONE, "pad_token": None, "padding_side": "right",
                "sp_model_kwargs": {}, "tokenizer_class": "LlamaTokenizer", "chat_template": _OTHER}  # fmt: skip
    special = {name: _added(token, normalized=True) for name, token in _NAMED.items()}
    for token in special.values():
        del token["special"]
    return {"config.json": {"model_type": "llama"}, "tokenizer.json": _sentencepiece(),
            "tokenizer_config.json": settings, "special_tokens_map.json": special,
            "added_tokens.json": {"<|new|>": 400}}  # fmt: skip


def _mistral() -> Files:
    document = _sentencepiece()
    settings = {"add_bos_token": True, "add_eos_token": False, "added_tokens_decoder": _decoder_of(document), **_NAMED,
                "additional_special_tokens": [], "legacy": False, "model_max_length": _NONE, "pad_token": None,
                "spaces_between_special_tokens": False, "tokenizer_class": "LlamaTokenizer",
                "use_default_system_prompt": False}  # fmt: skip
    return {"config.json": {"model_type": "mistral"}, "tokenizer.json": document, "tokenizer_config.json": settings,
            "special_tokens_map.json": dict(_NAMED), "chat_template.jinja": _OTHER}  # fmt: skip


def _qwen2() -> Files:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    document = _document(
        _letters(), _MERGES, names, normalizer={"type": "NFC"}, post_processor=_level(),
        pre_tokenizer=_sequence(_split(_QWEN), _level(use_regex=False)),
        model={"continuing_subword_prefix": "", "end_of_word_suffix": ""},
    )  # fmt: skip
    settings = {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": _decoder_of(document),
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": None, "chat_template": _CHATML,
        "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "errors": "replace",
        "model_max_length": 131072, "pad_token": "<|endoftext|>", "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
    }  # fmt: skip
    return {"config.json": {"model_type": "qwen2"}, "tokenizer.json": document, "tokenizer_config.json": settings}


def _qwen3() -> Files:
    files = _qwen2()
    del files["tokenizer_config.json"]["chat_template"]
    return {**files, "config.json": {"model_type": "qwen3"}, "chat_template.jinja": _CHATML,
            "additional_chat_templates/tool_use.jinja": _OTHER}  # fmt: skip


def _smollm2() -> Files:
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    digits = {"type": "Digits", "individual_digits": True}
    document = _document([*names, *_letters()], _MERGES, names, pre_tokenizer=_sequence(digits, _level()))
    settings = {"add_prefix_space": False, "added_tokens_decoder": _decoder_of(document),
                "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": "<|im_start|>",
                "chat_template": _CHATML, "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>",
                "model_max_length": 8192, "pad_token": "<|im_end|>", "tokenizer_class": "GPT2Tokenizer",
                "unk_token": "<|endoftext|>", "vocab_size": 49152}  # fmt: skip
    return {"config.json": {"model_type": "llama"}, "tokenizer.json": document, "tokenizer_config.json": settings}


def _bare() -> Files:
    return {"tokenizer.json": _document(_letters(), _MERGES, ["<s>", "</s>"]), "tokenizer_config.json": {},
            "special_tokens_map.json": {}, "added_tokens.json": {}, "config.json": {"model_type": "llama"}}  # fmt: skip


def _gemma(kind: str, images: bool = False) -> Files:
    names = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    backward = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    document = _sentencepiece(
        names, normalizer=replaced, post_processor=_begins("<bos>", 2),
        pre_tokenizer={**_split(""), "pattern": {"String": " "}, "behavior": "MergedWithPrevious"},
        decoder={"type": "Sequence", "decoders": [backward, {"type": "ByteFallback"}, {"type": "Fuse"}]},
    )  # fmt: skip
    numbers = document["model"]["vocab"]
    document["added_tokens"] += [_added(text, numbers[text], special=False) for text in ("\n\n", "▁▁")]
    settings = {"add_bos_token": True, "add_eos_token": False, "added_tokens_decoder": _decoder_of(document),
                "bos_token": "<bos>", "chat_template": _OTHER, "clean_up_tokenization_spaces": False,
                "eos_token": "<eos>", "model_max_length": _NONE, "pad_token": "<pad>", "sp_model_kwargs": {},
                "spaces_between_special_tokens": False, "tokenizer_class": "GemmaTokenizer", "unk_token": "<unk>",
                "use_default_system_prompt": False}  # fmt: skip
    if not images:
        settings |= {"additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}
    else:
        settings |= {"extra_special_tokens": {"image_token": "<image_soft_token>"}, "image_token": "<image_soft_token>",
                     "processor_class": "Gemma3Processor", "sp_model_kwargs": None}  # fmt: skip
    return {"config.json": {"model_type": kind}, "tokenizer.json": document, "tokenizer_config.json": settings,
            "special_tokens_map.json": {"bos_token": _added("<bos>"), "eos_token": "<eos>"}}  # fmt: skip


def _phi3() -> Files:
    document = _sentencepiece()
    first = max(document["model"]["vocab"].values()) + 1
    document["added_tokens"][2] |= {"rstrip": True, "special": False}
    names = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    document["added_tokens"] += [_added(token, first + place, rstrip=place > 0) for place, token in enumerate(names)]
    settings = {"add_bos_token": False, "add_eos_token": False, "added_tokens_decoder": _decoder_of(document),
                "bos_token": "<s>", "chat_template": _CHATML, "clean_up_tokenization_spaces": False,
                "eos_token": "<|endoftext|>", "legacy": False, "model_max_length": 131072,
                "pad_token": "<|endoftext|>", "padding_side": "left", "sp_model_kwargs": {},
                "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>"}  # fmt: skip
    return {"config.json": {"model_type": "phi3"}, "tokenizer.json": document, "tokenizer_config.json": settings,
            "added_tokens.json": {"<|im_end|>": first + 2}}  # fmt: skip


def _bytes(kind: str, named: str | None, words: Sequence[Any], **changes: Any) -> Files:
    """A tokenizer of bytes whose class is `named`, with `words` in front of the letters, and ChatML's tokens behind."""
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|new|>"]
    document = _document(_letters(), _MERGES, names, pre_tokenizer=_sequence(*words))
    for each in document["added_tokens"][1:3]:
        each |= {"lstrip": True, "rstrip": True} if changes.get("strip") else {}
    document["added_tokens"][3]["special"] = False
    document |= changes.get("document", {})
    settings = {"added_tokens_decoder": _decoder_of(document), "bos_token": "<|endoftext|>", "chat_template": _CHATML,
                "clean_up_tokenization_spaces": False, "eos_token": "<|im_end|>", "model_max_length": 16384,
                "pad_token": "<|endoftext|>", "tokenizer_class": named, "unk_token": "<|endoftext|>",
                **changes.get("settings", {})}  # fmt: skip
    return {"config.json": {"model_type": kind}, "tokenizer.json": document, "tokenizer_config.json": settings}


def _glm() -> Files:
    first = len(_letters())
    one = [{"SpecialToken": {"id": token, "type_id": 0}} for token in ("<|endoftext|>", "<|im_start|>")]
    pieces = {token: {"id": token, "ids": [first + place], "tokens": [token]}
              for place, token in enumerate(("<|endoftext|>", "<|im_start|>"))}  # fmt: skip
    one.append({"Sequence": {"id": "A", "type_id": 0}})
    starts = {"type": "TemplateProcessing", "single": one, "pair": [*one, {"Sequence": {"id": "B", "type_id": 1}}],
              "special_tokens": pieces}  # fmt: skip
    return _bytes(
        "glm", "PreTrainedTokenizerFast", (_split(_LLAMA3), _level(use_regex=False)),
        document={"post_processor": {"type": "Sequence", "processors": [_level(trim_offsets=False), starts]}},
        settings={"bos_token": None, "do_lower_case": False, "extra_special_tokens": {}, "padding_side": "left",
                  "remove_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]},
    )  # fmt: skip


def _cohere2() -> Files:
    names = ["<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"]
    digits = {"type": "Digits", "individual_digits": True}
    document = _document(
        [*names, *_letters()], _MERGES, names, normalizer={"type": "NFC"}, pre_tokenizer=_sequence(digits, _level()),
        post_processor=_begins("<BOS_TOKEN>", 5),
    )  # fmt: skip
    named = {"default": _OTHER, "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    settings = {"add_bos_token": True, "add_eos_token": False, "add_prefix_space": False,
                "added_tokens_decoder": _decoder_of(document), "bos_token": "<BOS_TOKEN>", "cls_token": "<CLS>",
                "chat_template": [{"name": name, "template": text} for name, text in named.items()],
                "clean_up_tokenization_spaces": False, "eos_token": "<|END_OF_TURN_TOKEN|>", "legacy": True,
                "mask_token": "<MASK_TOKEN>", "merges_file": None, "model_max_length": _NONE, "pad_token": "<PAD>",
                "sep_token": "<SEP>", "sp_model_kwargs": {}, "spaces_between_special_tokens": False,
                "tokenizer_class": "CohereTokenizerFast", "unk_token": None, "use_default_system_prompt": False,
                "vocab_file": None}  # fmt: skip
    return {"config.json": {"model_type": "cohere2"}, "tokenizer.json": document, "tokenizer_config.json": settings,
            "special_tokens_map.json": {"bos_token": _added("<BOS_TOKEN>"), "cls_token": "<CLS>"}}  # fmt: skip


_DIGITS: Final = ({"type": "Digits", "individual_digits": True}, _level())
_WORDS: Final = (_split(_LLAMA3), _level(use_regex=False))

FAMILIES: Final[Mapping[str, Callable[[], Files]]] = {
    "llama3": _llama3, "llama2": _llama2, "mistral": _mistral, "qwen2": _qwen2, "qwen3": _qwen3, "smollm2": _smollm2,
    "bare": _bare, "gemma2": partial(_gemma, "gemma2"), "gemma3": partial(_gemma, "gemma3", images=True), "phi3": _phi3,
    "phi4": partial(_bytes, "phi3", "GPT2Tokenizer", _WORDS, strip=True),
    "granite": partial(_bytes, "granite", "GPT2Tokenizer", _DIGITS, settings={"add_prefix_space": False}),
    "granite4": partial(_bytes, "granitemoehybrid", "GPT2Tokenizer", _WORDS, settings={"add_prefix_space": False}),
    "smollm3": partial(_bytes, "smollm3", "PreTrainedTokenizerFast", _WORDS, settings={"bos_token": None}),
    "olmo2": partial(_bytes, "olmo2", "GPT2Tokenizer", _WORDS), "glm": _glm,
    "tekken": partial(_bytes, "mistral", "LlamaTokenizerFast", _WORDS), "cohere2": _cohere2,
    "starcoder2": partial(_bytes, "starcoder2", "GPT2Tokenizer", _DIGITS, settings={"vocab_size": 49152}),
}  # fmt: skip

_MARKED: Final = {"__type": "AddedToken", **_added("<|new|>", special=False, lstrip=True)}
_TOKEN_VALUES: Final = ("<|new|>", "hello", "", None, _MARKED, _added("<|new|>"), 5, ["a"])
_TRUNCATION: Final = {"direction": "Left", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
_PADDING: Final = {"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": None, "pad_id": 0,
                   "pad_type_id": 0, "pad_token": "[PAD]"}  # fmt: skip
_CHANGES: Final[Mapping[str, Mapping[str, Sequence[Any]]]] = {
    "tokenizer_config.json": {
        **dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "mask_token"), _TOKEN_VALUES),
        "image_token": _TOKEN_VALUES,
        "additional_special_tokens": (["<|new|>"], ["<|new|>", "hello"], [_MARKED], {"x_token": "<|new|>"},
                                      [_added("a")], None, "a", [5]),
        "extra_special_tokens": (["<|new|>"], {"x_token": "<|new|>"}, {"messages": "<|new|>"}, [], 5, None),
        "model_specific_special_tokens": ({"x_token": "<|new|>"}, {"x_token": 5}, ["x"], None),
        "added_tokens_decoder": ({"400": _added("<|new|>")}, {"7": _added("<|new|>", special=False, rstrip=True)},
                                 {"401": _added("<|new|>"), "400": _added("<|alone|>", single_word=True)}, {}, None,
                                 {"x": _added("a")}, {"5": "a"}, {"9": {"content": "<|new|>"}}, {"9": {}},
                                 {"3": _added("hello", special=False, normalized=True)}),
        "tokenizer_class": ("LlamaTokenizer", "LlamaTokenizerFast", "GPT2Tokenizer", "GPT2TokenizerFast",
                            "Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", "PreTrainedTokenizer",
                            "TokenizersBackend", "BertTokenizer", "T5TokenizerFast", "CohereTokenizerFast",
                            "GemmaTokenizerFast", "Nonsense", None, "", 5),
        "add_bos_token": (True, False, None, "x"), "add_eos_token": (True, False),
        "add_prefix_space": (True, False, None, "x"), "legacy": (True, False, None),
        "split_special_tokens": (True, False, None, 1), "clean_up_tokenization_spaces": (True, False, None),
        "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": (True, False),
        "padding_side": ("left", "middle", None), "truncation_side": ("left", "x"),
        "model_max_length": (2, None, "x", 1e30), "max_len": (2, "x"), "model_input_names": (["input_ids"], 5),
        "chat_template": (_OTHER, _EVERY, "", None, 5, [{"name": "default", "template": _OTHER}],
                          [{"name": "tool_use", "template": _OTHER}],
                          [{"name": "rag", "template": "x"}, {"name": "default", "template": _EVERY}],
                          {"default": _OTHER, "tool_use": "x"}, {"rag": _OTHER}, ["x"], [{"name": "default"}]),
        "auto_map": ({"AutoTokenizer": [None, "a.B"]}, {"AutoModel": "a.B"}, {"AutoTokenizer": None}, ["a.B", None]),
        "init_inputs": ([], ["x"]), "fast_tokenizer_files": (["tokenizer.json"], ["tokenizer.4.0.json"]),
        "trust_remote_code": (True, False), "fix_mistral_regex": (True, False), "chat_control_tokens": (["a"], 5),
        "use_fast": (False,), "errors": ("strict",), "verbose": (True,), "name_or_path": ("x",),
        "sp_model_kwargs": ({"a": 1},),
        "vocab_file": ("/etc/passwd",), "tokenizer_file": ("/etc/passwd",), "do_lower_case": (True,),
        "use_default_system_prompt": (True,), "spaces_between_special_tokens": (True,), "vocab": ({"a": 0},),
        "post_processor": ({"type": "ByteLevel"},), "tokenizer_padding": (_PADDING,), "response_template": ("x",),
    },
    "special_tokens_map.json": {
        **dict.fromkeys(("bos_token", "eos_token", "pad_token"),
                        ("<|new|>", _added("<|new|>"), {"content": "<|new|>"}, None, 5, {})),
        "image_token": ("<|new|>", _added("<|new|>")),
        "additional_special_tokens": (["<|new|>"], [_added("<|new|>")], [], {"content": "a"}),
        "extra_special_tokens": (["<|new|>"], [_added("<|new|>"), "<|alone|>"], {"x_token": "<|new|>"}, 5),
        "model_max_length": (3,), "chat_template": ("x",), "add_bos_token": (True,), "unheard": ("x",),
    },
    "added_tokens.json": {"<|new|>": (400, 7, "x", None, 2.5), "hello": (300,), "<s>": (1,), "": (401,),
                          "<|alone|>": (399,)},
    "config.json": {
        "model_type": ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "smollm3", "", "gemma"),
        "tokenizer_class": ("LlamaTokenizer", "GPT2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast",
                            "BertTokenizer"),
    },
    "tokenizer.json": {
        "truncation": (_TRUNCATION, {**_TRUNCATION, "direction": "Right", "max_length": 1}),
        "padding": (_PADDING, {**_PADDING, "strategy": "BatchLongest"}, {**_PADDING, "pad_token": "<|new|>"}),
        "added_tokens": ([], None, [_added("<|new|>", 400)], [_added("<|new|>", 7, lstrip=True, special=False)],
                         [_added("hello", 300, special=False, normalized=True)], [{"content": "a"}], [5]),
        "normalizer": ({"type": "Lowercase"}, {"type": "NFC"}, {"type": "Prepend", "prepend": "x"}, {"type": "Nothing"},
                       None),
        "pre_tokenizer": ({"type": "Whitespace"}, _level(add_prefix_space=True), None, {"type": "Nothing"},
                          {"type": "Digits", "individual_digits": True}),
        "decoder": ({"type": "Fuse"}, {"type": "ByteFallback"}, None),
        "post_processor": (_begins("<|new|>", 5), {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                                                   "use_regex": True}, None),
        "model.dropout": (0.5, 0.0, 1.0), "model.ignore_merges": (True,), "model.byte_fallback": (True,),
        "model.unk_token": ("<unk>", "nothing"), "model.fuse_unk": (True,), "model.end_of_word_suffix": ("</w>", ""),
        "model.type": ("WordPiece", "Unigram", None), "model.merges": ([], ["h e"], [["h", "e"]], ["h e l"], None),
        "model.continuing_subword_prefix": ("##", ""), "version": ("2.0", None), "": (5, [], None),
    },
    "chat_template.jinja": {"": (_EVERY, "", "{% if %}", "{{ raise_exception('no  such\nthing') }}")},
    "additional_chat_templates/default.jinja": {"": (_EVERY,)},
    "additional_chat_templates/rag.jinja": {"": (_OTHER,)},
    "additional_chat_templates/file.jinja": {"": (_OTHER,)},
    "chat_template.json": {"": ({"chat_template": _OTHER},)},
}  # fmt: skip
"""Other values of the fields of each file. A dot leads into an object; no name is the whole file."""


@dataclass(frozen=True, slots=True)
class Directory:
    """The files of a directory, and what was changed in them."""

    name: str
    files: Files

    def write(self, folder: Path) -> Path:
        for name, content in self.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_bytes(text.encode("utf-8", "surrogatepass"))
        return folder


def _changed(files: Files, file: str, field: str, value: Any) -> Files:
    """The files with another value of a field, which may be absent now."""
    files = copy.deepcopy(files)
    if not field:
        files[file] = value
        return files
    holder = files.setdefault(file, {})
    *path, last = field.split(".") if file == "tokenizer.json" else [field]
    for name in path:
        holder = holder[name]
    holder[last] = copy.deepcopy(value)
    return files


def directories() -> Iterator[Directory]:
    """Each family as published; without each field and file; and with each value of _CHANGES."""
    for family, make in FAMILIES.items():
        files = make()
        yield Directory(family, files)
        for file in files:
            if file != "tokenizer.json":
                yield Directory(f"{family} without {file}", {name: files[name] for name in files if name != file})
            if isinstance(files[file], dict):
                for field in files[file]:
                    fewer = {name: value for name, value in files[file].items() if name != field}
                    yield Directory(f"{family} without {file} {field}", {**files, file: fewer})
        for file, fields in _CHANGES.items():
            for field, values in fields.items():
                for value in values:
                    named = f"{family} {file} {field}={json.dumps(value)[:60]}"
                    yield Directory(named, _changed(files, file, field, value))


def directory(seed: int) -> Directory:
    """A family with up to four changes, of those above and of any other kind."""
    random = Random(f"tokenizer:{seed}")
    family = random.choice(sorted(FAMILIES))
    files, told = FAMILIES[family](), [family]
    for _ in range(random.randint(1, 4)):
        file = random.choice(sorted(_CHANGES))
        field = random.choice(sorted(_CHANGES[file]))
        value = random.choice(_CHANGES[file][field])
        match random.randrange(6):
            case 0 if file in files and isinstance(files[file], dict) and file != "tokenizer.json":
                files[file], what = mutate_document(files[file], random), "changed"
            case 1 if file in files and isinstance(files[file], dict):
                files[file], what = mutate_by_type(files[file], random, 1), "changed within its types"
            case 2 if file in files and file != "tokenizer.json":
                del files[file]
                what = "gone"
            case _ if not field or isinstance(files.get(file, {}), dict):
                try:
                    files, what = _changed(files, file, field, value), f"{field}={json.dumps(value)[:60]}"
                except (KeyError, TypeError):
                    continue
            case _:
                continue
        told.append(f"{file} {what}")
    return Directory(f"{seed}: {'; '.join(told)}", files)


Outcome = dict[str, Any] | str
"""What a tokenizer makes of texts and chats; or why there is none."""


def by_flywheel(folder: Path) -> Outcome:
    """What flywheel makes of a directory, in this process."""
    from flywheel.models.tokenizer_loading import load
    from flywheel.models.tokenizing import done

    try:
        loaded = load(folder)
    except TokenizerError as error:
        return f"{error.fault}"
    except BaseException as error:  # noqa: BLE001  the library raises Exception itself, and a PanicException
        return f"library: {_passed(error)}"

    def asked(**request: Any) -> Any:
        try:
            return done(loaded, request)
        except BaseException as error:  # noqa: BLE001
            return f"refused: {_passed(error)}"

    texts = [asked(encode=text) for text in TEXTS]
    return {
        "special": dict(loaded.special), "end": loaded.end_id, "texts": texts,
        "back": [asked(decode=[ids])[0] for ids in texts if isinstance(ids, list)],
        "chats": [asked(chat=chat) for chat in CHATS],
    }  # fmt: skip


def _passed(error: BaseException) -> BaseException:
    """The error, unless somebody wants this process to end."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return error


def by_transformers(folder: Path) -> Outcome:
    """What transformers makes of a directory."""
    from transformers import AutoTokenizer

    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    try:
        made = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {_passed(error)}"[:300]

    def asked(call: Any) -> Any:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001
            return f"refused: {_passed(error)}"[:300]

    texts = [asked(lambda text=text: made(text)["input_ids"]) for text in TEXTS]
    template = asked(made.get_chat_template)
    return {
        "special": made.special_tokens_map, "end": made.eos_token_id, "texts": texts,
        "back": [
            asked(lambda ids=ids: made.decode(ids, skip_special_tokens=True)) for ids in texts if isinstance(ids, list)
        ],
        "chats": [
            None if "chat_template is not set" in str(template)
            else asked(lambda chat=chat: made.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
            for chat in CHATS
        ],
    }  # fmt: skip


def differences(ours: Outcome, theirs: Outcome) -> str | None:
    """How flywheel's tokenizer of a directory differs from transformers'; None where they are equal, or where flywheel
    refuses it by the name of a file."""
    if isinstance(ours, str):
        named = any(ours.startswith(f"{Path(name).name}: ") for name in _CHANGES) or ours.startswith("library: ")
        return None if named else f"refused without a file's name: {ours}"
    if isinstance(theirs, str):
        return f"transformers refuses it ({theirs[:200]})"
    for part, mine in ours.items():
        if _plain(mine) != _plain(theirs[part]):
            return f"{part}: {mine}, and of transformers {theirs[part]}"
    return None


def _plain(outcome: Any) -> Any:
    """An outcome without the words of refusals."""
    if isinstance(outcome, list):
        return [_plain(each) for each in outcome]
    return "refused" if isinstance(outcome, str) and outcome.startswith("refused: ") else outcome
