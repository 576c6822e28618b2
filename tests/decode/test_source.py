from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from flywheel import process
from flywheel.decode.notes import notes_of_source
from flywheel.decode.on_gpu import weights_for
from flywheel.decode.source import Source, open_source
from flywheel.errors import TooLargeError, UnknownNameError, WeightsError
from flywheel.ir import DType
from flywheel.models import weights
from flywheel.models.drawn import random_quantised
from flywheel.models.families import count_params
from flywheel.models.formats import PLAIN, parse_formats
from flywheel.models.quantise import kept_bytes
from flywheel.models.schemes import Scheme
from flywheel.models.weights import checkpoint_tensors, random_weights
from flywheel.vm.gpu.driver import Gpu

CONFIG = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "vocab_size": 40, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's directory without weights."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return tmp_path


def stored_in(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    weights = random_weights(open_source(str(folder)).spec, 9, dtype)
    save_file(weights, folder / "model.safetensors")
    return weights


def test_a_directory_without_weights_gets_random_ones_of_the_seed(folder: Path) -> None:
    source = open_source(str(folder))
    assert (source.name, source.folder, source.stored, source.dtype) == (folder.name, folder, None, None)
    first, again, other = (source.weights(DType.F32, seed) for seed in (0, 0, 1))
    assert first.keys() == checkpoint_tensors(source.spec).keys()
    assert torch.equal(first["lm_head.weight"], again["lm_head.weight"])
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@pytest.mark.parametrize("stored", [False, True])
def test_weights_on_request_are_the_weights(stored: bool, folder: Path) -> None:
    if stored:
        stored_in(folder, torch.float16)
    source = open_source(str(folder))
    made, whole = source.weights_on_request(DType.BF16, 3, "cpu"), source.weights(DType.BF16, 3)
    assert set(made) == set(whole)
    for key, tensor in whole.items():
        assert made[key].dtype == torch.bfloat16 and torch.equal(made[key], tensor)


@pytest.mark.parametrize(
    ("gigabytes", "gpus", "formats", "whole"),
    [
        (80, 1, "bf16", True),  # 16.1 GB, and 16.1 packed
        (35, 1, "bf16", False),
        (35, 2, "bf16", True),  # 16.1, and 8.0 of each GPU
        (26, 2, "bf16", False),
        (35, 1, "int4", True),
        (8, 1, "int4", True),  # quantised ones stay whole, and there is no memory for them
    ],
)
def test_weights_that_do_not_fit_beside_their_packed_part_are_made_on_request(
    gigabytes: int, gpus: int, formats: str, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    for name in ("weights", "weights_on_request"):
        monkeypatch.setattr(Source, name, lambda self, *_, name=name: asked.append(name) or {})
    memory = cast(list[Gpu], [SimpleNamespace(total_bytes=gigabytes * 10**9)] * gpus)
    weights_for(open_source("llama3-8b"), DType.BF16, 0, parse_formats(formats, "bf16"), memory)
    assert asked == ["weights" if whole else "weights_on_request"]


def test_a_quantised_checkpoint_is_never_made_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its matrices are codes, so it is asked for weights that it refuses."""
    asked: list[str] = []
    for name in ("weights", "weights_on_request"):
        monkeypatch.setattr(Source, name, lambda self, *_, name=name: asked.append(name) or {})
    source = replace(open_source("llama3-8b"), scheme=cast(Scheme, object()))
    weights_for(source, DType.BF16, 0, PLAIN, cast(list[Gpu], [SimpleNamespace(total_bytes=10**9)]))
    assert asked == ["weights"]


@pytest.mark.parametrize("name", ["", "config.json"])
def test_a_checkpoint_is_read_in_its_own_dtype_and_converted_once_asked(name: str, folder: Path) -> None:
    weights = stored_in(folder, torch.float16)
    source = open_source(str(folder / name))
    assert (source.dtype, source.folder) == ("f16", folder)
    for key, tensor in source.weights(DType.F32, seed=0).items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, weights[key].float())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of matrices that were there at a time as they were drawn, as each of them came."""
    live: dict[int, int] = {}
    seen: list[int] = []
    drawn = weights.draw_uniform

    def draw(name: str, *given: Any) -> torch.Tensor:
        tensor = drawn(name, *given)
        if tensor.ndim > 1:
            live[id(tensor)] = tensor.nbytes
            weakref.finalize(tensor, live.pop, id(tensor))
            seen.append(sum(live.values()))
        return tensor

    monkeypatch.setattr(weights, "draw_uniform", draw)
    monkeypatch.setattr(weights, "usable_cores", lambda: 2)
    return seen


def test_matrices_are_quantised_as_they_are_drawn(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 24}), encoding="utf-8")
    source, formats = open_source(str(folder)), parse_formats("int4-g16,lm_head=int8", "bf16")
    seen = counted(monkeypatch)
    held = source.weights(DType.BF16, 3, formats=formats)
    monkeypatch.undo()
    own = random_quantised(source.spec, 3, formats, DType.BF16)
    assert held.keys() == own.keys()
    assert all(torch.equal(held[key], own[key]) for key in own)
    assert sum(tensor.nbytes for tensor in held.values()) == kept_bytes(source.spec, formats, DType.BF16)
    embedding, largest = 2 * 40 * 32, 2 * 48 * 32
    assert max(seen) <= embedding + 2 * largest


def test_the_memory_that_is_asked_for_is_that_of_quantised_weights(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, formats = open_source("llama3-70b"), parse_formats("int4", "bf16")
    needed = kept_bytes(source.spec, formats, DType.BF16)
    assert 39.4e9 < needed < 39.6e9
    monkeypatch.setattr(process, "available_bytes", lambda: needed - 1)
    with pytest.raises(TooLargeError, match=r"llama3-70b: its weights: 39\.5 GB, and this machine has 39\.5 GB left"):
        source.weights(DType.BF16, 0, formats=formats)


@pytest.mark.gpu
def test_a_gpu_holds_little_beside_what_is_kept(gpu: Gpu) -> None:
    source, formats = open_source("llama3.2-1b"), parse_formats("int4", "bf16")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    held = source.weights(DType.BF16, 0, "cuda", formats)
    assert sum(tensor.nbytes for tensor in held.values()) == kept_bytes(source.spec, formats, DType.BF16)
    beside = torch.cuda.max_memory_allocated() - before - kept_bytes(source.spec, formats, DType.BF16)
    assert beside < 1.5e9 < DType.BF16.nbytes(count_params(source.spec))


def test_weights_of_the_wanted_dtype_are_not_copied(folder: Path) -> None:
    stored_in(folder, torch.bfloat16)
    source = open_source(str(folder))
    assert source.stored is not None
    for key, tensor in source.weights(DType.BF16, seed=0).items():
        assert tensor.data_ptr() == source.stored[key].data_ptr()


def test_a_name_has_no_checkpoint_and_no_folder() -> None:
    source = open_source("smollm2-135m")
    assert (source.name, source.folder, source.stored) == ("smollm2-135m", None, None)


def test_another_file_than_config_json_has_no_checkpoint_beside_it(folder: Path) -> None:
    stored_in(folder, torch.float32)
    other = folder / "other.json"
    other.write_text(json.dumps(CONFIG), encoding="utf-8")
    assert open_source(str(other)).stored is None


def test_broken_checkpoints_are_errors_not_random_weights(folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(WeightsError, match="missing"):
        open_source(str(folder))
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(WeightsError, match="not safetensors"):
        open_source(str(folder))


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json", "model.gguf",
     "consolidated.00.pth", "model.pt", "tf_model.h5", "flax_model.msgpack", "weights.npz"],
)  # fmt: skip
def test_weights_in_a_format_that_is_not_read_are_refused_unless_random_ones_are_asked_for(
    name: str, folder: Path
) -> None:
    (folder / name).write_bytes(b"x")
    with pytest.raises(WeightsError, match=f"{folder} holds {name}, a format that is not read, and no safetensors"):
        open_source(str(folder))
    (note,) = notes_of_source(open_source(str(folder / "config.json")), DType.F32, 3)
    assert note.code == "random-weights"
    assert note.text.startswith(f"RANDOM WEIGHTS of seed 3: {folder} holds {name}, a format that is not read")
    assert open_source(str(folder), any_weights=True).stored is None
    stored_in_spec = random_weights(open_source(str(folder / "config.json")).spec, 9)
    save_file(stored_in_spec, folder / "model.safetensors")
    assert notes_of_source(open_source(str(folder)), DType.BF16, 3) == ()


@pytest.mark.parametrize("name", ["training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "notes.txt"])
def test_files_that_hold_no_weights_are_no_weights(name: str, folder: Path) -> None:
    (folder / name).write_bytes(b"x")
    assert open_source(str(folder)).stored is None


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UnknownNameError):
        open_source("no-such-model")
