"""`flywheel export --format bundle`, its kernel compiled by NVRTC."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from emulator.bundles import write_checkpoint
from safetensors.torch import load_file, save_file

from flywheel.ir import ScheduleConfig, config_to_dict
from flywheel.runtime.reading import read_bundle
from flywheel.store.schedule import load_schedule

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("held") / "small", dtype="bfloat16")


@pytest.fixture
def store(run: Run, checkpoint: Path, tmp_path: Path) -> Path:
    found = run(
        "search", "--model", checkpoint, "--gpu", "h200", "--context", 48, "--batch", 2, "--measure", "predict",
        "--trials", 2, "--name", "tiny", "--store", tmp_path / "trials.db",
    )  # fmt: skip
    assert found.exit_code == 0, found.stderr
    return tmp_path / "trials.db"


def test_the_best_row_is_a_bundle_for_its_gpu_whatever_is_here(
    run: Run, store: Path, checkpoint: Path, tmp_path: Path
) -> None:
    exported = ("export", "--campaign", "tiny", "--store", store)
    result = run(*exported, "--format", "bundle", "--output", "bundle", "--json")
    assert result.exit_code == 0, result.stderr
    assert "wrote bundle: " in result.stderr
    bundle = read_bundle(Path("bundle"))
    assert json.loads(result.stdout)["config_id"] == bundle.manifest["schedule"]["config_id"]
    assert run(*exported, "--format", "schedule", "--output", "best.json").exit_code == 0
    schedule = load_schedule("best.json")
    assert bundle.manifest["schedule"]["exported"]["config_id"] == schedule.config_id
    assert bundle.manifest["provenance"]["program_id"] == schedule.program_id
    assert (bundle.manifest["target"]["name"], bundle.kernel.arch) == ("h200", "sm_90a")
    assert bundle.kernel.cubin.startswith(b"\x7fELF")
    assert bundle.kernel.usage.registers > 0
    assert (bundle.manifest["model"]["context"], bundle.manifest["model"]["batch"]) == (48, 2)
    assert "config.json" in bundle.manifest["files"]
    again = run("export", "--format", "bundle", "--config", "best.json", "--output", "again")
    assert again.exit_code == 0, again.stderr
    for name in ("kernel.cubin", "tables.bin", "labels.json"):
        assert Path("again", name).read_bytes() == Path("bundle", name).read_bytes()
    taken = run(*exported, "--format", "bundle", "--output", "bundle")
    assert taken.exit_code == 2
    assert "reading the weights" not in taken.stderr
    refused = run(*exported, "--format", "bundle", "--output", "/proc/bundle")
    assert refused.exit_code == 2, refused.stderr
    assert "/proc/bundle: cannot be written" in refused.stderr
    shown = json.loads(Path("bundle", "bundle.json").read_text())
    assert str(tmp_path) not in json.dumps({**shown, "schedule": None})


def test_a_schedule_is_shipped_or_the_export_says_that_none_is(run: Run, checkpoint: Path) -> None:
    asked = ("export", "--format", "bundle", "--config", "shipped", "--model", checkpoint, "--gpu", "h200")
    refused = run(*asked, "--output", "bundle")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert refused.stderr == (
        f"flywheel: no schedule is shipped for {checkpoint} on h200, bf16, context 64; flywheel search finds one\n"
    )
    assert not Path("bundle").exists()


def test_a_config_without_a_context_takes_the_models_where_it_is_shorter_than_512(run: Run, checkpoint: Path) -> None:
    Path("config.json").write_text(json.dumps(config_to_dict(ScheduleConfig())))
    asked = ("export", "--format", "bundle", "--config", "config.json", "--model", checkpoint, "--gpu", "h200")
    result = run(*asked, "--output", "bundle", "--json")
    assert result.exit_code == 0, result.stderr
    assert read_bundle(Path("bundle")).manifest["model"]["context"] == 64
    (note,) = json.loads(result.stdout)["notes"]
    assert (note["code"], result.stderr.count(note["text"])) == ("defaults", 1)
    assert "context 64" in note["text"]
    refused = run(*asked, "--output", "other", "--context", 65)
    assert (refused.exit_code, len(refused.stderr.splitlines())) == (2, 1)
    assert "context 65 is not in 1..64" in refused.stderr


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][0] = float("nan")


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("change", "words"), [(_spoil, "'model.norm.weight': nan at [0]"), (_add, "k_scale"), (dict.clear, "embed_tokens")]
)
def test_a_checkpoint_that_nothing_else_runs_makes_no_bundle(
    change: Callable[[dict[str, torch.Tensor]], None], words: str, run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "changed"))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    Path("config.json").write_text(json.dumps(config_to_dict(ScheduleConfig())), encoding="utf-8")
    asked = ("--format", "bundle", "--config", "config.json", "--model", folder, "--gpu", "h200", "--output", "bundle")
    result = run("export", *asked)
    assert result.exit_code == 2
    assert words in result.stderr.splitlines()[-1]
    assert not Path("bundle").exists()


def test_a_server_says_what_is_wrong_with_a_bundle(run: Run, checkpoint: Path) -> None:
    Path("bundle").mkdir()
    Path("bundle", "bundle.json").write_text("{}")
    result = run("serve", "--model", "bundle", "--weights", checkpoint, "--port", 0)
    assert result.exit_code == 2
    assert "bundle bundle: bundle.json is not of format flywheel-bundle" in result.stderr
    assert run("serve", "--model", "b" * 5000, "--port", 0).exit_code == 2
    result = run("serve", "--model", "bundle", "--port", 0)
    assert "bundle bundle: has no weights; give their checkpoint's directory" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("generate", "--prompt-ids", "1"),
        ("verify", "--config", "config.json"),
        ("search", "--gpu", "h200", "--measure", "predict", "--trials", "1"),
        ("quantize", "--weights", "int8", "--output", "out"),
        ("lower", "--gpu", "h200"),
        ("knobs", "--gpu", "h200"),
        ("evaluate", "--config", "config.json", "--gpu", "h200"),
        ("export", "--format", "bundle", "--config", "shipped", "--gpu", "h200", "--output", "out"),
    ],
    ids=lambda words: words[0],
)
def test_a_command_that_needs_weights_refuses_a_bundle_and_says_what_runs_it(
    words: tuple[str, ...], run: Run, checkpoint: Path
) -> None:
    shutil.copytree(checkpoint, "bundle", ignore=shutil.ignore_patterns("*.safetensors"))
    Path("bundle", "bundle.json").write_text("{}")
    Path("config.json").write_text(json.dumps(config_to_dict(ScheduleConfig())))
    result = run(*words, "--model", "bundle")
    assert (result.exit_code, result.stdout, len(result.stderr.splitlines())) == (2, "", 1), result.stderr
    assert "is a bundle, not a checkpoint; Decoder.load and flywheel serve run it" in result.stderr
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "bundle", "--config", "shipped", "--model", "llama3-8b"), "--gpu is missing"),
        (("--format", "tsv", "--config", "shipped"), "--config goes with --format bundle, not with tsv"),
        (
            ("--format", "bundle", "--config", "shipped", "--model", "llama3.2-1b", "--gpu", "h200", "-o", "out"),
            "llama3.2-1b has no weights; give a checkpoint's directory",
        ),
        (
            ("--format", "bundle", "--config", "shipped", "--model", "llama3.2-1b", "--gpu", "h200"),
            "needs --output DIR",
        ),
    ],
)
def test_what_a_bundle_lacks_is_named(options: tuple[str, ...], words: str, run: Run) -> None:
    result = run("export", *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not Path("out").exists()
