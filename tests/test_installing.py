from __future__ import annotations

import json
from pathlib import Path

import pytest

from flywheel import installing
from flywheel.installing import DISTRIBUTION, cuda_extra, install_line, lacking


class Installed:
    """A distribution with a record of where it came from."""

    def __init__(self, origin: object) -> None:
        self.origin = origin

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self.origin is None else json.dumps(self.origin)


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source tree on a machine without a driver."""
    monkeypatch.setattr(installing, "_DRIVER_FILE", tmp_path / "none")
    folder = tmp_path / "my flywheel"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def installed(monkeypatch: pytest.MonkeyPatch, origin: object) -> None:
    monkeypatch.setattr(installing, "distribution", lambda name: Installed(origin))


def test_from_an_index_the_line_names_the_distribution(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)

    assert install_line() == f"pip install {DISTRIBUTION}"
    assert install_line("cuda", "torch", "cuda") == f"pip install '{DISTRIBUTION}[cuda,torch]'"


@pytest.mark.parametrize(("editable", "option"), [(True, "--editable "), (False, "")])
def test_from_a_directory_the_line_names_it(
    editable: bool, option: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, {"url": tree.as_uri(), "dir_info": {"editable": editable}})

    assert install_line("hf") == f"pip install {option}'{tree}[hf]'"


def test_what_is_lacking_is_named_with_one_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    monkeypatch.setattr(installing, "find_spec", lambda name: object() if name == "torch" else None)

    assert lacking("it", ["torch"]) is None
    assert lacking("it", ["torch", "fastapi"]) == f"it needs fastapi: pip install '{DISTRIBUTION}[serve]'"
    assert lacking("it", ["safetensors", "tokenizers", "uvicorn"]) == (
        f"it needs safetensors, tokenizers and uvicorn: pip install '{DISTRIBUTION}[hf,serve]'"
    )


def test_from_a_directory_that_is_gone_the_line_names_the_distribution(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch, {"url": tree.as_uri(), "dir_info": {}})
    (tree / "pyproject.toml").unlink()

    assert install_line("hf") == f"pip install '{DISTRIBUTION}[hf]'"


def test_from_a_wheel_or_a_repository_the_line_names_its_url(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, {"url": "file:///wheels/f.whl", "archive_info": {}})
    assert install_line("hf") == f"pip install '{DISTRIBUTION}[hf] @ file:///wheels/f.whl'"

    vcs = {"vcs": "git", "requested_revision": "main", "commit_id": "0" * 40}
    installed(monkeypatch, {"url": "https://host/f", "vcs_info": vcs})
    assert install_line() == f"pip install '{DISTRIBUTION} @ git+https://host/f@main'"


def test_a_tree_that_was_never_installed_is_installed_from_where_it_lies(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> object:
        raise installing.PackageNotFoundError(name)

    monkeypatch.setattr(installing, "distribution", missing)
    monkeypatch.setattr(installing, "_SOURCE_ROOT", tree)

    assert install_line("ray") == f"pip install --editable '{tree}[ray]'"


def test_a_driver_of_cuda_12_takes_the_extra_for_it(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    (tree / "version").write_text(told)
    monkeypatch.setattr(installing, "_DRIVER_FILE", tree / "version")
    installed(monkeypatch, None)

    assert install_line("cuda", "torch") == f"pip install '{DISTRIBUTION}[cuda12,torch]'"
    assert [cuda_extra(driver) for driver in ("580.65.06", "575.51", None, "N/A")] == ["cuda", "cuda12", "cuda", "cuda"]
