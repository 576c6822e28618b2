from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizer_directories import FAMILIES, Directory, by_flywheel, by_transformers, differences, directories, directory
from transformers import AutoTokenizer
from transformers.models.auto import tokenization_auto

from flywheel.errors import TokenizerError
from flywheel.models import families as models
from flywheel.models.family import Family
from flywheel.models.tokenizer_files import TOKENIZER
from flywheel.models.tokenizer_loading import load
from flywheel.models.tokenizing import done
from flywheel.serve.text import Streamer, push_all

EVERY = list(directories())
STEP = 80
"""Of the changed directories, how many there are for each that the short run takes."""
SEEDS = range(30)
PARTS = (
    "hello", "w", "or", " ", "  ", "\n", "\n\n", "\t", "1", "12", "ab", "é", "e\u0301", "語", "\U0001f600", "\ufffd",
    "<s>", "</s>", "<bos>", "<|im_start|>", "<|im_end|>", "<|new|>", "<unk>", "▁", "Ġ", "'s", "\r\n", "\x00", "\u200b",
    "\u00a0", "<0x41>", "<start_of_turn>", "<|END_OF_TURN_TOKEN|>",
)  # fmt: skip
"""What texts are drawn from."""


def check(case: Directory, folder: Path) -> None:
    """flywheel's tokenizer of a directory is transformers', or is refused by the name of a file."""
    case.write(folder)
    found = differences(by_flywheel(folder), by_transformers(folder))
    assert found is None, f"{case.name}: {found}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_published_tokenizer_is_what_transformers_makes_of_it(family: str, tmp_path: Path) -> None:
    check(Directory(family, FAMILIES[family]()), tmp_path)
    assert not isinstance(by_flywheel(tmp_path), str), "refused"


def test_a_changed_field_gives_transformers_tokenizer_or_is_refused_by_name(tmp_path: Path) -> None:
    for place, case in enumerate(EVERY[::STEP]):
        check(case, tmp_path / str(place))


@pytest.mark.long
def test_fields_of_every_file_give_transformers_tokenizer_or_is_refused_by_name(tmp_path: Path) -> None:
    assert len(EVERY) >= 4000
    for place, case in enumerate(EVERY[::2]):
        check(case, tmp_path / str(place))


def test_changes_at_random_give_transformers_tokenizer_or_are_refused_by_name(tmp_path: Path) -> None:
    for seed in SEEDS:
        check(directory(seed), tmp_path / str(seed))


@pytest.mark.long
def test_many_changes_at_random_give_transformers_tokenizer_or_are_refused_by_name(tmp_path: Path) -> None:
    for seed in range(100, 500):
        check(directory(seed), tmp_path / str(seed))


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("tokenizer_config.json", "bos_token", "<|end|>"), ("tokenizer_config.json", "split_special_tokens", True),
        ("tokenizer.json", "pre_tokenizer", None),
        ("tokenizer_config.json", "chat_template", "x"), ("tokenizer_config.json", "eos_token", "hello"),
        ("tokenizer.json", "post_processor", None), ("tokenizer_config.json", "additional_special_tokens", ["hello"]),
    ],
)  # fmt: skip
def test_a_difference_is_seen(file: str, field: str, value: object, tmp_path: Path) -> None:
    """The comparison itself: of two directories, one of them with another value."""
    good = FAMILIES["llama3"]()
    changed = {**good, file: {**good[file], field: value}}
    ours = by_flywheel(Directory("good", good).write(tmp_path / "good"))
    theirs = by_transformers(Directory("changed", changed).write(tmp_path / "changed"))
    assert differences(ours, theirs) is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_class_that_splits_otherwise_than_the_file_says_so(family: str, tmp_path: Path) -> None:
    """SmolLM2's and StarCoder2's files split digits, which GPT2Tokenizer does not. Llama 2's puts a space before a
    space at a text's beginning, which LlamaTokenizer does not."""
    anew = load(Directory("", FAMILIES[family]()).write(tmp_path)).anew
    assert anew is (family in ("smollm2", "starcoder2", "llama2"))


@pytest.mark.parametrize("family", models.FAMILIES.values(), ids=attrgetter("name"))
def test_a_family_has_the_class_of_tokenizers_that_transformers_takes(family: Family) -> None:
    for kind in filter(None, (family.name, family.text_of)):
        theirs = tokenization_auto.TOKENIZER_MAPPING_NAMES.get(kind)
        assert family.tokenizer == ("TokenizersBackend" if theirs == "MistralCommonBackend" else theirs)
        wins = kind in tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        assert family.tokenizer == "TokenizersBackend" or family.tokenizer_wins is wins


@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_texts_have_transformers_tokens_and_come_whole_in_pieces(family: str, tmp_path: Path) -> None:
    Directory("", FAMILIES[family]()).write(tmp_path)
    ours, theirs, random = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path), Random(family)
    for _ in range(60):
        text = "".join(random.choices(PARTS, k=random.randint(0, 12)))
        ids = done(ours, {"encode": text})
        assert ids == theirs(text)["input_ids"], repr(text)
        (back,) = done(ours, {"decode": [ids]})
        assert back == theirs.decode(ids, skip_special_tokens=True), repr(text)
        streamer = Streamer()
        pieces = [push_all(lambda each: done(ours, {"decode": each}), [(streamer, number)])[0] for number in ids]
        assert "".join(map(str, [*pieces, streamer.end()])) == back, repr(text)


def refusal(folder: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        load(folder)
    return caught.value.fault


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tokenizer_class": "T5TokenizerFast"}, "tokenizer_class: 'T5Tokenizer' is none of "),
        ({"tokenizer_class": 5}, "tokenizer_class: is no name"),
        ({"auto_map": {"AutoTokenizer": ["a.B", None]}}, "auto_map: names code "),
        ({"bos_token": 5}, "bos_token: is no token"),
        ({"extra_special_tokens": [5]}, r"extra_special_tokens\.0: is no token"),
        ({"added_tokens_decoder": {"7": {"content": "a", "lstrip": 1}}}, r"added_tokens_decoder\.7: is no token of "),
        ({"chat_template": ["x"]}, "chat_template: is a list of "),
        ({"split_special_tokens": None}, "split_special_tokens: is neither "),
        ({"fix_mistral_regex": True}, "fix_mistral_regex: is not supported"),
    ],
)  # fmt: skip
def test_a_field_without_that_effect_here_is_refused_by_name(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    files = FAMILIES["bare"]()
    Directory("", {**files, "tokenizer_config.json": settings}).write(tmp_path)
    with pytest.raises(TokenizerError, match=rf"tokenizer_config\.json': {words}"):
        load(tmp_path)


def test_words_that_are_dropped_at_random_are_refused(tmp_path: Path) -> None:
    files = FAMILIES["bare"]()
    files[TOKENIZER]["model"]["dropout"] = 0.5
    assert refusal(Directory("", files).write(tmp_path)).startswith("tokenizer.json: model.dropout: is not 0")


def test_spaces_of_shown_text_are_not_taken_back(tmp_path: Path) -> None:
    files = FAMILIES["bare"]()
    files[TOKENIZER]["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    files["tokenizer_config.json"] = {"clean_up_tokenization_spaces": True}
    Directory("", files).write(tmp_path)
    assert refusal(tmp_path).startswith("tokenizer_config.json: clean_up_tokenization_spaces: takes spaces ")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"clean_up_tokenization_spaces": False}))
    assert load(tmp_path).fast.encode("a").ids == [0]
