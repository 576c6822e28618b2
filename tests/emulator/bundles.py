"""Small checkpoints, their bundles for an emulated GPU, and decoders of these. Imports no torch at its top."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from emulator.gpu import EmulatedGpu, build_variant

import flywheel
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig

CONTEXT, BATCH = 32, 2
ASKED = ((3, 7, 0), (5,), (9, 9, 1, 2))
"""Prompts of tokens."""
MADE = 4
"""Tokens behind each."""


def write_checkpoint(folder: Path, seed: int = 1, dtype: str = "float32") -> Path:
    """A small llama of random weights, its config and the token that ends a text."""
    import torch
    from safetensors.torch import save_file

    from flywheel.models.hf import load_spec
    from flywheel.models.weights import random_weights

    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 80,
        "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "hidden_act": "silu", "eos_token_id": 79,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(random_weights(load_spec(folder), seed, getattr(torch, dtype)), str(folder / "model.safetensors"))
    return folder


def program_of(folder: Path, dtype: DType = DType.F32, batch: int = BATCH) -> MegakernelProgram:
    """The checkpoint's decode step on the emulated GPU."""
    from flywheel.lowering.lower import lower
    from flywheel.models.decoder import decode_step
    from flywheel.models.hf import load_spec

    gpu = EmulatedGpu()
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    config = ScheduleConfig({"hand_off": {"data": 1}}, page_allocation="none", threads_per_block=192)
    return lower(decode_step(load_spec(folder), CONTEXT, dtype, batch), config, target)


def make_files(folder: Path, program: MegakernelProgram) -> dict[str, bytes]:
    """Files of the bundle of a program, its kernel built for the emulated GPU."""
    from flywheel.decode.bundling import make_bundle
    from flywheel.models.hf import load_spec

    return make_bundle(program, load_spec(folder), folder, {"words": "a schedule"}, build_variant)


@contextmanager
def loaded(bundle: Path, weights: Any, on: EmulatedGpu | None = None, **asked: Any) -> Iterator[flywheel.Decoder]:
    """A decoder of a bundle on an emulated GPU."""
    with (
        patch("flywheel.vm.gpu.driver.open_gpu", lambda: on or EmulatedGpu()),
        flywheel.Decoder.load(str(bundle), weights=weights, **asked) as decoder,
    ):
        yield decoder


class Given:
    """A tensor in the emulated GPU's memory, as torch's are in a GPU's."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.shape, self.nbytes, self.data_ptr = tensor.shape, tensor.nbytes, tensor.data_ptr


def remade(manifest: dict[str, Any]) -> bytes:
    """A bundle.json of a manifest, with its digest."""
    from flywheel.runtime.manifest import manifest_digest

    return json.dumps({**manifest, "digest": manifest_digest(manifest)}).encode()


def tokens_of(decoder: flywheel.Decoder) -> list[list[int]]:
    """What follows each prompt, of all of them together."""
    found: list[list[int]] = [[] for _ in ASKED]
    for place, piece in decoder.generate_all(ASKED, max_tokens=MADE, ignore_end=True):
        if piece.token_id is not None:
            found[place].append(piece.token_id)
    return found
