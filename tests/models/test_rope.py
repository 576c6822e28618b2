"""RoPE of every type is transformers', number by number, or refused."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
import torch
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.errors import UnsupportedModelError, UsageError
from flywheel.ir import DType, InstructionKind
from flywheel.models.decoder import decode_step
from flywheel.models.forward import turning_of
from flywheel.models.hf import spec_from_config
from flywheel.models.oracle import rope_table
from flywheel.models.rope import LongRope, Rope, YarnRope, rope_params
from flywheel.models.spec import DecoderSpec, spec_from_dict
from flywheel.runtime.sequences import check_join, make_request

SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 4096,
}  # fmt: skip
LONG: dict[str, Any] = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}  # fmt: skip
factors = st.floats(1.0, 64.0)
FIELDS: dict[str, Any] = {
    "linear": {"factor": factors},
    "dynamic": {"factor": factors},
    "llama3": {
        "factor": factors, "low_freq_factor": st.floats(0.5, 2.0), "high_freq_factor": st.floats(2.5, 8.0),
        "original_max_position_embeddings": st.integers(16, 8192),
    },
    "yarn": {
        "factor": factors, "original_max_position_embeddings": st.integers(16, 8192),
        "attention_factor": st.none() | st.floats(0.5, 2.0), "beta_fast": st.none() | st.floats(8.0, 64.0),
        "beta_slow": st.none() | st.floats(0.25, 4.0), "mscale": st.none() | st.floats(0.5, 1.5),
        "mscale_all_dim": st.none() | st.floats(0.5, 1.5), "truncate": st.booleans(),
    },
    "longrope": {
        "factor": st.none() | factors, "attention_factor": st.none() | st.floats(0.5, 2.0),
        "original_max_position_embeddings": st.integers(16, 2048),
    },
}  # fmt: skip
"""Of each type, the fields and what they are drawn from. A None is left out, but for the factors of longrope."""


@st.composite
def scaled(draw: st.DrawFn, kind: str) -> tuple[int, dict[str, Any]]:
    """(head_dim, rope_parameters)."""
    head_dim = 2 * draw(st.integers(2, 64))
    given_fields = {name: draw(each) for name, each in FIELDS[kind].items()}
    rope = {name: value for name, value in given_fields.items() if value is not None}
    if kind == "longrope":
        for name in ("short_factor", "long_factor"):
            rope[name] = draw(st.lists(st.floats(0.75, 64.0), min_size=head_dim // 2, max_size=head_dim // 2))
    return head_dim, {"rope_type": kind, "rope_theta": draw(st.sampled_from([5e3, 1e4, 1e5, 5e5, 1e7])), **rope}


def theirs(head_dim: int, rope: dict[str, Any], is_long: bool) -> tuple[torch.Tensor, float]:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(**without_type(SIZES), head_dim=head_dim, rope_parameters=dict(rope))
    length = config.rope_parameters["original_max_position_embeddings"] + 1 if is_long else None
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, seq_len=length)


def without_type(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name != "model_type"}


def spec_of(head_dim: int, rope: dict[str, Any]) -> DecoderSpec:
    return spec_from_config(SIZES | {"head_dim": head_dim, "rope_parameters": rope}, "drawn")


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("kind", FIELDS)
def test_frequencies_and_gains_are_those_of_transformers(kind: str, is_long: bool) -> None:
    if is_long and kind != "longrope":
        return

    @settings(max_examples=examples(40), deadline=None)
    @given(scaled(kind))
    def check(drawn: tuple[int, dict[str, Any]]) -> None:
        head_dim, rope = drawn
        wanted, gain = theirs(head_dim, rope, is_long)
        spec = spec_of(head_dim, rope)
        frequencies, gains = rope_table(spec.rope_of(0), spec, is_long)
        assert torch.equal(frequencies, wanted)
        assert torch.equal(gains, torch.full_like(gains, gain))
        params = rope_params(Rope(spec.rope_theta, spec.rope_scaling), head_dim, None, 2**20 if is_long else 1)
        assert params.get("scale", 1.0) == gain
        if "frequencies" in params:  # powers may differ by the last bit from torch's
            torch.testing.assert_close(torch.tensor(params["frequencies"]), wanted, rtol=5e-7, atol=0.0)

    check()


def test_what_is_drawn_is_not_all_alike() -> None:
    plain, _ = theirs(16, {"rope_type": "linear", "factor": 1.0, "rope_theta": 1e4}, False)
    yarn, gain = theirs(
        16, {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4, "original_max_position_embeddings": 64}, False
    )
    assert gain > 1.1
    assert ((yarn < plain) & (yarn > plain / 8)).any()


def test_only_a_base_that_says_all_stands_for_its_frequencies() -> None:
    assert rope_params(Rope(1e4), 16, None, 8) == {"head_dim": 16, "theta": 1e4}
    assert rope_params(Rope(1e4), 16, 16, 8) == {"head_dim": 16, "theta": 1e4}
    partial = rope_params(Rope(1e4), 16, 8, 8)
    assert partial.keys() == {"head_dim", "frequencies"}
    assert partial["frequencies"][4:] == (0.0,) * 4
    assert rope_params(Rope(1e4), 8, None, 8)["head_dim"] == 8
    torch.testing.assert_close(
        torch.tensor(partial["frequencies"][:4]), 1e4 ** -(torch.arange(4) / 4), rtol=1e-6, atol=0.0
    )


def test_prefill_turns_as_the_oracle_does_in_each_context() -> None:
    spec = dataclasses.replace(spec_of(16, LONG), rotary_dim=None)
    for context in (64, 65):
        (turning,) = turning_of(decode_step(spec, context, DType.F32)).values()
        torch.testing.assert_close(turning, rope_table(spec.rope_of(0), spec, context > 64), rtol=5e-7, atol=0.0)


def test_pairs_that_are_not_turned_have_no_gain() -> None:
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    spec = dataclasses.replace(spec_of(16, yarn), rotary_dim=8)
    (turning,) = turning_of(decode_step(spec, 8, DType.F32)).values()
    frequencies, gains = turning
    assert (frequencies[:4] > 0).all()
    assert (gains[:4] > 1.2).all()
    assert frequencies[4:].tolist() == [0.0] * 4
    assert gains[4:].tolist() == [1.0] * 4
    torch.testing.assert_close(turning, rope_table(spec.rope_of(0), spec, False), rtol=5e-7, atol=0.0)


@pytest.mark.parametrize("kind", ["linear", "yarn", "longrope", "llama3"])
def test_a_spec_survives_json(kind: str) -> None:
    rope: dict[str, Any] = {
        "linear": {"factor": 2.0},
        "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
        "longrope": LONG,
        "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 64},
    }[kind]  # fmt: skip
    spec = spec_of(16, {"rope_type": kind, **rope})
    assert spec.rope_scaling is not None
    assert spec_from_dict(json.loads(json.dumps(dataclasses.asdict(spec)))) == spec
    local = dataclasses.replace(spec, local_rope=Rope(1e4, spec.rope_scaling))
    assert spec_from_dict(json.loads(json.dumps(dataclasses.asdict(local)))) == local


@pytest.mark.parametrize(
    ("rope", "told"),
    [
        ({"rope_type": "proportional"}, "rope_parameters.rope_type is"),
        ({"rope_type": "linear"}, "rope_parameters.factor is missing"),
        ({"rope_type": "linear", "factor": 0.0}, "rope_parameters.factor is 0.0"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 32}, "beta_fast is 32; supported: absent with rope_type"),
        ({"rope_type": "dynamic", "factor": "2"}, "rope_parameters.factor is"),
        ({"rope_type": "yarn", "factor": 2.0, "truncate": None}, "rope_parameters.truncate is null"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": 0.0}, "rope_parameters.attention_factor is 0.0"),
        ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "frequencies are no numbers of float32"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": -90.0, "mscale_all_dim": 1.0}, "attention_factor is missing"),
        (LONG | {"short_factor": [1.0] * 7}, "rope_parameters.short_factor has 7 factors; wanted: 8"),
        (LONG | {"long_factor": [1.0] * 7}, "rope_parameters.long_factor has 7 factors; wanted: 8"),
        (LONG | {"long_factor": [0.0] * 8}, "rope_parameters.long_factor is"),
        (LONG | {"long_factor": None}, "rope_parameters.long_factor is null"),
        (LONG | {"original_max_position_embeddings": 1}, "attention_factor is missing"),
        (LONG | {"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor is 0.5"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_is_refused_by_field(rope: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        spec_of(16, rope)
    assert told in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_field_beside_the_section_goes_before_one_in_it() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    config = SIZES | {"rope_parameters": yarn, "original_max_position_embeddings": 128}
    spec = spec_from_config(config, "both")
    assert isinstance(spec.rope_scaling, YarnRope)
    assert spec.rope_scaling.original_max_position == 128
    read = LlamaConfig(**without_type(config) | {"rope_parameters": dict(yarn)})
    wanted, _ = ROPE_INIT_FUNCTIONS["yarn"](read)
    assert torch.equal(rope_table(spec.rope_of(0), spec, False)[0], wanted)


def test_a_prompt_within_the_original_context_is_refused_in_a_longer_one() -> None:
    spec = spec_of(16, LONG)
    assert isinstance(spec.rope_scaling, LongRope)
    for length, context in ((64, 64), (65, 128), (1, 64)):
        make_request([1] * length, 1, frozenset(), spec, context)
        check_join(spec, context, (), 0, [1] * length, length)
    for join in (True, False):
        with pytest.raises(UsageError, match="64 tokens at context 128; drawn has other RoPE frequencies beyond 64"):
            if join:
                check_join(spec, 128, (), 0, [1] * 64, 64)
            else:
                make_request([1] * 64, 1, frozenset(), spec, 128)


def test_programs_of_plain_models_say_their_base() -> None:
    graph = decode_step(spec_from_config(SIZES, "plain"), 8, DType.BF16)
    (params,) = {
        tuple(op.params.items()) for block in graph.kinds for op in block.ops if op.kind is InstructionKind.ROPE
    }
    assert params == (("head_dim", 16), ("theta", 10000.0))
