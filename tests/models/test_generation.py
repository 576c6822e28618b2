from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models
from transformers import GenerationConfig

from flywheel.errors import UsageError
from flywheel.models.generation import _END, _IRRELEVANT, end_ids, recommended
from flywheel.models.tokenizer import Tokenizer


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_the_generation_config_goes_before_the_config(tmp_path: Path) -> None:
    assert end_ids(tmp_path, None) == frozenset()
    write(tmp_path, config={"eos_token_id": 5})
    assert end_ids(tmp_path, None) == {5}
    write(tmp_path, generation_config={"eos_token_id": [7, 8]})
    assert end_ids(tmp_path, None) == {7, 8}


def test_a_text_also_ends_at_the_tokenizers_own_end(tmp_path: Path) -> None:
    Fast(models.WordLevel({"hello": 0, "world": 1}, unk_token="hello")).save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, tokenizer_config={"eos_token": "world"}, config={"model_type": "llama", "eos_token_id": 5})
    with Tokenizer(tmp_path) as tokenizer:
        assert end_ids(tmp_path, tokenizer) == {1, 5}
    write(tmp_path, tokenizer_config={})
    with Tokenizer(tmp_path) as tokenizer:
        assert end_ids(tmp_path, tokenizer) == {5}


@pytest.mark.parametrize("silent", [{}, {"eos_token_id": None}])
def test_a_silent_generation_config_leaves_it_to_the_config(silent: object, tmp_path: Path) -> None:
    assert end_ids(write(tmp_path, config={"eos_token_id": [5]}, generation_config=silent), None) == {5}


@pytest.mark.parametrize("ids", ["</s>", 1.5, True, [1, "2"], {"id": 1}])
def test_ends_that_are_no_ids_are_refused(ids: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"generation_config\.json.*eos_token_id"):
        end_ids(write(tmp_path, generation_config={"eos_token_id": ids}), None)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b"[]"])
def test_a_malformed_config_is_one_line_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"generation_config\.json") as caught:
        end_ids(tmp_path, None)
    assert "\n" not in str(caught.value)


def test_every_field_of_transformers_ends_texts_changes_no_token_or_is_told(tmp_path: Path) -> None:
    fields = set(GenerationConfig().__dict__)
    assert fields > _IRRELEVANT
    write(tmp_path, generation_config=dict.fromkeys([*fields, "unheard_of"], 3))
    told = {each.removesuffix(" 3") for each in recommended(tmp_path, {})}
    assert told == (fields - _IRRELEVANT - {_END}) | {"unheard_of"}


def test_values_that_ask_for_nothing_are_not_told(tmp_path: Path) -> None:
    usual = GenerationConfig._get_default_generation_params()
    del usual["top_k"]  # 50, which asks for something
    assert recommended(write(tmp_path, generation_config=usual), {}) == ()
    assert recommended(tmp_path / "nowhere", {}) == ()


def test_what_was_taken_is_not_told(tmp_path: Path) -> None:
    write(tmp_path, generation_config={"temperature": 0.6, "top_p": 0.95, "do_sample": True, "top_k": 20})
    assert recommended(tmp_path, {"temperature": 0.6, "top_k": 1, "do_sample": True}) == ("top_p 0.95", "top_k 20")
