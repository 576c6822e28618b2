"""OLMo 3: OLMo 2's layers, of which every fourth has no window, and alone perhaps a scaled RoPE. Source:
huggingface/transformers, `models/olmo3`."""

from __future__ import annotations

from typing import Final

from flywheel.models.config_reading import Fields
from flywheel.models.family import WINDOW, Family


def _windows(_: Fields, n_layers: int) -> list[bool]:
    return [(layer + 1) % 4 != 0 for layer in range(n_layers)]


FAMILY: Final = Family(
    "olmo3", "Olmo3ForCausalLM", norm_eps=("rms_norm_eps", 1e-5), rope_theta=5e5, local_rope=(None, 5e5),
    sliding_window=WINDOW, windows=_windows, qk_norm=True, biases=("attention_bias",),
    read=lambda _: {"norms": "behind", "wide_qk_norm": True},
)  # fmt: skip
