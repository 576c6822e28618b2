"""Whatever the model and the point of the search space, in whatever order tasks fire: the logits are the oracle's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from flywheel.decode.reference import ReferenceSession
from flywheel.ir import TARGETS
from flywheel.judge.verdicts import verify
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES
from flywheel.models.rope import Rope, RopeScaling, YarnRope
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.search.knobs import KNOBS, Choice
from flywheel.search.space import make_space
from flywheel.search.workload import Workload
from flywheel.tensors import TORCH_DTYPES

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 32)},
    "mistral": {"rope_scaling": YarnRope(4.0, 16, 1.25), "rotary_dim": 2},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"turned": (True, False), "qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "cohere2": {"norms": "shared", "logits_scale": 0.5},
    "starcoder2": {"norm": "layer", "gated": False, "o_bias": True, "mlp_bias": True},
    "granite": {"embed_scale": 6.0, "residual_scale": 0.22, "attention_scale": 0.1, "logits_scale": 0.125},
    "olmo3": {"norms": "behind", "wide_qk_norm": True, "qk_norm": True, "local_rope": Rope(3e2)},
    "gemma2": {
        "norms": "around", "norm_offset": 1.0, "activation": "gelu_tanh", "attention_cap": 2.0, "logits_cap": 2.0
    },
    "gemma3_text": {"norms": "around", "embed_scale": 3.0, "qk_norm": True, "local_rope": Rope(1e2)},
    "gemma4_text": {
        "norms": "around", "qk_norm": True, "v_norm": True, "layer_scalar": True, "full_head_dim": 24,
        "full_kv_heads": 1, "full_k_is_v": True,
    },
}


@st.composite
def specs(draw: st.DrawFn) -> DecoderSpec:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    n_layers = draw(st.integers(1, 2))
    windowed = draw(st.lists(st.booleans(), min_size=n_layers, max_size=n_layers))
    n_kv_heads = draw(st.integers(1, 3))
    own = {name: value for name, value in FAMILIES[family].items() if draw(st.booleans())}
    if not own.get("gated", True):
        own["activation"] = "gelu_tanh"  # the only one without a gate
    return DecoderSpec(
        name="drawn",
        family=family,
        hidden=draw(st.integers(8, 150)),
        intermediate=draw(st.integers(8, 150)),
        n_layers=n_layers,
        n_heads=n_kv_heads * draw(st.integers(1, 3)),
        n_kv_heads=n_kv_heads,
        head_dim=draw(st.sampled_from((2, 6, 16, 32))),
        vocab=draw(st.integers(2, 300)),
        rope_theta=1e4,
        norm_eps=1e-5,
        max_position=512,
        tied_head=draw(st.booleans()),
        window=draw(st.integers(1, 70)) if any(windowed) else None,
        windowed=tuple(windowed),
        **own,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    target = replace(TARGETS["h100"], name="few", num_sms=draw(st.sampled_from((1, 2, 5, 16))))
    spec = draw(specs())
    # Sums of few products may cancel: then half types make of one rounding what no bound for real models allows.
    long = min(spec.hidden, spec.intermediate, spec.q_width) >= 64 and spec.head_dim >= 16
    dtypes = ["f32", "f16", "bf16"] if long else ["f32"]
    return Workload("drawn", spec, target, draw(st.sampled_from(dtypes)), draw(st.integers(2, 200)))


@st.composite
def choices(draw: st.DrawFn) -> tuple[Workload, Choice]:
    """A workload and any point of its search space."""
    workload = draw(workloads())
    dimensions = make_space(workload).dimensions
    assert [dimension.name for dimension in dimensions] == [knob.name for knob in KNOBS]
    return workload, {dimension.name: draw(st.sampled_from(dimension.values)) for dimension in dimensions}


@settings(max_examples=examples(80))
@given(choices(), st.integers(0, 2**31), st.data())
def test_every_lowered_program_gives_the_oracles_logits_in_any_order(
    drawn: tuple[Workload, Choice], seed: int, data: st.DataObject
) -> None:
    workload, choice = drawn
    program = lower(workload.graph, make_space(workload).to_config(choice), workload.target)
    weights = random_weights(workload.spec, seed, TORCH_DTYPES[DTYPES[workload.dtype]])
    last = workload.context - 1
    positions = [last, data.draw(st.integers(0, last)), max(1, last // 2)]
    for order in ("list", "adversarial", "queues"):
        session = ReferenceSession(program, workload.spec, weights, order=order, seed=seed)
        verdict = verify(session, weights, positions, seed)
        assert verdict.passed, (order, verdict)
        assert 3 * verdict.error <= verdict.bound, (order, verdict)
