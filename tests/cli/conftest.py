from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from flywheel.cli.main import cli
from flywheel.measure.environment import Environment, capture_environment

Run = Callable[..., Result]

MODEL = ("--model", "smollm2-135m", "--gpu", "l4")
SEARCH = ("search", *MODEL, "--measure", "predict", "--jobs", "1")
SHALLOW = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 2, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 4096,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
"""Two of the 30 layers of smollm2-135m, and a twelfth of its words: programs of a thirteenth of the tasks."""


def invoke(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments], input=stdin)


def quieten(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """No options from outside, and that working directory."""
    for name in [name for name in os.environ if name.startswith("FLYWHEEL_")]:
        patch.delenv(name)
    patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    patch.chdir(folder)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No options from outside, and a working directory of its own."""
    quieten(monkeypatch, tmp_path)


@pytest.fixture
def run() -> Run:
    """Run a command in this process: `run("models", "--json")`."""
    return invoke


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Pretend that this machine has the GPU of that name, or none: `with_gpu(name, driver="1")`."""

    def pretend(gpu: str | None, driver: str = "1") -> None:
        def capture() -> Environment:
            return replace(capture_environment(), gpu=gpu, driver=None if gpu is None else driver)

        monkeypatch.setattr("flywheel.search.trials.sites.capture_environment", capture)
        monkeypatch.setattr("flywheel.search.trials.sites.list_gpus", list)

    return pretend


@pytest.fixture(scope="session")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one finished campaign, `small`; tests read it only."""
    store = tmp_path_factory.mktemp("searched") / "trials.db"
    result = invoke(*SEARCH, "--trials", "5", "--name", "small", "--store", str(store))
    assert result.exit_code == 0, result.stderr
    return store


@pytest.fixture
def store(searched: Path) -> str:
    """A copy of that store, to be written to."""
    with closing(sqlite3.connect(searched)) as source, closing(sqlite3.connect("trials.db")) as copy:
        source.backup(copy)  # what is still in its write-ahead log, too
    return "trials.db"


@pytest.fixture(scope="session")
def _shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "shallow"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHALLOW), encoding="utf-8")
    return folder


@pytest.fixture
def shallow(_shallow: Path, quiet_environment: None) -> str:
    """A folder here with a model of two layers, of which nothing but the config is there: `--model shallow`."""
    Path("shallow").symlink_to(_shallow)
    return "shallow"


@pytest.fixture(scope="session")
def program(_shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a lowered program, of that model on an l4."""
    path = tmp_path_factory.mktemp("program") / "program.json"
    result = invoke("lower", "--model", _shallow, "--gpu", "l4", "--output", path)
    assert result.exit_code == 0, result.stderr
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random llama as transformers saves it, in float32, with a tokenizer of bytes; tests read it only."""
    from checkpoints import bytes_llama

    folder = tmp_path_factory.mktemp("checkpoint")
    bytes_llama(folder, 128)
    return folder
