from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizer_directories import FAMILIES, Directory, by_flywheel, by_transformers, differences, directories, directory

from flywheel.errors import TokenizerError
from flywheel.models.tokenizer_files import TOKENIZER
from flywheel.models.tokenizer_loading import load

EVERY = list(directories())
STEP = 40
"""Of the changed directories, how many there are for each that the short run takes."""
SEEDS = range(30)


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
def test_every_field_of_every_file_gives_transformers_tokenizer_or_is_refused_by_name(tmp_path: Path) -> None:
    assert len(EVERY) >= 300
    for place, case in enumerate(EVERY):
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
    """SmolLM2's file splits digits, which GPT2Tokenizer does not. Llama 2's puts a space before a space at a text's
    beginning, which LlamaTokenizer does not."""
    assert load(Directory("", FAMILIES[family]()).write(tmp_path)).anew is (family in ("smollm2", "llama2"))


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
