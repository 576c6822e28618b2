"""Bundles on a GPU: what the ordinary path makes, and nothing compiled. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from emulator.bundles import ASKED, CONTEXT, write_checkpoint
from safetensors.torch import load_file

import flywheel
from flywheel.decode.bundling import make_bundle
from flywheel.decode.cuda import CudaModel
from flywheel.errors import KernelCompileError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.hf import load_spec
from flywheel.runtime.reading import read_bundle
from flywheel.runtime.sequences import GREEDY, Sequences
from flywheel.runtime.session import BundleSession
from flywheel.runtime.writing import write_folder
from flywheel.vm.gpu.driver import Gpu

pytestmark = pytest.mark.gpu


def program_of(checkpoint: Path, gpu: Gpu) -> MegakernelProgram:
    """For all SMs of this GPU: a bundle is of one."""
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    target = replace(alike, name="here", num_sms=gpu.num_sms)
    return lower(decode_step(load_spec(checkpoint), CONTEXT, DType.BF16, 3), ScheduleConfig(), target)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("held") / "small", dtype="bfloat16")


def greedy(sequences: Sequences, prompt: tuple[int, ...]) -> list[int]:
    sequences.join(1, prompt, len(prompt) + 8, GREEDY)
    found: list[int] = []
    while len(found) < 9:
        found += [made.token for made in sequences.advance()]
    sequences.close()
    return found


def test_a_bundle_decodes_what_stepping_does_and_compiles_nothing(
    gpu: Gpu, checkpoint: Path, tmp_path: Path
) -> None:
    program, spec = program_of(checkpoint, gpu), load_spec(checkpoint)
    write_folder(tmp_path / "bundle", make_bundle(program, spec, checkpoint, {"words": "a schedule"}))
    weights = load_file(checkpoint / "model.safetensors")
    with CudaModel(gpu, spec, DType.BF16, CONTEXT, weights, 3) as model, model.load(program) as session:
        expected = []
        for prompt in ASKED:
            tokens = list(prompt)
            for position in range(len(prompt) + 8):
                step = session.step_rows([0, tokens[position], 0], [0, position, 0])[1]
                tokens += [step.token] * (position >= len(prompt) - 1)
            expected.append(tokens[len(prompt) :])
        refused: Any = KernelCompileError("nothing may be compiled")
        with patch("flywheel.vm.gpu.weights.compile_variant", side_effect=refused):
            for given in (checkpoint, model.weights):
                bundled = BundleSession(gpu, read_bundle(tmp_path / "bundle"), given)  # type: ignore[arg-type]
                assert [greedy(bundled.sequences(), prompt) for prompt in ASKED] == expected
                bundled.close()
    with flywheel.Decoder.load(str(tmp_path / "bundle"), weights=str(checkpoint), check="all") as decoder:
        found = decoder.complete(ASKED[0], max_tokens=9).token_ids
        assert list(found) == expected[0][: len(found)]
