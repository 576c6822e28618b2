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


def overflowing_after(weights: Mapping[str, Tensor], token: int) -> dict[str, Tensor]:
    """Finite weights in f32, with which one token makes the first MLP overflow, and any other does not.

    Channel 3 is that token's own: the embeddings of all others have a zero there, and the attention adds nothing."""
    table, first = weights[EMBED].clone(), "model.layers.0"
    table[:, 3] = 0.0
    table[token, 3] = 1.0
    found = {**weights, EMBED: table}
    for name, place, value in (
        (f"{first}.self_attn.o_proj.weight", (3, ...), 0.0),
        (f"{first}.mlp.gate_proj.weight", (..., 3), 1e30),
        (f"{first}.mlp.up_proj.weight", (..., 3), 1e30),
    ):
        found[name] = weights[name].clone()
        found[name][place] = value
    return found


def overflowing(weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Finite weights of which the first MLP's output exceeds the type."""
    limits = torch.finfo(dtype)
    return {**weights, DOWN: torch.full_like(weights[DOWN], limits.max / 2).to(dtype)}
