"""Models whose numbers are not finite, in commands: one line that names the place, and a documented exit code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from spoilt import DOWN, after, overflowing
from torch import Tensor

Run = Callable[..., Result]
PROMPT = ("--prompt-ids", "39,68,75")


def changed(checkpoint: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """A copy of the checkpoint with other weights."""
    folder = Path("changed")
    shutil.copytree(checkpoint, folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def overflow(checkpoint: Path) -> Path:
    """Weights that are finite in f16, and whose first MLP is not."""
    return changed(checkpoint, lambda weights: overflowing(weights, torch.float16) | {DOWN: weights[DOWN] * 1e5})


@pytest.mark.parametrize("more", [(), ("--verify",), ("--stream",), ("--temperature", "0.8"), ("--json",)], ids=str)
def test_generate_says_where_numbers_end_and_shows_no_token(run: Run, overflow: Path, more: tuple[str, ...]) -> None:
    asked = ("generate", "--model", overflow, *PROMPT, "--max-tokens", 6, *more)
    result = run(*asked, "--dtype", "f16")
    assert result.exit_code == 3
    assert result.stdout.strip() == ""
    told = result.stderr.splitlines()[-1]
    assert "position 2: the logits are not finite; first in layer 0, mlp_out (down_proj): " in told
    assert run(*asked, "--dtype", "f32").exit_code == 0


def test_tokens_that_were_shown_stay(run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("generate", *PROMPT, "--max-tokens", 8, "--stream", "--dtype", "f32", "--model")
    tokens = load_tokens(run(*asked, checkpoint, "--json").stdout)
    place = next(place for place, token in enumerate(tokens[:-1]) if token not in tokens[:place])
    spoilt = changed(checkpoint, lambda weights: after(weights, tokens[place]))
    monkeypatch.setattr("flywheel.decode.source.require_finite", lambda key, tensor, stored: tensor)
    result = run(*asked, spoilt, "--json")
    assert result.exit_code == 3
    assert load_tokens(result.stdout) == tokens[: place + 1]
    assert f"position {3 + place}: the logits are not finite" in result.stderr


def load_tokens(lines: str) -> list[int]:
    shown = [json.loads(line) for line in lines.splitlines()]
    return [each["token_id"] for each in shown if each.get("token_id") is not None]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("command", ["generate", "verify", "quantize"])
def test_a_weight_that_is_not_finite_is_named(run: Run, checkpoint: Path, command: str, value: float) -> None:
    model = changed(checkpoint, lambda weights: after(weights, 7, value))
    asked: tuple[object, ...] = PROMPT
    if command == "verify":
        assert run("lower", "--model", model, "--gpu", "h100", "--context", 32, "--output", "p.json").exit_code == 0
        asked = ("p.json",)
    elif command == "quantize":
        asked = ("--weights", "int8", "--output", "written")
    result = run(command, *asked, "--model", model)
    assert result.exit_code == 2, result.stderr
    assert f"tensor 'model.embed_tokens.weight': {value} at [7, 3]" in result.stderr.splitlines()[-1]
    assert not Path("written").exists()


def test_verify_names_the_first_tensor_of_a_program_or_of_the_oracle_that_is_not_finite(
    run: Run, overflow: Path
) -> None:
    for dtype, told in (("f16", "L0.x_out: holds NaN or infinity"), ("f32", None)):
        lower = run("lower", "--model", overflow, "--gpu", "h100", "--context", 32, "--dtype", dtype, "-o", "p.json")
        assert lower.exit_code == 0, lower.stderr
        result = run("verify", "p.json", "--model", overflow)
        assert result.exit_code == (0 if told is None else 3), result.output
        assert told is None or told in result.stdout
    file = overflow / "model.safetensors"
    save_file(overflowing(load_file(file), torch.float32), file, metadata={"format": "pt"})
    result = run("verify", "p.json", "--model", overflow)
    assert result.exit_code == 3
    assert "position 0, row 0, L0.mlp_out: not finite in the oracle itself" in result.stderr
