"""Ministral: Mistral's layers, some perhaps without a window. Source: huggingface/transformers, `models/ministral`."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from flywheel.models.families import mistral
from flywheel.models.family import Family

FAMILY: Final[Family] = replace(mistral.FAMILY, name="ministral", architecture="MinistralForCausalLM", text_of=None)
