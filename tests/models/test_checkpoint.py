from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor

from flywheel.errors import WeightsError
from flywheel.models.checkpoint import load_weights
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import checkpoint_tensors, random_weights

SPEC = DecoderSpec("tiny", "llama", 8, 12, 1, 2, 1, 4, 20, 1e4, 1e-5, 64)
WANTED = checkpoint_tensors(SPEC)
TIED = checkpoint_tensors(dataclasses.replace(SPEC, tied_head=True))
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
EMBED = "model.embed_tokens.weight"


def tensors() -> dict[str, Tensor]:
    return random_weights(SPEC, seed=1, dtype=torch.float32)


def write_shards(folder: Path, weights: dict[str, Tensor], weight_map: dict[str, str] | None = None) -> dict[str, str]:
    """Two shards and an index; the norm is alone in the second."""
    shard_of = {key: "a.safetensors" if key != NORM else "b.safetensors" for key in weights}
    for name in ("a.safetensors", "b.safetensors"):
        save_file({key: weights[key] for key in weights if shard_of[key] == name}, folder / name)
    write_index(folder, {"metadata": {"total_size": 1}, "weight_map": weight_map or shard_of})
    return shard_of


def write_index(folder: Path, content: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(content), encoding="utf-8")


def refusal(path: Path, wanted: dict[str, tuple[int, ...]] = WANTED) -> str:
    with pytest.raises(WeightsError) as caught:
        load_weights(path, wanted)
    message = str(caught.value)
    assert message.isprintable()
    return message


@pytest.mark.parametrize("named", ["", "model.safetensors", "config.json"])
def test_a_single_file_reads_back_exactly(named: str, tmp_path: Path) -> None:
    weights = tensors()
    weights[NORM] = weights[NORM].to(torch.bfloat16)
    save_file(weights, tmp_path / "model.safetensors")
    loaded = load_weights(tmp_path / named, WANTED)
    assert list(loaded) == list(WANTED)
    assert all(torch.equal(loaded[key], weights[key]) and loaded[key].dtype == weights[key].dtype for key in WANTED)


def test_shards_read_back_exactly(tmp_path: Path) -> None:
    weights = tensors()
    write_shards(tmp_path, weights)
    loaded = load_weights(tmp_path, WANTED)
    assert all(torch.equal(loaded[key], weights[key]) for key in WANTED)


def test_shards_linked_from_elsewhere_are_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_shards(blobs, tensors())
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert list(load_weights(snapshot, WANTED)) == list(WANTED)


def test_tensors_are_mapped_and_writing_to_them_leaves_the_file_alone(tmp_path: Path) -> None:
    count = 32 * 1024**2
    save_file({"x": torch.zeros(count)}, tmp_path / "model.safetensors")
    before = resident_bytes()
    loaded = load_weights(tmp_path, {"x": (count,)})["x"]
    assert resident_bytes() - before < count
    loaded[0] = 1.0
    assert load_weights(tmp_path, {"x": (count,)})["x"][0] == 0.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


ATTENTION = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("key", "accepted", "refused"),
    [
        (f"{ATTENTION}.rotary_emb.inv_freq", torch.ones(2, dtype=torch.float64), None),
        ("model.rotary_emb.inv_freq", torch.ones(2), None),  # transformers reads neither, whatever it holds
        (f"{ATTENTION}.masked_bias", torch.tensor(-1e4), None),
        (f"{ATTENTION}.q_proj.bias", torch.zeros(8), torch.tensor([0.0] * 7 + [1.0])),
        ("model.norm.bias", torch.zeros(8), torch.full((8,), torch.nan)),
        ("model.layers.0.mlp.other.bias", None, torch.zeros(8)),
        (f"{ATTENTION}.q_proj.scale", None, torch.zeros(8)),
    ],
)
def test_what_changes_no_result_is_read_over_and_its_twin_is_refused(
    key: str, accepted: Tensor | None, refused: Tensor | None, tmp_path: Path
) -> None:
    if accepted is not None:
        save_file(tensors() | {key: accepted}, tmp_path / "model.safetensors")
        assert list(load_weights(tmp_path, WANTED)) == list(WANTED)
    if refused is not None:
        save_file(tensors() | {key: refused}, tmp_path / "model.safetensors")
        assert refusal(tmp_path).startswith(f"tensor '{key}' in model.safetensors is not ")


def test_a_tied_model_may_hold_its_tensor_under_the_heads_name(tmp_path: Path) -> None:
    weights = tensors()
    weights[HEAD] = weights.pop(EMBED)
    save_file(weights, tmp_path / "model.safetensors")
    assert torch.equal(load_weights(tmp_path, TIED)[EMBED], weights[HEAD])
    assert refusal(tmp_path).startswith(f"tensor '{EMBED}' is not in ")


def test_the_head_of_a_tied_model_may_be_a_copy_of_the_embedding(tmp_path: Path) -> None:
    weights = tensors()
    save_file(weights | {HEAD: weights[EMBED].clone()}, tmp_path / "model.safetensors")
    assert list(load_weights(tmp_path, TIED)) == list(TIED)
    save_file(weights, tmp_path / "model.safetensors")
    assert refusal(tmp_path, TIED) == (
        f"tensor '{HEAD}' in model.safetensors differs from {EMBED}; with a tied head they are one"
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({NORM: None}, f"tensor '{NORM}' is not in "),
        ({NORM: torch.ones(9)}, f"tensor '{NORM}' in model.safetensors is [9]; wanted: [8]"),
        ({NORM: torch.ones(8, 1)}, f"tensor '{NORM}' in model.safetensors is [8, 1]; wanted: [8]"),
        ({NORM: torch.ones(8).double()}, f"tensor '{NORM}' in model.safetensors is F64; supported: F32, F16, BF16"),
        (
            {NORM: torch.ones(8).to(torch.int8)},
            f"tensor '{NORM}' in model.safetensors is I8; supported: F32, F16, BF16",
        ),
        (
            {"model.layers.1.mlp.up_proj.weight": torch.ones(12, 8)},
            "tensor 'model.layers.1.mlp.up_proj.weight' in model.safetensors is not one of this model's 12",
        ),
        ({"a\nb": torch.ones(1)}, "tensor 'a\\nb' in model.safetensors is not one of this model's 12"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    weights = {key: weight for key, weight in (tensors() | change).items() if weight is not None}
    save_file(weights, tmp_path / "model.safetensors")
    assert refusal(tmp_path).startswith(message)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, tensors())
    (tmp_path / "b.safetensors").unlink()
    assert refusal(tmp_path) == f"{str(tmp_path / 'b.safetensors')!r} is missing"


def test_an_index_that_contradicts_its_shards_is_refused(tmp_path: Path) -> None:
    shard_of = write_shards(tmp_path, tensors())
    for swapped in ({NORM: "a.safetensors"}, {"model.other": "a.safetensors"}):
        write_index(tmp_path, {"weight_map": {**shard_of, "model.embed_tokens.weight": "b.safetensors", **swapped}})
        assert "where model.safetensors.index.json has it" in refusal(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    weights = tensors()
    write_shards(tmp_path, weights)
    save_file({NORM: weights[NORM], HEAD: weights[HEAD]}, tmp_path / "b.safetensors")
    assert refusal(tmp_path) == f"tensor '{HEAD}' is both in a.safetensors and in b.safetensors"


@pytest.mark.parametrize(
    "name", ["../b.safetensors", "/b.safetensors", "sub/b.safetensors", "..\\b.safetensors", "c:b.safetensors", "..",
             "", "b.bin", "b\n.safetensors", "b\0.safetensors", 3, None, {}]
)  # fmt: skip
def test_an_index_reaches_only_files_beside_it(name: object, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    shard_of = write_shards(folder, tensors())
    (folder / "b.safetensors").rename(tmp_path / "b.safetensors")
    write_index(folder, {"weight_map": {**shard_of, NORM: name}})
    message = refusal(folder)
    assert message.startswith(f"model.safetensors.index.json has tensor '{NORM}' in ")
    assert message.endswith("not a .safetensors file beside it")


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', "[" * 100_000, "\ud800"]
)
def test_a_broken_index_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    assert refusal(tmp_path).startswith("model.safetensors.index.json ")


@pytest.mark.parametrize("path", ["nowhere", "nowhere/config.json", "", "nul\0"])
def test_a_place_without_weights_is_refused(path: str, tmp_path: Path) -> None:
    assert "is missing" in refusal(tmp_path / path) or "cannot be read" in refusal(tmp_path / path)


def test_a_directory_is_not_a_weight_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    assert refusal(tmp_path).endswith("is missing")


@given(data=st.data())
def test_a_damaged_file_is_refused_or_still_fits(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    whole = save(tensors())
    cut = data.draw(st.integers(0, len(whole)), "cut")
    bad = bytearray(whole[:cut])
    for position in data.draw(st.lists(st.integers(0, 1500), max_size=4), "flipped"):
        if position < len(bad):
            bad[position] ^= data.draw(st.integers(1, 255), "bits")
    file = tmp_path_factory.mktemp("damaged") / "model.safetensors"
    file.write_bytes(bad)
    try:
        loaded = load_weights(file, WANTED)
    except WeightsError as error:
        assert str(error).isprintable()
    else:
        assert {key: tuple(weight.shape) for key, weight in loaded.items()} == WANTED
