from __future__ import annotations

import dataclasses
import json
from math import inf, nan, prod
from typing import Any

import pytest

from flywheel.errors import UnsupportedModelError
from flywheel.models.catalog import CATALOG
from flywheel.models.families import count_params, layer_weight_shapes
from flywheel.models.rope import Rope, RopeScaling
from flywheel.models.spec import (
    LAYER_WEIGHT_KEYS,
    MODEL_WEIGHT_KEYS,
    DecoderSpec,
    layer_weight_key,
    model_weight_key,
    model_weight_shapes,
    spec_from_dict,
)

TINY = DecoderSpec("tiny", "llama", 64, 96, 2, 4, 2, 16, 128, 1e4, 1e-5, 256)
LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 8192)


def changed(**fields: Any) -> DecoderSpec:
    return dataclasses.replace(TINY, **fields)


def test_widths_follow_from_heads() -> None:
    assert (TINY.q_width, TINY.kv_width, TINY.group) == (64, 32, 2)


def test_head_width_is_independent_of_the_hidden_size() -> None:
    spec = CATALOG["qwen3-0.6b"]
    assert spec.q_width == 2048 != spec.hidden


def test_tying_the_head_saves_one_table() -> None:
    assert count_params(TINY) - count_params(changed(tied_head=True)) == 128 * 64


def test_biases_and_qk_norms_count_once_per_layer() -> None:
    assert count_params(changed(qkv_bias=True)) - count_params(TINY) == 2 * (64 + 2 * 32)
    assert count_params(changed(qk_norm=True)) - count_params(TINY) == 2 * (16 + 16)


@pytest.mark.parametrize("name", CATALOG)
def test_shapes_and_keys_describe_every_parameter_once(name: str) -> None:
    spec = CATALOG[name]
    state = {model_weight_key(spec, role): shape for role, shape in model_weight_shapes(spec).items()}
    for layer in range(spec.n_layers):
        state |= {layer_weight_key(role, layer): shape for role, shape in layer_weight_shapes(spec, layer).items()}
    layers = [layer_weight_shapes(spec, layer) for layer in range(spec.n_layers)]
    assert len(state) == len(model_weight_shapes(spec)) + sum(map(len, layers))
    assert sum(map(prod, state.values())) == count_params(spec)


def test_every_role_has_a_key_and_every_key_a_role() -> None:
    everything = changed(qkv_bias=True, qk_norm=True, norm_bias=True, o_bias=True, mlp_bias=True, norms="around",
                         layer_scalar=True)
    assert set(layer_weight_shapes(everything)) == set(LAYER_WEIGHT_KEYS)
    assert set(model_weight_shapes(everything)) == set(MODEL_WEIGHT_KEYS)


def test_keys_are_those_of_hugging_face() -> None:
    assert layer_weight_key("q_proj", 3) == "model.layers.3.self_attn.q_proj.weight"
    assert layer_weight_key("v_bias", 0) == "model.layers.0.self_attn.v_proj.bias"
    assert layer_weight_key("down_proj", 11) == "model.layers.11.mlp.down_proj.weight"
    assert model_weight_key(TINY, "lm_head") == "lm_head.weight"


def test_a_tied_head_is_the_embedding_table() -> None:
    assert model_weight_key(changed(tied_head=True), "lm_head") == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    "field", ["hidden", "intermediate", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab", "max_position"]
)
@pytest.mark.parametrize("value", [0, -1, 2**31, True, 16.0, None])
def test_a_dimension_that_is_not_a_positive_int32_is_rejected(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"^tiny: {field}="):
        changed(**{field: value})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"turned": (1, 0)}, "turned"),
        ({"turned": [True]}, "turned"),
        ({"n_kv_heads": 3}, "n_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"head_dim": 2**20}, "n_heads * head_dim"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_theta": inf}, "rope_theta"),
        ({"norm_eps": nan}, "norm_eps"),
        ({"norm_eps": -1e-5}, "norm_eps"),
        ({"rope_scaling": dataclasses.replace(LLAMA3, factor=0.0)}, "rope_scaling.factor"),
        ({"rope_scaling": dataclasses.replace(LLAMA3, low_freq_factor=4.0)}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": dataclasses.replace(LLAMA3, high_freq_factor=nan)}, "rope_scaling.high_freq_factor"),
        ({"rope_scaling": dataclasses.replace(LLAMA3, original_max_position=0)}, "rope_scaling.original_max_position"),
    ],
)
def test_an_impossible_spec_cannot_be_built(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        changed(**fields)
    assert str(caught.value).startswith(f"tiny: {named}")
    assert "\n" not in str(caught.value)


EVERY = dataclasses.replace(
    TINY, rope_scaling=LLAMA3, window=16, windowed=tuple(layer % 2 == 0 for layer in range(TINY.n_layers)),
    local_rope=Rope(1e4, LLAMA3), attention_cap=50.0, norms="around", norm_offset=1.0, activation="gelu_tanh",
)  # fmt: skip


@pytest.mark.parametrize("spec", [TINY, EVERY])
def test_a_spec_comes_back_from_json(spec: DecoderSpec) -> None:
    assert spec_from_dict(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec


def test_what_an_older_version_wrote_has_the_defaults() -> None:
    written = dataclasses.asdict(TINY)
    older = ("name", "family", "hidden", "intermediate", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab",
             "rope_theta", "norm_eps", "max_position", "tied_head", "rope_scaling")  # fmt: skip
    assert spec_from_dict({name: written[name] for name in older}) == TINY


@pytest.mark.parametrize(("every", "turned"), [(None, ()), (1, (False,)), (4, (True, True, True, False))])
def test_a_spec_that_says_every_how_many_layers_have_no_rope_is_read(
    every: int | None, turned: tuple[bool, ...]
) -> None:
    older = {name: value for name, value in dataclasses.asdict(TINY).items() if name != "turned"}
    assert spec_from_dict({**older, "nope_every": every}) == dataclasses.replace(TINY, turned=turned)


@pytest.mark.parametrize("fields", [{"local_rope": "x"}, {"windowed": 5}, {"rope_scaling": {}}, {"unknown": 1}])
def test_a_spec_of_other_types_raises_type_error(fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        spec_from_dict(dataclasses.asdict(TINY) | fields)


def test_layers_say_their_window_and_their_rope() -> None:
    assert [EVERY.window_of(layer) for layer in range(2)] == [16, None]
    assert [EVERY.rope_of(layer) for layer in range(2)] == [Rope(1e4, LLAMA3), Rope(TINY.rope_theta, LLAMA3)]
    assert dataclasses.replace(EVERY, nope_full=True).rope_of(1) is None
