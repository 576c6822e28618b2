"""Weights that a checkpoint stores as one, or in another order, are read as what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONFIG, KINDS, described, write
from safetensors.torch import load_file, save_file

from flywheel.decode.reference import ReferenceSession
from flywheel.decode.source import open_source
from flywheel.errors import ConfigError, UsageError, WeightsError
from flywheel.ir import DType
from flywheel.judge.verdicts import default_positions, make_oracle, verify
from flywheel.lowering.lower import lower
from flywheel.models.formats import parse_formats
from flywheel.models.hf import spec_from_config
from flywheel.models.packing import the_format, write_checkpoint
from flywheel.models.quantise import matrix_of, quantised
from flywheel.models.spec import DecoderSpec
from flywheel.models.stored import canonical, stored, stored_tensors
from flywheel.models.weights import checkpoint_tensors, random_weights
from flywheel.search.space import make_space
from flywheel.search.workload import make_workload

PHI3: dict[str, Any] = {
    "model_type": "phi3", "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.5, "pad_token_id": 0,
}  # fmt: skip
GLM: dict[str, Any] = {"model_type": "glm", "architectures": ["GlmForCausalLM"], "head_dim": 32, "pad_token_id": 0}
FAMILIES = {"phi3": PHI3, "glm": GLM}


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    config = described(**FAMILIES[family] | changes)
    config.pop("quantization_config", None)
    return config


def spec_of(family: str, **changes: Any) -> DecoderSpec:
    return spec_from_config(config_of(family, **changes), family)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_shapes_are_those_of_transformers(family: str) -> None:
    import transformers

    config = config_of(family)
    kind = getattr(transformers, config["architectures"][0])
    with torch.device("meta"):
        model = kind(kind.config_class(**{name: value for name, value in config.items() if name != "architectures"}))
    wanted = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del wanted["lm_head.weight"]
    assert dict(stored_tensors(spec_of(family)).shapes) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_stored_and_read_is_as_it_was(family: str) -> None:
    spec = spec_of(family)
    weights = random_weights(spec, 1)
    held = stored(spec, weights)
    assert held.keys() == stored_tensors(spec).shapes.keys() != checkpoint_tensors(spec).keys()
    back = canonical(spec, held)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in weights.items())


def test_a_model_whose_weights_are_canonical_is_read_without_a_copy() -> None:
    spec = spec_from_config({name: value for name, value in CONFIG.items() if name != "quantization_config"}, "plain")
    weights = random_weights(spec, 1)
    assert all(canonical(spec, weights)[key] is tensor for key, tensor in weights.items())


def test_pairs_stand_half_a_head_apart() -> None:
    # Heads of 8 elements. Of the first 4, Phi-3 turns 0 with 2 and 1 with 3, GLM 0 with 1 and 2 with 3.
    for family, heads in {"phi3": [0, 1, 4, 5, 2, 3, 6, 7], "glm": [0, 2, 4, 5, 1, 3, 6, 7]}.items():
        spec = spec_of(family, head_dim=8)
        piece = stored_tensors(spec).pieces["model.layers.0.self_attn.k_proj.weight"]
        assert list(piece.heads) == heads
        rows = torch.arange(spec.q_width + 2 * spec.kv_width)[:, None]
        start = spec.q_width if family == "phi3" else 0
        assert piece.of(rows)[:8, 0].tolist() == [start + place for place in heads]
        values = stored_tensors(spec).pieces["model.layers.0.self_attn.v_proj.weight"]
        assert values.heads == ()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "int8 with zeros"])
@pytest.mark.parametrize("family", FAMILIES)
def test_quantised_matrices_mean_what_they_mean_whole(family: str, kind: str, tmp_path: Path) -> None:
    meant = write(tmp_path, kind, **FAMILIES[family] | {"num_attention_heads": 4, "num_key_value_heads": 4})
    source = open_source(str(tmp_path))
    assert make_workload(str(tmp_path), "h100", "bf16", 32).weights == KINDS[kind][2]
    weights = source.weights(DType.BF16, 0, formats=source.formats(DType.BF16))
    checked = 0
    for key, piece in stored_tensors(source.spec).pieces.items():
        if piece.key not in meant:
            continue
        found = matrix_of(weights, key, torch.float64)
        assert found is not None
        np.testing.assert_allclose(found.numpy(), piece.of(torch.from_numpy(meant[piece.key])).numpy(), rtol=1e-12)
        checked += 1
    assert checked == 7 * source.spec.n_layers


@pytest.mark.parametrize("name", ["int4-g32", "int4-g32-zeros", "fp8", "fp8-block", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_checkpoint_is_written_as_it_is_stored(family: str, name: str, tmp_path: Path) -> None:
    config = config_of(family, num_key_value_heads=4)
    spec, formats = spec_from_config(config, family), parse_formats(name, "bf16")
    weights = random_weights(spec, 1)
    write_checkpoint(tmp_path, config, spec, weights, formats, DType.BF16)
    assert any("gate_up_proj.weight" in key for key in load_file(tmp_path / "model.safetensors"))
    read = open_source(str(tmp_path)).weights(DType.BF16, 0, formats=formats)
    wanted = quantised(spec, weights, formats, DType.BF16)
    assert read.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(read[key].view(torch.uint8), tensor.view(torch.uint8)), key


def test_one_scale_of_several_matrices_is_not_written(tmp_path: Path) -> None:
    config = config_of("phi3")
    spec = spec_from_config(config, "phi3")
    with pytest.raises(UsageError, match=r"fp8-tensor: model\S*\.qkv_proj\.weight is of several matrices"):
        write_checkpoint(
            tmp_path, config, spec, random_weights(spec, 1), parse_formats("fp8-tensor", "bf16"), DType.BF16
        )
    assert not list(tmp_path.iterdir())


def test_a_matrix_that_groups_do_not_divide_is_named_as_it_is_stored() -> None:
    spec = spec_from_config(config_of("phi3"), "phi3")
    with pytest.raises(ConfigError, match=r"tensor 'model\.layers\.0\.self_attn\.qkv_proj\.weight': groups of 48 "):
        the_format(parse_formats("int4-g48", "bf16"), spec)


def test_blocks_across_matrices_or_parts_of_heads_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "fp8 of blocks", **PHI3 | {"num_attention_heads": 4, "num_key_value_heads": 2})
    with pytest.raises(WeightsError, match=r"qkv_proj.weight': blocks of 128 rows go across row 192, where another"):
        open_source(str(tmp_path))
    write(tmp_path, "fp8 of blocks", **GLM | {"head_dim": 256})
    with pytest.raises(WeightsError, match=r"q_proj\.weight': blocks of 128 rows hold parts of heads of 256"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_program_of_a_quantised_checkpoint_passes(family: str, tmp_path: Path) -> None:
    write(tmp_path, "awq", **FAMILIES[family])
    source = open_source(str(tmp_path))
    workload = make_workload(str(tmp_path), "h100", "bf16", 32)
    space = make_space(workload)
    program = lower(workload.graph, space.to_config(space.known_good()[1]), workload.target)
    weights = source.weights(DType.BF16, 0, formats=source.formats(DType.BF16))
    session = ReferenceSession(program, source.spec, weights)
    assert make_oracle(session, weights).context == 32
    verdict = verify(session, weights, default_positions(32))
    assert verdict.passed, verdict.reason


def test_a_checkpoint_that_lacks_a_joined_matrix_is_refused_by_its_name(tmp_path: Path) -> None:
    spec = spec_of("phi3")
    (tmp_path / "config.json").write_text(json.dumps(config_of("phi3")))
    save_file(random_weights(spec, 1), tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"self_attn.qkv_proj.weight' is not in"):
        open_source(str(tmp_path))
