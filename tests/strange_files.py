"""Files of strangers that look right: a good file of its kind, of many forms, with one or two values of another worth.

The same generator makes the same. What is behind the first checks of a reader is reached by these.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from random import Random
from typing import Any, Final

from mutations import mutate_by_type

_NEAR_INTS: Final = (0, 1, 2, 3, 7, 8, 9, 16, 31, 33, 64, 120, 1000, 4097, 2**20, 2**31, 2**63 - 1, 2**63, -1)
_NEAR_FLOATS: Final = (0.0, 1e-300, 1e-9, 0.5, 0.999, 1.0, 1.0001, 2.0, 60.0, 1e9, 1e300)
_NAMES: Final = ("x", "good", "a b", "é", "٣", "-", "--help", "../x", "CON", "x" * 300, "a;b", "%s", "x.2")

_CAMPAIGN: Final[Mapping[str, tuple[Any, ...]]] = {
    "gpu": ("l4", "h100", "b200", "a100", "generic", "L4", "h100 "),
    "dtype": ("f32", "bf16", "f16", "f64", "fp8", "F32"),
    "context": _NEAR_INTS,
    "batch": _NEAR_INTS,
    "sampler": ("descent", "local", "tpe", "cmaes", "random", "grid", "gp", "none"),
    "seed": _NEAR_INTS,
    "trials": _NEAR_INTS,
    "time_s": _NEAR_FLOATS,
    "until": _NEAR_FLOATS,
    "patience": _NEAR_INTS,
    "predictions": _NEAR_INTS,
    "prefilter": _NEAR_FLOATS,
    "workers": (1, 0, 2, 1025),
    "seeds": (True, False),
    "warm": (True, False),
    "machine": ("m.json", "c.toml", "", "/dev/null", "."),
    "engine": ("local", "ray?"),
    "ray_address": ("127.0.0.1:1", "nowhere"),
    "name": _NAMES,
}
"""Options of an options file with values of their type; some good, some at a bound, some beside it."""

_KNOBS: Final[Mapping[str, tuple[Any, ...]]] = {
    "depth": ("2", 2, 4, "1", "4096", "two"),
    "placement": ("round_robin", "packed", "none", 1),
    "threads": (192, "192", "320", 512, 0),
    "rows.qkv": ("16", 16, "16", "32", "0"),
    "fuse.out": ("1", "0", True, "2"),
    "pages": ("none", "x"),
    "hand_off": ("data", "counter", "?"),
    "": ("1",),
    "nothing": ("1",),
}


def options_file(model: str, random: Random) -> bytes:
    """TOML with some options and pinned knobs, each of its type."""
    good: dict[str, Any] = {"model": model, "gpu": "l4", "dtype": "f32", "context": 32, "sampler": "random"}
    good["trials"] = 3
    for name in random.sample(sorted(_CAMPAIGN), random.choice((1, 1, 2, 3))):
        good[name] = random.choice(_CAMPAIGN[name])
    knobs = random.sample(sorted(_KNOBS), random.choice((0, 0, 0, 1)))
    lines = [f"{name} = {json.dumps(value)}" for name, value in good.items()]
    lines += ["[fix]", *(f"{json.dumps(knob)} = {json.dumps(random.choice(_KNOBS[knob]))}" for knob in knobs)]
    return ("\n".join(lines) + "\n").encode()


_SIZES: Final[Mapping[str, tuple[int, ...]]] = {
    "hidden_size": (64, 128, 4096, 16384, 2**20),
    "intermediate_size": (96, 4096, 53248, 2**20),
    "num_hidden_layers": (1, 2, 4, 61, 126, 1023, 1024),
    "num_attention_heads": (1, 8, 64, 128, 4096),
    "head_dim": (8, 64, 128, 256),
    "vocab_size": (96, 128_256, 2**22),
    "max_position_embeddings": (64, 512, 131_072, 2**31 - 1),
}


def sizes_of(config: Mapping[str, Any], random: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model's config with sizes that are each within their limit, and a schedule's tiles for it."""
    names = random.sample(sorted(_SIZES), random.randint(2, len(_SIZES)))
    sizes = {name: random.choice(_SIZES[name]) for name in names}
    heads = sizes.get("num_attention_heads", config["num_attention_heads"])
    sizes["num_key_value_heads"] = random.choice([each for each in (1, 8, heads) if heads % each == 0])
    tiling: dict[str, Any] = {}
    if random.random() < 0.5:
        tiling["attention"] = {"kv_block": random.choice((16, 128, 4096))}
    if random.random() < 0.3:
        tiling["gemv"] = {"N_tile": random.choice((16, 64, 512))}
    pages = {"page_allocation": random.choice(("none", "linear"))}
    return {**config, **sizes}, {"tiling": tiling, **(pages if random.random() < 0.5 else {})}


_ITEM_BYTES: Final = {
    "F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I8": 1, "I32": 4, "I64": 8, "U8": 1, "U16": 2, "BOOL": 1, "F8_E4M3": 1,
    "F8_E5M2": 1, "C64": 8, "f32": 4,
}  # fmt: skip


def safetensors_file(raw: bytes, random: Random) -> bytes:
    """A checkpoint with one or two tensors of another shape, type, place or name, or other bytes in one."""
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    for _ in range(random.randint(1, 2)):
        tensors = [name for name in header if name != "__metadata__"]
        name = random.choice(tensors)
        _change_tensor(header, header[name], name, random)
        if random.random() < 0.3:
            start = random.randrange(len(data))
            odd = struct.pack("<f", random.choice((float("nan"), float("inf"), 1e-42, -3e38, 0.0)))
            data[start - start % 4 : start - start % 4 + 4] = odd * random.choice((1, 1, 64))
    if random.random() < 0.7:
        data = _laid_out(header, data)
    text = json.dumps(header).encode() + b" " * random.choice((0, 0, 1, 7, 4096))
    return struct.pack("<Q", len(text)) + text + bytes(data)


def _laid_out(header: dict[str, Any], data: bytearray) -> bytearray:
    """Give each tensor the place that its shape and type ask for, one behind the other; the data, as long as that."""
    end = 0
    for tensor in header.values():
        if not isinstance(tensor, dict) or "shape" not in tensor:
            continue
        start, end = end, end + _ITEM_BYTES.get(tensor["dtype"], 4) * prod(max(0, size) for size in tensor["shape"])
        tensor["data_offsets"] = [start, end]
    return (data * 3)[:end]


def _change_tensor(header: dict[str, Any], tensor: dict[str, Any], name: str, random: Random) -> None:
    shape, (start, end) = tensor["shape"], tensor["data_offsets"]
    match random.randrange(9):
        case 0:
            tensor["dtype"] = random.choice(list(_ITEM_BYTES))
        case 1:
            tensor["shape"] = shape[::-1]
        case 2:
            tensor["shape"] = random.choice(([1, *shape], [*shape, 1], [prod(shape)], [], [0, *shape]))
        case 3:
            tensor["shape"] = [size + random.choice((-1, 0, 1)) for size in shape]
        case 4:
            tensor["data_offsets"] = random.choice(
                ([start + 4, end + 4], [start, start], [end, start], [start, end - 1], [0, end], [start, 2**63])
            )
        case 5:
            other = header[random.choice([each for each in header if each != "__metadata__"])]
            tensor["data_offsets"], other["data_offsets"] = other["data_offsets"], tensor["data_offsets"]
        case 6:
            others = (name.removeprefix("model."), f"{name}.x", name.replace(".0.", ".1."), "lm_head.weight")
            header[random.choice(others)] = header.pop(name)
        case 7:
            header["__metadata__"] = random.choice(({}, {"format": "pt"}, {"format": 1}, {"x": None}, [], "pt"))
        case _:
            header[random.choice((f"{name}_scale_inv", f"{name}.absmax", "lm_head.weight", "x"))] = dict(tensor)


_LETTERS: Final = [" ", *"abcdefghijklmnopqrstuvwxyz"]
_REGEXES: Final = (r"\s+", r"(a+)+b", r"\p{L}+|\p{N}", "[", "(?=a)", "", "a{1,9999}", r"\b", "(?i)A", "^(.*)*$")


def tokenizer_document(random: Random) -> dict[str, Any]:
    """A tokenizer of some kind, which the library reads, with parts of every sort."""
    vocabulary = {letter: number for number, letter in enumerate(_LETTERS)}
    models: list[dict[str, Any]] = [
        {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
         "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
         "vocab": {**vocabulary, "ab": 27, "abc": 28}, "merges": [["a", "b"], ["ab", "c"]]},
        {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
         "vocab": {**vocabulary, "[UNK]": 27, "##b": 28}},
        {"type": "WordLevel", "vocab": {**vocabulary, "ab": 27, "[UNK]": 28}, "unk_token": "[UNK]"},
        {"type": "Unigram", "unk_id": 0, "byte_fallback": False,
         "vocab": [["<unk>", 0.0], *([each, -1.5] for each in _LETTERS), ["ab", -0.5]]},
    ]  # fmt: skip
    regex = random.choice(_REGEXES)
    normalizers = [
        None, {"type": "NFC"}, {"type": "Lowercase"}, {"type": "Strip", "strip_left": True, "strip_right": True},
        {"type": "Prepend", "prepend": "a"}, {"type": "Replace", "pattern": {"Regex": regex}, "content": "b"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "aa"},
    ]  # fmt: skip
    splitters = [
        None, {"type": "Whitespace"}, {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": True},
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
        {"type": "Punctuation", "behavior": "Isolated"},
    ]  # fmt: skip
    template = [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processors = [
        None, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True},
        {"type": "TemplateProcessing", "single": template, "pair": template,
         "special_tokens": {"a": {"id": "a", "ids": [1], "tokens": ["a"]}}},
    ]  # fmt: skip
    decoders = [
        None, {"type": "Fuse"}, {"type": "ByteFallback"}, {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Strip", "content": " ", "start": 1, "stop": 1},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    ]  # fmt: skip
    added = {"id": 29, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
             "special": True}  # fmt: skip
    cutting = {"direction": "Right", "max_length": 64, "strategy": "LongestFirst", "stride": 0}
    filling = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "a"}  # fmt: skip
    return {
        "version": "1.0", "truncation": random.choice((None, None, cutting)),
        "padding": random.choice((None, None, filling)), "added_tokens": random.choice(([], [added])),
        "normalizer": _some(normalizers, "normalizers", random),
        "pre_tokenizer": _some(splitters, "pretokenizers", random),
        "post_processor": random.choice(processors), "decoder": _some(decoders, "decoders", random),
        "model": random.choice(models),
    }  # fmt: skip


def _some(parts: list[Any], name: str, random: Random) -> Any:
    """One of the parts, or a sequence of two."""
    if random.random() < 0.7:
        return random.choice(parts)
    return {"type": "Sequence", name: random.sample([part for part in parts if part is not None], 2)}


def tokenizer_file(random: Random) -> bytes:
    """A tokenizer that is read, or nearly: one or two of its values are others of their type."""
    document = tokenizer_document(random)
    return json.dumps(mutate_by_type(document, random, random.choice((0, 1, 1, 2)))).encode("utf-8", "surrogatepass")
