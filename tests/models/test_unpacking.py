"""Quantised checkpoints, as their formats' public descriptions have them and as compressed-tensors writes them.

`quantised/` holds what `experiments/quantised_checkpoints.py` had that package write.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import GPTQ, INT8, KINDS, PACKAGES, WRITTEN, described, of_family, write
from effort import pairs
from safetensors.torch import load_file, save_file
from torch import Tensor

from flywheel.decode.reference import ReferenceSession
from flywheel.decode.source import open_source
from flywheel.errors import UnsupportedModelError, UsageError, WeightsError
from flywheel.ir import TARGETS, DType
from flywheel.judge.verdicts import default_positions, make_oracle, verify
from flywheel.lowering.lower import lower
from flywheel.models.families import FAMILIES
from flywheel.models.formats import parse_formats
from flywheel.models.hf import load_scheme, load_spec, spec_from_config
from flywheel.models.packing import write_checkpoint
from flywheel.models.quantise import matrix_of, quantised
from flywheel.models.schemes import read_scheme
from flywheel.models.stored import stored_tensors
from flywheel.models.weights import checkpoint_tensors, random_weights
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload

WRITTEN_HERE = ("fp8", "fp8-block", "int8", "int8-zeros", "int4-g32", "int4-g32-zeros")
"""Formats of `flywheel quantize`, but for one scale a matrix, which joined matrices cannot have."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_means_what_its_format_is_described_to_mean(kind: str, tmp_path: Path) -> None:
    meant = write(tmp_path, kind)
    source = open_source(str(tmp_path))
    assert source.formats(DType.BF16) == parse_formats(KINDS[kind][2], "bf16")
    assert make_workload(str(tmp_path), "h100", "bf16", 32).weights == KINDS[kind][2]
    weights = source.weights(DType.BF16, 0, formats=source.formats(DType.BF16))
    for key, wanted in meant.items():
        found = matrix_of(weights, key, torch.float64)
        assert found is not None
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12)


@pytest.mark.parametrize(("family", "kind"), pairs(FAMILIES, KINDS))
def test_every_family_reads_every_kind(family: str, kind: str, tmp_path: Path) -> None:
    meant = write(tmp_path, kind, **of_family(family))
    source = open_source(str(tmp_path))
    weights = source.weights(DType.BF16, 0, formats=source.formats(DType.BF16))
    checked = {key: piece for key, piece in stored_tensors(source.spec).pieces.items() if piece.key in meant}
    assert {piece.key for piece in checked.values()} == meant.keys()
    for key, piece in checked.items():
        found = matrix_of(weights, key, torch.float64)
        assert found is not None
        np.testing.assert_allclose(found.numpy(), piece.of(torch.from_numpy(meant[piece.key])).numpy(), rtol=1e-12)


@pytest.mark.parametrize(("family", "text"), pairs(FAMILIES, WRITTEN_HERE))
def test_every_family_is_written_and_read_in_every_format(family: str, text: str, tmp_path: Path) -> None:
    config = {name: value for name, value in described(**of_family(family)).items() if name != "quantization_config"}
    spec, formats = spec_from_config(config, family), parse_formats(text, "bf16")
    weights = random_weights(spec, 1)
    write_checkpoint(tmp_path, config, spec, weights, formats, DType.BF16)
    read = open_source(str(tmp_path)).weights(DType.BF16, 0, formats=formats)
    wanted = quantised(spec, weights, formats, DType.BF16)
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[key].view(torch.uint8), each.view(torch.uint8)) for key, each in wanted.items())


@pytest.mark.parametrize("name", PACKAGES)
def test_what_compressed_tensors_writes_is_read_as_it_describes(name: str) -> None:
    source = open_source(str(WRITTEN / name))
    held = load_file(WRITTEN / name / "model.safetensors")
    weights = source.weights(DType.BF16, 0, formats=source.formats(DType.BF16))
    for key, shape in checkpoint_tensors(source.spec).items():
        if not key.endswith("_proj.weight"):
            assert torch.equal(weights[key], held[key])
            continue
        base = key.removesuffix("weight")
        codes, scales = held.get(f"{base}weight"), held[f"{base}weight_scale"].double().numpy()
        zeros: Any = 0
        if codes is None:
            bits = 8 if name == "w8a16" else 4
            octets = held[f"{base}weight_packed"].numpy().view(np.uint8).astype(np.int64)
            numbers = octets if bits == 8 else np.stack((octets & 15, octets >> 4), -1).reshape(shape)
            values = (numbers - (1 << bits - 1)).astype(np.float64)
            if f"{base}weight_zero_point" in held:
                turned = np.ascontiguousarray(held[f"{base}weight_zero_point"].numpy().T).view(np.uint8)
                zeros = np.stack((turned & 15, turned >> 4), -1).reshape(len(turned), -1).T.astype(np.float64) - 8
        else:
            values = codes.double().numpy()
        groups = scales.shape[1] if scales.ndim > 1 else 1
        group, scales = shape[1] // groups, np.broadcast_to(scales.reshape(-1, groups), (shape[0], groups))
        shifted = values - (np.repeat(zeros, group, 1) if isinstance(zeros, np.ndarray) else 0)
        found = matrix_of(weights, key, torch.float64)
        assert found is not None
        np.testing.assert_allclose(found.numpy(), shifted * np.repeat(scales, group, 1), rtol=1e-12)


@pytest.mark.parametrize("name", [*PACKAGES, "gptq with zeros", "awq", "fp8 of blocks"])
def test_a_program_decodes_a_checkpoint_token_for_token_like_its_oracle(name: str, tmp_path: Path) -> None:
    folder = WRITTEN / name
    if name not in PACKAGES:
        folder = tmp_path
        write(folder, name)
    source = open_source(str(folder))
    work = make_workload(str(folder), "h100", "f32", 32)
    space = make_space(work)
    program = lower(work.graph, space.to_config(space.known_good()[0]), TARGETS["h100"])
    weights = source.weights(DType.F32, 0, formats=work.formats)
    session = ReferenceSession(program, source.spec, weights)
    assert verify(session, weights, default_positions(32)).passed
    session, oracle, token = ReferenceSession(program, source.spec, weights), make_oracle(session, weights), 5
    for position in range(8):
        step, logits = session.step(token, position), oracle.step(token, position)
        assert step.token == int(logits.argmax())
        token = step.token


def change(folder: Path, **tensors: Tensor | None) -> None:
    held = load_file(folder / "model.safetensors")
    for end, tensor in tensors.items():
        name = f"model.layers.0.mlp.up_proj.{end}"
        if tensor is None:
            del held[name]
        else:
            held[name] = tensor
    save_file(held, folder / "model.safetensors")


def scales_with(value: float) -> Tensor:
    return torch.full((4, 256), 0.01, dtype=torch.float16).index_fill(1, torch.tensor([3]), value)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gptq", {"scales": scales_with(0.0)}, "scales of 'model.layers.0.mlp.up_proj.weight': 0 at [3, 0]; supported"),
        ("gptq", {"scales": scales_with(torch.nan)}, "'model.layers.0.mlp.up_proj.weight': nan at [3, 0]"),
        ("gptq", {"scales": scales_with(torch.inf)}, "up_proj.weight': inf at [3, 0]; supported: positive and finite"),
        ("gptq", {"scales": torch.ones(4, 255)}, "up_proj.scales' in model.safetensors is [4, 255]; wanted: [4, 256]"),
        ("gptq", {"qweight": torch.ones(16, 256)}, "up_proj.qweight' in model.safetensors is F32; supported: I32"),
        ("gptq", {"qzeros": None}, "up_proj.qzeros' is not in"),
        ("gptq", {"qzeros": torch.zeros(4, 32, dtype=torch.int32)}, "one is -7 off the middle in a symmetric"),
        ("gptq", {"qzeros": torch.full((4, 32), -1, dtype=torch.int32)}, "a zero point of 16; supported: 0 to 15"),
        ("gptq", {"g_idx": torch.arange(128, dtype=torch.int32).flip(0) // 32}, "columns are not in order"),
        ("awq", {"odd": torch.ones(1)}, "up_proj.odd' in model.safetensors is not one of this model's"),
        ("int8 with zeros", {"weight_zero_point": None}, "up_proj.weight_zero_point' is not in"),
        ("fp8 of tensors", {"weight": torch.full((256, 128), torch.nan).to(torch.float8_e4m3fn)}, "a code is NaN"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_by_its_tensor(
    kind: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, kind)
    change(tmp_path, **changes)
    with pytest.raises(WeightsError) as caught:
        open_source(str(tmp_path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


WEIGHTS = INT8["config_groups"]["group_0"]["weights"]  # type: ignore[index]


def with_weights(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {**WEIGHTS, **changes}}
    return {**INT8, "format": changes.pop("form", "int-quantized"), "config_groups": {"group_0": group}}


def with_activations(which: str = "input_activations", **fields: Any) -> dict[str, Any]:
    given = INT8["config_groups"]["group_0"]  # type: ignore[index]
    return {**INT8, "config_groups": {"group_0": {**given, which: {"num_bits": 8, "dynamic": True, **fields}}}}


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "mxfp4"}, 'quantization_config.quant_method is "mxfp4"; supported: "compressed-'),
        ({"quant_method": "bitsandbytes"}, 'quant_method is "bitsandbytes"'),
        ({**INT8, "format": "nvfp4-pack-quantized"}, 'format is "nvfp4-pack-quantized"; supported: "pack-qu'),
        ({**INT8, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme is"),
        ({"quant_method": "fp8", "kv_cache_scheme": "static"}, 'kv_cache_scheme is "static"; supported: null; caches'),
        ({"quant_method": "fp8", "kv_cache_quant_targets": ["k_proj", "v_proj"]}, "kv_cache_quant_targets is ["),
        ({**GPTQ, "kv_cache_dtype": "fp8"}, 'kv_cache_dtype is "fp8"'),
        (with_activations(num_bits=4), "config_groups.group_0.input_activations.num_bits is 4; supported: 8"),
        (with_activations("output_activations"), "group_0.output_activations is {"),
        ({**INT8, "config_groups": {"a": {}, "b": {}}}, 'config_groups has "a", "b"; supported: one group'),
        (with_weights(num_bits=4), "weights.num_bits is 4; supported: 8"),
        (with_weights(strategy="tensor_group"), 'weights.strategy is "tensor_group"'),
        (with_weights(actorder="group"), 'weights.actorder is "group"'),
        (with_weights(strategy="block", block_structure=[64, 64]), "block_structure is [64, 64]; supported: [128"),
        ({**GPTQ, "desc_act": True}, "quantization_config.desc_act is true; supported: false"),
        ({**GPTQ, "bits": 3}, "bits is 3; supported: 4 or 8"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, 'version is "gemv"'),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size is [64, 64]; supported: [128"),
        ("int4", 'quantization_config is "int4"; supported: an object'),
    ],
)  # fmt: skip
def test_what_no_format_stands_for_is_refused_by_name(scheme: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described(quantization_config=scheme)))
    with pytest.raises(UnsupportedModelError) as caught:
        load_spec(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("end", ["self_attn.k_scale", "self_attn.v_scale", "self_attn.attn.k_scale",
                                 "self_attn.k_proj.output_scale", "self_attn.kv_scale"])  # fmt: skip
@pytest.mark.parametrize("kind", ["fp8 of tensors", "plain"])
def test_scales_of_a_quantised_cache_are_refused_by_name(end: str, kind: str, tmp_path: Path) -> None:
    if kind == "plain":
        config = described()
        del config["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(random_weights(load_spec(tmp_path), 1), tmp_path / "model.safetensors")
    else:
        write(tmp_path, kind)
    name = f"model.layers.0.{end}"
    held = load_file(tmp_path / "model.safetensors")
    save_file({**held, name: torch.tensor([0.5])}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as caught:
        open_source(str(tmp_path)).weights(DType.BF16, 0)
    assert f"tensor '{name}' in model.safetensors is of a quantised cache or output; supported" in str(caught.value)


@pytest.mark.parametrize("value", [None, False, "auto", {}])
def test_a_field_that_quantises_no_cache_is_read(value: object) -> None:
    assert read_scheme({"quantization_config": {"quant_method": "fp8", "kv_cache_scheme": value}}, "here") is not None


SYMMETRIC = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
SYMMETRIC_INT8 = {**INT8, "config_groups": {"group_0": {"targets": ["Linear"], "weights": SYMMETRIC}}}
BITMASK = {"format": "sparse-bitmask", "global_sparsity": 0.5}


@pytest.mark.parametrize(
    ("scheme", "field", "accepted", "refused"),
    [
        (INT8, "sparsity_config", {"format": "dense", "targets": []}, BITMASK),
        (INT8, "sparsity_config", {}, {"format": "sparse-24-bitmask"}),
        (INT8, "transform_config", {"config_groups": {}}, {"config_groups": {"u": {"type": "hadamard"}}}),
        (INT8, "kv_cache_scheme", None, {"num_bits": 8}),
        ({**GPTQ, "desc_act": True}, "static_groups", True, False),
        ({**GPTQ, "desc_act": True}, "group_size", -1, 32),
        ({"quant_method": "fp8"}, "weight_block_size", None, [1, 128]),
    ],
)
def test_metadata_without_effect_is_read_and_its_twin_is_refused(
    scheme: dict[str, Any], field: str, accepted: object, refused: object
) -> None:
    assert read_scheme({"quantization_config": {**scheme, field: accepted}}, "here") is not None
    with pytest.raises(UnsupportedModelError, match="here: quantization_config"):
        read_scheme({"quantization_config": {**scheme, field: refused}}, "here")


@pytest.mark.parametrize(
    ("end", "accepted", "refused", "message"),
    [
        ("weight_zero_point", torch.zeros(256, 1, dtype=torch.int8), torch.full((256, 1), 3, dtype=torch.int8),
         "zero points of 'model.layers.0.mlp.up_proj.weight': one is 3 off the middle in a symmetric checkpoint"),
        ("weight_g_idx", torch.full((128,), -1, dtype=torch.int32), torch.arange(128, dtype=torch.int32).flip(0),
         "up_proj.weight_g_idx': columns are not in order"),
        ("bias", torch.zeros(256), torch.ones(256), "up_proj.bias' in model.safetensors is not zero"),
        ("input_scale", torch.tensor(2.0), None, ""),
        ("output_scale", None, torch.tensor(2.0), "is of a quantised cache or output"),
    ],
)  # fmt: skip
def test_zeros_without_effect_are_read_and_their_twins_are_refused(
    end: str, accepted: Tensor | None, refused: Tensor | None, message: str, tmp_path: Path
) -> None:
    write(tmp_path, "int8 with zeros")
    config = described(quantization_config=SYMMETRIC_INT8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    held = load_file(tmp_path / "model.safetensors")
    held = {name: tensor for name, tensor in held.items() if not name.endswith("zero_point")}
    meant = None
    for extra in ({}, None if accepted is None else {f"model.layers.0.mlp.up_proj.{end}": accepted}):
        if extra is not None:
            save_file({**held, **extra}, tmp_path / "model.safetensors")
            source = open_source(str(tmp_path))
            found = matrix_of(source.weights(DType.F32, 0, formats=source.formats(DType.F32)),
                              "model.layers.0.mlp.up_proj.weight", torch.float64)  # fmt: skip
            assert found is not None
            meant = found if meant is None else meant
            assert torch.equal(found, meant)
    if refused is not None:
        save_file({**held, f"model.layers.0.mlp.up_proj.{end}": refused}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError) as caught:
            open_source(str(tmp_path))
        assert message in str(caught.value)


FP8_FIELD = "modules_to_not_convert"


@pytest.mark.parametrize(
    ("kind", "field", "entry", "is_named"),
    [
        ("fp8 of blocks", FP8_FIELD, "model.layers.0.mlp.up_proj", True),
        ("fp8 of blocks", FP8_FIELD, "model.layers.0", True),
        ("fp8 of blocks", FP8_FIELD, "up_proj", True),
        ("fp8 of blocks", FP8_FIELD, "", True),
        ("fp8 of blocks", FP8_FIELD, r"model\.layers\.\d+\.mlp", True),
        ("fp8 of blocks", "ignored_layers", "up_proj", True),
        ("fp8 of tensors", FP8_FIELD, "up_proj", True),
        ("awq", FP8_FIELD, "up_proj", True),
        ("int8 with zeros", "ignore", "model.layers.0.mlp.up_proj", True),
        ("int8 with zeros", "ignore", "re:.*up_proj$", True),
        ("int8 with zeros", "ignore", "Linear", True),
        ("fp8 of blocks", FP8_FIELD, "model.layers.0.mlp.up", False),
        ("fp8 of blocks", FP8_FIELD, "model.layers.0.input_layernorm", False),
        ("fp8 of blocks", FP8_FIELD, "lm_head", False),
        ("fp8 of blocks", FP8_FIELD, "((a*)*)*b", False),
        ("fp8 of blocks", FP8_FIELD, "[", False),
        ("int8 with zeros", "ignore", "up_proj", False),
    ],
)
def test_scales_of_a_matrix_that_is_said_to_be_unquantised_are_refused(
    kind: str, field: str, entry: str, is_named: bool, tmp_path: Path
) -> None:
    write(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {**config["quantization_config"], field: ["lm_head", entry]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if not is_named:
        open_source(str(tmp_path))
        return
    with pytest.raises(WeightsError) as caught:
        open_source(str(tmp_path))
    told = ascii(entry.removeprefix("re:"))
    assert f"is not to be quantised, since quantization_config.{field} has {told}, but" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_says_that_its_activations_are_to_be_quantised(tmp_path: Path) -> None:
    write(tmp_path, "int8 with zeros")
    scheme = load_scheme(tmp_path)
    assert scheme is not None
    assert scheme.activations


def test_a_quantised_checkpoint_is_not_quantised_again() -> None:
    source = open_source(str(WRITTEN / "w4a16"))
    with pytest.raises(UsageError, match="its checkpoint is int4-g32; weights int8 would quantise it once more"):
        source.weights(DType.BF16, 0, formats=parse_formats("int8", "bf16"))


@pytest.mark.parametrize("name", ["lm_head", "re:.*lm_head", "re:.*lm_head.*", "re:.*lm_head$", "re:lm_head"])
def test_patterns_of_the_head_leave_it_unquantised(name: str) -> None:
    scheme = read_scheme({"quantization_config": {**INT8, "ignore": [name]}}, "here")
    assert scheme is not None
    assert not scheme.head
