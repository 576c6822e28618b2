from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers, processors

from flywheel.errors import UsageError
from flywheel.models.tokenizer import Tokenizer, end_ids, has_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of three words that puts `<s>` before every text."""
    fast = Fast(models.WordLevel({"<s>": 0, "hello": 1, "world": 2, "?": 3}, unk_token="?"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    fast.add_special_tokens(["<s>"])
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_text_gets_the_special_tokens_that_the_model_expects(folder: Path) -> None:
    with Tokenizer(folder) as tokenizer:
        assert tokenizer.encode("hello world") == [0, 1, 2]


def test_text_comes_back_without_special_and_unknown_tokens(folder: Path) -> None:
    with Tokenizer(folder) as tokenizer:
        assert tokenizer.decode([0, 1, 2, 999]) == "hello world"


def test_tokens_are_spelled_alone_with_their_bytes(folder: Path, tmp_path: Path) -> None:
    with Tokenizer(folder) as tokenizer:
        assert tokenizer.spell([0, 1]) == [(" <s>", tuple(b" <s>")), (" hello", tuple(b" hello"))]
    letters = {"<0xE6>": 0, "\N{LOWER ONE EIGHTH BLOCK}world": 1, "?": 2}
    fast = Fast(models.BPE(vocab=letters, merges=[], unk_token="?", byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    (tmp_path / "other").mkdir()
    fast.save(str(tmp_path / "other" / "tokenizer.json"))
    with Tokenizer(tmp_path / "other") as tokenizer:
        assert tokenizer.spell([0, 1]) == [("\N{REPLACEMENT CHARACTER}", (0xE6,)), (" world", tuple(b" world"))]


def test_a_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    assert not has_tokenizer(tmp_path)
    with pytest.raises(UsageError, match=r"has no tokenizer\.json"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "no such"}}'])
def test_a_malformed_tokenizer_is_one_line_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"tokenizer\.json") as caught:
        Tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def change(folder: Path, **sections: object) -> Path:
    """The tokenizer of the directory with other sections."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **sections}))
    return folder


def test_a_tokenizer_that_takes_all_memory_ends_its_own_process(folder: Path) -> None:
    padding = {"strategy": {"Fixed": 10**10}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
               "pad_type_id": 0, "pad_token": "?"}  # fmt: skip
    with Tokenizer(change(folder, padding=padding)) as tokenizer, pytest.raises(UsageError, match=r"tokenizer\.json"):
        tokenizer.encode("hello")


def test_a_pattern_that_makes_the_library_panic_is_one_line(folder: Path) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
    changed = change(folder, pre_tokenizer=split)
    with Tokenizer(changed) as tokenizer, pytest.raises(UsageError, match="retry-limit"):
        tokenizer.encode("a" * 60 + "d")


def test_a_library_that_does_not_answer_is_given_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Tokenizer(folder) as tokenizer:
        monkeypatch.setattr("flywheel.models.tokenizer.LIMIT_S", 0.1)
        tokenizer._process.send_signal(signal.SIGSTOP)
        with pytest.raises(UsageError, match=r"no answer after 0\.1 s"):
            tokenizer.encode("hello")


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def test_the_generation_config_goes_before_the_config(tmp_path: Path) -> None:
    assert end_ids(tmp_path) == frozenset()
    write(tmp_path, config={"eos_token_id": 5})
    assert end_ids(tmp_path) == {5}
    write(tmp_path, generation_config={"eos_token_id": [7, 8]})
    assert end_ids(tmp_path) == {7, 8}


@pytest.mark.parametrize("silent", [{}, {"eos_token_id": None}])
def test_a_silent_generation_config_leaves_it_to_the_config(silent: object, tmp_path: Path) -> None:
    assert end_ids(write(tmp_path, config={"eos_token_id": [5]}, generation_config=silent)) == {5}


@pytest.mark.parametrize("ids", ["</s>", 1.5, True, [1, "2"], {"id": 1}])
def test_ends_that_are_no_ids_are_refused(ids: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"generation_config\.json.*eos_token_id"):
        end_ids(write(tmp_path, generation_config={"eos_token_id": ids}))


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff"])
def test_a_malformed_config_is_one_line_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"generation_config\.json") as caught:
        end_ids(tmp_path)
    assert "\n" not in str(caught.value)
