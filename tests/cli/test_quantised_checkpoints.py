"""`flywheel generate` of quantised checkpoints of every kind, token for token like the oracle of what they mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import KINDS, PACKAGES, WRITTEN, described, write
from click.testing import Result
from safetensors.torch import save_file

from flywheel.models.hf import load_spec
from flywheel.models.weights import random_weights
from flywheel.vm.gpu.driver import Gpu

Run = Callable[..., Result]

GENERATE = ("generate", "--prompt-ids", "5,3,17", "--max-tokens", 8, "--context", 32, "--verify", "--json")
WIDER = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
ON_GPU = [kind for kind in KINDS if kind != "int8 with zeros"]


def generated(run: Run, folder: Path, *more: str) -> tuple[list[int], list[int]]:
    """(tokens, places of those that rounding may have chosen), all verified."""
    result = run(*GENERATE, "--model", folder, *more)
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["verified"] is True
    return document["token_ids"], document["ties"]


@pytest.mark.parametrize("kind", [*PACKAGES, *KINDS])
def test_every_kind_generates_token_for_token_like_its_oracle(kind: str, run: Run, tmp_path: Path) -> None:
    if kind in KINDS:
        write(tmp_path, kind)
    tokens, ties = generated(run, tmp_path if kind in KINDS else WRITTEN / kind, "--dtype", "f32")
    assert len(tokens) == 8
    assert ties == []


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ON_GPU)
def test_every_kind_generates_on_a_gpu_like_its_oracle(kind: str, run: Run, tmp_path: Path) -> None:
    write(tmp_path, kind, 128, **WIDER)
    tokens, _ = generated(run, tmp_path, "--dtype", "f16", "--device", "cuda")
    assert len(tokens) == 8


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("weights", ["fp8", "fp8-tensor", "fp8-block", "int8", "int8-tensor", "int4", "int4-zeros"])
def test_what_flywheel_quantizes_generates_on_a_gpu_like_its_oracle(weights: str, run: Run, tmp_path: Path) -> None:
    plain, made = tmp_path / "plain", tmp_path / "made"
    plain.mkdir()
    config = described(**WIDER)
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(random_weights(load_spec(plain), 3), plain / "model.safetensors")
    assert run("quantize", "--model", plain, "--weights", weights, "--output", made).exit_code == 0
    tokens, _ = generated(run, made, "--device", "cuda")
    assert len(tokens) == 8


@pytest.fixture
def gpu() -> Gpu:
    """The GPU here; skips without one."""
    from flywheel.errors import NoGpuError
    from flywheel.vm.gpu.driver import open_gpu

    try:
        return open_gpu()
    except NoGpuError as error:
        pytest.skip(str(error))
