"""Configs of real families with a few keys changed, and whether flywheel computes of each what transformers does.

What transformers cannot build says nothing. Of the rest, flywheel refuses the checkpoint, or its logits are equal and
finite.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

import torch

from flywheel.errors import FlywheelError
from flywheel.models.checkpoint import load_weights
from flywheel.models.families import FAMILIES
from flywheel.models.hf import load_spec
from flywheel.models.oracle import EagerDecoder
from flywheel.models.stored import canonical, stored_tensors

SIZES: Final[Mapping[str, Any]] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61, "max_position_embeddings": 64, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_OWN: Final[Mapping[str, Mapping[str, Any]]] = {
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["full_attention"] * 3, "mamba_n_heads": 4,
                         "position_embedding_type": "rope", "shared_intermediate_size": 48},
    "gemma4_text": {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 12,
                    "global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
                    "hidden_size_per_layer_input": 0},
}  # fmt: skip
"""Family -> what makes its config one of those that run."""
LENGTH: Final = 40
"""Tokens of the compared text."""

_SMALL: Final = (0, 1, 2, 3, 4, 6, 8, 16, -1, True, False, None, 0.5, 2.0, 1e-3, "", "x", [], {})
_FLOATS: Final = (0.0, 1.0, 0.5, 1.5, 2.0, 1e-6, 50.0, -1.0, 1e4, 1e-15, 1e-40, 1e15, 1e40, 1e308)
_WORDS: Final = (
    "silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "default", "linear", "dynamic", "yarn",
    "longrope", "llama3", "sliding_attention", "full_attention",
)  # fmt: skip
_SIZED: Final = frozenset({*SIZES, "vocab_size_per_layer_input"})
_HARMLESS: Final = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"})
"""Keys that are never changed: the first names the family, and the tests choose the type."""
ROPES: Final = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "truncate": False,
     "original_max_position_embeddings": 16},
    {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 4.0, 8.0],
     "original_max_position_embeddings": 16, "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "factor": 2.0},
)  # fmt: skip

FAULTS: Final = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
    ValueError,
)  # fmt: skip
"""What code raises that does not expect a config."""


class Ending(Enum):
    """How a config ended."""

    EQUAL = "equal"
    REFUSED = "refused"
    NOT_BUILT = "not built by transformers"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Found:
    """A config's ending, and what changed in it."""

    ending: Ending
    family: str
    changes: Mapping[str, Any]
    said: str = ""


def base_of(family: str) -> dict[str, Any]:
    """A tiny config of a family, with all keys that transformers writes."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**SIZES, **_OWN.get(family, {})})
    return {**json.loads(config.to_json_string(use_diff=False)), "architectures": [FAMILIES[family].architecture]}


def mutations(seed: int, families: tuple[str, ...] = tuple(FAMILIES)) -> Iterator[tuple[str, dict[str, Any]]]:
    """(family, keys that change -> new values), without an end. A value of `...` takes the key away."""
    draws = random.Random(seed)
    bases = {family: base_of(family) for family in families}
    foreign = {key: value for base in bases.values() for key, value in base.items()}
    while True:
        family = draws.choice(families)
        base = bases[family]
        own, others = [key for key in base if key != "model_type"], [key for key in foreign if key not in base]
        changes: dict[str, Any] = {}
        for _ in range(draws.choice((1, 1, 1, 2, 3))):
            key = draws.choice(own if not others or draws.random() < 0.75 else others)
            if key not in _HARMLESS:
                changes[key] = _another(draws, key, base.get(key, foreign[key]), base)
        if changes:
            yield family, changes


def _another(draws: random.Random, key: str, value: Any, base: Mapping[str, Any]) -> Any:
    if draws.random() < 0.06:
        return ...
    if key in ("rope_parameters", "rope_scaling") and draws.random() < 0.8:
        kinds = [name for name, each in (value or {}).items() if isinstance(each, dict)]
        drawn = {"rope_theta": 1e4, **draws.choice(ROPES)}
        return {**value, draws.choice(kinds): drawn} if kinds and draws.random() < 0.8 else drawn
    if value is None and draws.random() < 0.5:
        return draws.choice(_FLOATS)
    if isinstance(value, dict) and value:
        inner = deepcopy(value)
        name = draws.choice(list(inner))
        inner[name] = _another(draws, name, inner[name], base)
        return {name: each for name, each in inner.items() if each is not ...}
    if isinstance(value, list) and value and draws.random() < 0.8:
        listed = list(value)
        place = draws.randrange(len(listed))
        listed[place] = _another(draws, key, listed[place], base)
        return [each for each in listed if each is not ...]
    if isinstance(value, bool):
        return not value if draws.random() < 0.8 else draws.choice(_SMALL)
    if isinstance(value, int):
        sizes = (value * 2, value // 2, value + 1) if key in _SIZED or value < 100 else ()
        return draws.choice((*sizes, *_SMALL[:9]))
    if isinstance(value, float):
        return draws.choice((value * 2, *_FLOATS))
    return draws.choice(_WORDS if isinstance(value, str) and draws.random() < 0.8 else (*_WORDS, *_SMALL))


def changed(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its changes."""
    return {key: value for key, value in {**base, **changes}.items() if value is not ...}


def compare(family: str, changes: Mapping[str, Any], folder: Path) -> Found:
    """Compare flywheel's oracle of a changed config with transformers' model."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = changed(base_of(family), changes)
    (folder / "config.json").write_text(json.dumps(config))
    from huggingface_hub.errors import StrictDataclassError

    try:
        spec = load_spec(folder)
    except FlywheelError as error:
        return Found(Ending.REFUSED, family, changes, str(error))
    try:
        wanted = _transformers(folder)
    except (*FAULTS, StrictDataclassError) as error:
        return Found(Ending.NOT_BUILT, family, changes, f"{type(error).__name__}: {error}")
    (folder / "config.json").write_text(json.dumps(config))  # save_pretrained wrote its own
    try:
        weights = canonical(spec, load_weights(folder, stored_tensors(spec).shapes))
        decoder = EagerDecoder(spec, weights, torch.float32, LENGTH)
    except FlywheelError as error:
        return Found(Ending.REFUSED, family, changes, str(error))
    count = min(LENGTH, spec.max_position)
    made = torch.stack([decoder.step(token, place) for place, token in enumerate(_tokens(spec.vocab)[:count])])
    scale = max(float(wanted[:count].std()), 1e-3)
    off = float((made - wanted[:count]).abs().max()) / scale
    alike = torch.allclose(made / scale, wanted[:count] / scale, rtol=2e-3, atol=2e-3)
    return Found(Ending.EQUAL if alike else Ending.DIFFERENT, family, changes, f"off by {off:.2g} deviations")


def _tokens(vocab: int) -> list[int]:
    return torch.randint(0, vocab, (LENGTH,), generator=torch.Generator().manual_seed(3)).tolist()


@torch.no_grad()
def _transformers(folder: Path) -> torch.Tensor:
    """The logits of transformers [LENGTH, vocab], float32; its random weights are in `folder` then."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        deviation = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
        mean = 1.0 if "norm" in name else 0.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + mean)
    model.save_pretrained(folder)
    return model(torch.tensor([_tokens(model.get_input_embeddings().num_embeddings)])).logits[0].float()
