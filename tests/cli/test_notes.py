"""What one command announces of a model, every command announces, and its document has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from checkpoints import described, write
from click.testing import Result
from safetensors.torch import save_file
from tokenizer_directories import FAMILIES, Directory

import flywheel
from flywheel.decode.notes import notes_of_model
from flywheel.decode.source import open_source
from flywheel.errors import WeightsError
from flywheel.ir import DType
from flywheel.models.hf import load_spec
from flywheel.models.weights import random_weights
from flywheel.serve.engine import Engine

Run = Callable[..., Result]


def plain(folder: Path, **fields: Any) -> Path:
    config = {name: value for name, value in described(**fields).items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(load_spec(folder), 1), folder / "model.safetensors")
    return folder


def of_eight_bits(folder: Path) -> Path:
    write(folder, "int8 with zeros")
    return folder


def unread(folder: Path) -> Path:
    (plain(folder) / "model.safetensors").rename(folder / "pytorch_model.bin")
    return folder / "config.json"


MODELS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "random-weights": (unread, "holds pytorch_model.bin, a format that is not read; their text has no meaning"),
    "activations": (of_eight_bits, "the checkpoint asks for 8 bit activations; here they are "),
    "ignored-fields": (partial(plain, logits_scaling=8.0), "config.json has logits_scaling 8.0; as in transformers"),
}
"""Code of a note -> what makes a model of that note, and a part of its text."""


def codes_of(document: dict[str, Any]) -> list[str]:
    return [each["code"] for each in document["notes"]]


@pytest.fixture(params=MODELS)
def noted(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, str]:
    """A code, a model of that note, and a part of its text."""
    make, words = MODELS[request.param]
    (tmp_path / "model").mkdir()
    return request.param, make(tmp_path / "model"), words


def test_commands_announce_it_once_and_their_documents_have_it(
    noted: tuple[str, Path, str], run: Run, tmp_path: Path
) -> None:
    code, model, words = noted
    (tmp_path / "s.json").write_text(json.dumps({"threads_per_block": 128}))
    small = ("--context", 8, "--model", model, "--json")
    for arguments in (
        ("generate", *small, "--prompt-ids", "1", "--max-tokens", 1),
        ("verify", *small, "--config", tmp_path / "s.json"),
    ):
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stderr.count(words) == 1
        assert code in codes_of(json.loads(result.stdout))


def test_fields_of_other_models_and_unknown_ones_are_told_apart(tmp_path: Path) -> None:
    notes = notes_of_model("m", plain(tmp_path, logits_scaling=8.0, foo_scale=2.0), None, DType.F32, None)
    assert [each.text for each in notes] == [
        "m: config.json has logits_scaling 8.0; as in transformers, that has no effect",
        "m: config.json has foo_scale 2.0, which this version does not know; that has no effect",
    ]


def test_an_evaluation_announces_the_notes_of_its_model_and_schedule_once(tmp_path: Path, run: Run) -> None:
    eight_bits, foreign = tmp_path / "eight", tmp_path / "foreign"
    eight_bits.mkdir()
    foreign.mkdir()
    write(eight_bits, "fp8 of tensors")
    plain(foreign, logits_scaling=8.0)
    schedule, best = tmp_path / "s.json", tmp_path / "best.json"
    schedule.write_text(json.dumps({"threads_per_block": 128}))
    predicted = {"gpu": "h100", "measure": "predict"}
    for code, model in (("activations", eight_bits), ("ignored-fields", foreign)):
        result = run("evaluate", schedule, "--model", model, *(f"--{name}={predicted[name]}" for name in predicted),
                     "--json")  # fmt: skip
        assert result.exit_code == 0, result.output
        assert result.stderr.count(MODELS[code][1]) == 1
        assert codes_of(json.loads(result.stdout)) == ["defaults", code]
        found = flywheel.evaluate(config=schedule, model=str(model), **predicted)
        assert [asdict(each) for each in found.notes] == json.loads(result.stdout)["notes"]
    flywheel.search(model="smollm2-135m", **predicted, trials=1, store=tmp_path / "py.db").save(best)
    other = run("evaluate", best, "--model", eight_bits, "--context", 8, "--measure", "predict", "--json")
    assert codes_of(json.loads(other.stdout)) == ["another-model", "activations"]
    assert other.stderr.count("the schedule was found for ") == 1


def test_decoders_and_the_process_of_a_server_have_it(noted: tuple[str, Path, str]) -> None:
    code, model, words = noted
    load = partial(flywheel.Decoder.load, str(model), device="reference", context=8)
    with load() as decoder:
        (told,) = [each.text for each in decoder.notes if each.code == code]
        assert words in told
    if code != "activations":  # one process is enough
        return
    engine = Engine(load, 1)
    try:
        assert engine.start().notes == decoder.notes
    finally:
        engine.close()


def test_a_class_that_splits_otherwise_than_the_file_is_told(tmp_path: Path, run: Run) -> None:
    files = {name: content for name, content in FAMILIES["smollm2"]().items() if name != "config.json"}
    model = Directory("smollm2", files).write(plain(tmp_path))
    result = run("generate", "--model", model, "--context", 8, "--prompt-ids", "1", "--max-tokens", 1, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("the tokenizer_class splits some texts otherwise than tokenizer.json") == 1
    assert "tokenizer" in codes_of(json.loads(result.stdout))
    with flywheel.Decoder.load(str(model), device="reference", context=8) as decoder:
        assert [each.code for each in decoder.notes].count("tokenizer") == 1


def test_ways_to_draw_that_nobody_takes_are_told(tmp_path: Path, run: Run) -> None:
    model = plain(tmp_path)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "top_k": 20, "temperature": 0.6}))
    asked = ("--context", 8, "--prompt-ids", "1", "--max-tokens", 1, "--json")
    result = run("generate", "--model", model, *asked)
    assert result.stderr.count("generation_config.json recommends top_k 20, temperature 0.6; only options ") == 1
    assert "sampling" in codes_of(json.loads(result.stdout))
    assert "recommends top_k 20; " in run("generate", "--model", model, *asked, "--temperature", 0.6).stderr
    with flywheel.Decoder.load(str(model), device="reference", context=8) as decoder:
        assert [each.code for each in decoder.notes].count("sampling") == 1


def test_a_search_has_the_notes_of_its_model(tmp_path: Path, run: Run) -> None:
    model = plain(tmp_path, logits_scaling=8.0)
    asked = ("--trials", 1, "--jobs", 1, "--measure", "predict", "--context", 8, "--gpu", "h100")
    assert "has logits_scaling 8.0" in run("search", "--model", model, *asked).stderr
    found = flywheel.search(model=str(model), gpu="h100", trials=1, measure="predict", store=tmp_path / "py.db")
    assert [each.code for each in found.notes] == ["defaults", "ignored-fields"]
    assert found.notes[0].text == "by default: context 64"


def test_a_checkpoint_that_is_quantised_has_the_notes_of_its_source(tmp_path: Path, run: Run) -> None:
    (tmp_path / "model").mkdir()
    model = plain(tmp_path / "model", logits_scaling=8.0)
    result = run("quantize", "--model", model, "--weights", "int8", "--output", tmp_path / "q", "--json")
    assert codes_of(json.loads(result.stdout)) == ["ignored-fields"]
    assert result.stderr.count("logits_scaling") == 1


def test_defaults_and_the_schedule_are_told_unless_they_are_given(tmp_path: Path, run: Run) -> None:
    model = plain(tmp_path)
    (tmp_path / "s.json").write_text(json.dumps({"threads_per_block": 128}))
    asked = ("generate", "--model", model, "--prompt-ids", "1", "--max-tokens", 1, "--json")
    taken = json.loads(run(*asked).stdout)["notes"]
    assert taken == [
        {"code": "defaults", "text": "by default: gpu h100, dtype bf16, context 64"},
        {"code": "schedule", "text": "decoding by what a search tries first"},
    ]
    given = ("--gpu", "h100", "--dtype", "f32", "--context", 8, "--config", tmp_path / "s.json")
    assert json.loads(run(*asked, *given).stdout)["notes"] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--prompt-ids", "1"),
        ("verify", "--config", "s.json"),
        ("serve", "--device", "reference", "--port", "0"),
        ("quantize", "--weights", "int8", "--output", "q"),
    ],
)
def test_no_command_takes_random_weights_for_those_that_it_does_not_read(
    arguments: tuple[str, ...], tmp_path: Path, run: Run
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    unread(folder)
    Path("s.json").write_text(json.dumps({"threads_per_block": 128}))
    result = run(arguments[0], "--model", folder, *arguments[1:])
    assert result.exit_code == 2
    assert f"flywheel: {folder} holds pytorch_model.bin, a format that is not read, and no safeten" in result.stderr
    with pytest.raises(WeightsError, match="a format that is not read"):
        flywheel.Decoder.load(str(folder), device="reference")
    assert open_source(str(folder / "config.json")).stored is None


def test_every_command_goes_on_beyond_a_window(tmp_path: Path, run: Run) -> None:
    model = plain(tmp_path, model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=16)
    (tmp_path / "s.json").write_text(json.dumps({"threads_per_block": 128}))
    commands: tuple[tuple[Any, ...], ...] = (
        ("lower", "--gpu", "h100"),
        ("search", "--gpu", "h100", "--measure", "predict", "--trials", 1, "--jobs", 1),
        ("generate", "--prompt-ids", ",".join(["1"] * 20), "--max-tokens", 4),
        ("verify", "--config", tmp_path / "s.json"),
    )
    for command, *more in commands:
        beyond = run(command, "--model", model, *more, "--context", 24)
        assert beyond.exit_code == 0, beyond.output
