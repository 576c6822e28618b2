"""The families of models that flywheel runs, a file each. A new one of today's operations is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from flywheel.errors import UnsupportedModelError
from flywheel.models.families import llama, mistral, qwen2, qwen3, smollm3
from flywheel.models.family import Family
from flywheel.models.spec import DecoderSpec

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {each.FAMILY.name: each.FAMILY for each in (llama, mistral, qwen2, qwen3, smollm3)}
)
"""`model_type` -> its family."""


def family_of(spec: DecoderSpec) -> Family:
    """The family of a decoder. Raises UnsupportedModelError for an unknown one."""
    if spec.family not in FAMILIES:
        raise UnsupportedModelError(f"{spec.name}: family={spec.family!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[spec.family]
