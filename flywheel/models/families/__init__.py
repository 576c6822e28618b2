"""The families of models that flywheel runs, a file each. A new one of today's operations is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from types import MappingProxyType
from typing import Final

from flywheel.errors import UnsupportedModelError
from flywheel.models.blocks import LayerWeight
from flywheel.models.families import (
    cohere,
    cohere2,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    gemma4_unified,
    glm,
    glm4,
    granite,
    granitemoehybrid,
    llama,
    ministral,
    ministral3,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    smollm3,
    starcoder2,
)
from flywheel.models.family import Family
from flywheel.models.spec import DecoderSpec, Shape, model_weight_shapes

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {each.FAMILY.name: each.FAMILY for each in (
        cohere, cohere2, gemma, gemma2, gemma3, gemma4, gemma4_unified, glm, glm4, granite, granitemoehybrid, llama,
        ministral, ministral3, mistral, olmo2, olmo3, phi3, qwen2, qwen3, smollm3, starcoder2,
    )}
)
"""`model_type` -> its family."""


def family_of(spec: DecoderSpec) -> Family:
    """The family of a decoder. Raises UnsupportedModelError for an unknown one."""
    if spec.family not in FAMILIES:
        raise UnsupportedModelError(f"{spec.name}: family={spec.family!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[spec.family]


def layer_weights(spec: DecoderSpec, layer: int = 0) -> Mapping[str, LayerWeight]:
    """Role -> weight of the weights of a layer. Raises UnsupportedModelError as `family_of`."""
    return _weights_of(spec.of_layer(layer))


@lru_cache(maxsize=64)
def _weights_of(spec: DecoderSpec) -> Mapping[str, LayerWeight]:
    return MappingProxyType(family_of(spec).weights(spec))


def layer_weight_shapes(spec: DecoderSpec, layer: int = 0) -> dict[str, Shape]:
    """Role -> shape of `layer_weights`."""
    return {role: weight.shape for role, weight in layer_weights(spec, layer).items()}


def count_params(spec: DecoderSpec) -> int:
    """All parameters; a tied head counts once."""
    layers = sum(count * sum(map(prod, layer_weight_shapes(own).values())) for own, count in spec.layer_kinds.items())
    return sum(map(prod, model_weight_shapes(spec).values())) + layers
