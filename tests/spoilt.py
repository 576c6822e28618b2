"""Models whose logits are not finite: at once, or after some token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

EMBED = "model.embed_tokens.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def after(weights: Mapping[str, Tensor], token: int, value: float = torch.nan) -> dict[str, Tensor]:
    """The weights, but for the embedding of one token: nothing that follows it in a text is finite."""
    table = weights[EMBED].clone()
    table[token, 3] = value
    return {**weights, EMBED: table}


def overflowing(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Finite weights of which the first MLP's output exceeds the type."""
    limits = torch.finfo(dtype)
    return {**weights, DOWN: torch.full_like(weights[DOWN], limits.max / 2).to(dtype)}
