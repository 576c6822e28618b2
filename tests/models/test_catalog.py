from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flywheel.errors import BundleError, UnknownNameError, UnsupportedModelError
from flywheel.models.catalog import CATALOG, fetch_model, model_name, modules_of, resolve_model
from flywheel.models.families import count_params

PUBLISHED_PARAMETERS = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-small-24b": 23_572_403_200,
    "ministral3-8b": 8_489_553_920,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-4b-2507": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm3-3b": 3_075_098_624,
    "phi-4": 14_659_507_200,
    "phi-3.5-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760,
    "glm-4-9b-0414": 9_400_279_040,
    "glm-4-32b-0414": 32_566_081_536,
    "granite-3.3-2b": 2_533_539_840,
    "granite-3.3-8b": 8_170_864_640,
    "granite-4.0-micro": 3_402_836_480,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "command-r7b": 8_028_033_024,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "olmo3-7b": 7_298_011_136,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "gemma4-12b": 11_907_350_320,
    "gemma4-31b": 30_697_345_340,
}

MINIMAL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def test_parameter_counts_are_the_published_ones() -> None:
    assert {name: count_params(spec) for name, spec in CATALOG.items()} == PUBLISHED_PARAMETERS


def test_a_path_that_is_not_there_is_answered_with_the_closest_model_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for folder in (Path("tiny"), Path("models", "small-one")):
        folder.mkdir(parents=True)
        (folder / "config.json").touch()
    whole = str(tmp_path / "tiny")
    for asked, closest in (("./tinny", "./tiny"), ("tinyy/", "tiny"), (f"{whole}y", whole)):
        with pytest.raises(UnknownNameError, match=rf"did you mean {re.escape(closest)}\?$"):
            resolve_model(asked)
    with pytest.raises(UnknownNameError, match=r"did you mean models/small-one\?$"):
        fetch_model("models/smal-one", False, lambda line: None)


def test_a_name_needs_torch_and_a_checkpoint_what_reads_its_files(tmp_path: Path) -> None:
    assert modules_of("llama3-8b") == ["torch"]
    assert modules_of("Nobody/Never-Cached") == ["torch", "safetensors", "huggingface_hub"]
    (tmp_path / "config.json").touch()
    assert modules_of(str(tmp_path)) == ["torch"]
    (tmp_path / "model.safetensors").touch()
    assert modules_of(str(tmp_path)) == modules_of(str(tmp_path / "config.json")) == ["torch", "safetensors"]


def test_each_spec_is_filed_under_its_own_name() -> None:
    assert all(spec.name == name for name, spec in CATALOG.items())


def test_a_catalog_name_wins_over_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama3-8b").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("llama3-8b") is CATALOG["llama3-8b"]


def test_a_path_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL))
    assert resolve_model(str(tmp_path)).name == tmp_path.name
    assert resolve_model(str(tmp_path / "config.json")) == resolve_model(str(tmp_path))


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("asked", "closest"),
    [("llama3-8", "llama3-8b"), ("Qwen3-8", "qwen3-8b"), ("mistral", "mistral-7b"), ("Qwen/Qwen3-8B", "qwen3-8b")],
)
def test_an_unknown_name_is_answered_with_the_closest(asked: str, closest: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"did you mean .*{closest}"):
        resolve_model(asked)


@pytest.mark.parametrize("asked", ["", "zzzzzz", "a\0b", "x" * 10_000])
def test_a_name_like_no_other_is_answered_with_where_all_are(asked: str) -> None:
    with pytest.raises(UnknownNameError, match=r"; flywheel models lists all$"):
        resolve_model(asked)


@pytest.mark.parametrize("asked", ["Qwen3-8B", "QWEN3-8b", "qwen3-8b"])
def test_the_case_of_a_name_does_not_matter(asked: str) -> None:
    assert model_name(asked) == "qwen3-8b"
    assert resolve_model(asked) is CATALOG["qwen3-8b"]


def test_a_directory_is_one_model_in_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MINIMAL), encoding="utf-8")
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)

    for spelling in ("tiny", "./tiny", "tiny/", "tiny/config.json", "tiny/../tiny", "link", str(folder)):
        assert model_name(spelling) == str(folder)


@pytest.mark.parametrize("given", ["b1", "b1/config.json"])
def test_a_bundle_is_no_model_and_the_line_says_what_runs_it(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("b1").mkdir()
    Path("b1", "config.json").write_text(json.dumps(MINIMAL))
    Path("b1", "bundle.json").write_text("{}")
    with pytest.raises(BundleError, match=rf"^{given}: is a bundle, not a checkpoint; Decoder\.load .* run it$"):
        resolve_model(given)
