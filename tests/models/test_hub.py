from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from flywheel.decode.source import open_source
from flywheel.errors import UnknownNameError, WeightsError
from flywheel.models.catalog import fetch_model, model_name, model_path, resolve_model
from flywheel.models.hub import cached_folder, cached_repo, obtain

CONFIG = (
    '{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, '
    '"num_attention_heads": 4, "vocab_size": 128, "max_position_embeddings": 256}'
)
REPO = "some-lab/Tiny-1M"


class HubError(Exception):
    """Stands for huggingface_hub's."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hub, and no hub but it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hf" / "hub"


def keep(cache: Path, commit: str = "c0ffee", repo: str = REPO) -> Path:
    """A snapshot in the cache, whose config.json is a link to a blob as the Hub's are; the one that main names."""
    owner = cache / f"models--{repo.replace('/', '--')}"
    snapshot = owner / "snapshots" / commit
    for folder in (snapshot, owner / "refs", owner / "blobs"):
        folder.mkdir(parents=True, exist_ok=True)
    (owner / "blobs" / f"blob{commit}").write_text(CONFIG, encoding="utf-8")
    (snapshot / "config.json").symlink_to(owner / "blobs" / f"blob{commit}")
    (owner / "refs" / "main").write_text(commit, encoding="utf-8")
    return snapshot


FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
    "model-00001-of-00001.safetensors", "model.safetensors.index.json",
    "original/model.safetensors", "onnx/config.json", "README.md", "pytorch_model.bin", "original/tokenizer.model",
]  # fmt: skip
"""Of a repository: eight files that describe it, two of its weights, and others."""


def with_hub(monkeypatch: pytest.MonkeyPatch, download: Any) -> None:
    """Pretend that huggingface_hub is installed, with this `snapshot_download`."""
    hub, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    errors.HfHubHTTPError = HubError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.setattr("flywheel.models.hub.find_spec", lambda name: object())


@pytest.mark.parametrize("asked", [REPO, REPO.lower(), "SOME-LAB/tiny-1m"])
def test_a_repository_of_the_cache_is_a_model_in_any_case(asked: str, cache: Path) -> None:
    snapshot = keep(cache)

    assert (model_name(asked), model_path(REPO)) == (REPO, snapshot)
    assert resolve_model(asked).name == "Tiny-1M"
    source = open_source(asked, any_weights=True)
    assert (source.name, source.folder, source.stored) == ("Tiny-1M", snapshot, None)


def test_a_repository_without_safetensors_is_not_run_with_random_weights_unasked(cache: Path) -> None:
    config = keep(cache) / "config.json"
    with pytest.raises(WeightsError, match=f"{REPO}: its snapshot {config.parent} holds no safetensors; give {config}"):
        open_source(REPO)
    assert open_source(str(config)).stored is None


def test_a_repository_and_its_directory_in_the_cache_are_one_model(cache: Path) -> None:
    old, new = keep(cache, "aaaa"), keep(cache, "bbbb")

    for spelling in (str(new), str(new / "config.json"), REPO, "hf/hub/models--some-lab--Tiny-1M/snapshots/bbbb"):
        assert model_name(spelling) == REPO
    assert model_name(str(old)) == str(old)


def test_a_directory_goes_before_a_repository(cache: Path, tmp_path: Path) -> None:
    keep(cache)
    (tmp_path / REPO).mkdir(parents=True)

    assert model_name(REPO) == str(tmp_path / REPO)


def test_what_the_cache_does_not_have_is_none(cache: Path) -> None:
    assert (cached_repo(REPO), cached_folder(REPO), cached_repo("no/such/thing"), cached_repo("plain")) == (None,) * 4
    (cache / "models--some-lab--Tiny-1M" / "snapshots" / "c0ffee").mkdir(parents=True)  # without a config
    assert cached_repo(REPO) is None


def test_without_huggingface_hub_the_line_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.models.hub.find_spec", lambda name: None)

    with pytest.raises(UnknownNameError, match=rf"^model '{REPO}' is no directory and not in .*\[hf\]'$"):
        obtain(REPO, True, lambda line: None)


def test_a_download_is_announced_and_brings_the_model(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def download(repo: str, **options: Any) -> None:
        asked.append((repo, options["allow_patterns"], options["ignore_patterns"]))
        keep(cache)

    with_hub(monkeypatch, download)
    said: list[str] = []

    assert fetch_model(REPO, False, said.append) == REPO
    assert said == [f"downloading {REPO} from the Hugging Face Hub, without its weights"]
    assert asked[0][0] == REPO and "*.safetensors" not in asked[0][1]
    assert list(filter_repo_objects(FILES, allow_patterns=asked[0][1], ignore_patterns=asked[0][2])) == FILES[:8]
    fetch_model(REPO, False, said.append)
    assert len(asked) == 1
    fetch_model(REPO, True, said.append)
    assert list(filter_repo_objects(FILES, allow_patterns=asked[1][1], ignore_patterns=asked[1][2])) == FILES[:10]


@pytest.mark.parametrize("error", [HubError("401\nno such"), OSError("no route"), ValueError("bad")])
def test_a_download_that_fails_is_one_line_that_says_what_to_do(
    error: Exception, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, **options: Any) -> None:
        raise error

    with_hub(monkeypatch, download)
    with pytest.raises(UnknownNameError, match=rf"^model '{REPO}' .*the download failed .*hf download {REPO}, then"):
        obtain(REPO, True, lambda line: None)
    keep(cache)
    said: list[str] = []
    obtain(REPO, True, said.append)
    assert "its weights are not in" in said[-1] and "\n" not in said[-1]


def test_offline_nothing_is_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UnknownNameError, match="HF_HUB_OFFLINE forbids"):
        obtain(REPO, True, lambda line: None)
