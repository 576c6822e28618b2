"""Kinds of models that flywheel refuses, and why. Source: huggingface/transformers, `models/`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_BY_REASON: Final = (
    (
        "its layers choose among experts",
        "mixtral qwen2_moe qwen3_moe olmoe granitemoe granitemoeshared phimoe gpt_oss deepseek_v2 deepseek_v3 "
        "glm4_moe glm4_moe_lite llama4 llama4_text cohere2_moe exaone_moe dbrx jetmoe ernie4_5_moe "
        "hunyuan_v1_moe minimax flex_olmo",
    ),
    (
        "its layers keep a recurrent state",
        "mamba mamba2 falcon_mamba falcon_h1 jamba bamba zamba zamba2 recurrent_gemma rwkv xlstm "
        "olmo_hybrid qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text lfm2 nemotron_h",
    ),
    ("its layers share caches and have embeddings of their own", "gemma3n gemma3n_text"),
    ("its queries and keys are compressed (latent attention)", "minicpm3 kimi_k2 longcat_flash mistral4"),
    ("its attention has a difference of two softmaxes", "diffllama"),
    ("its positions are learned or biases of the scores", "gpt2 gpt_bigcode opt bloom mpt xglm biogpt"),
    (
        "its rotary layout or MLP is none of those here",
        "falcon gptj gpt_neo gpt_neox codegen phi stablelm persimmon nemotron",
    ),
    ("its model's class is code of its repository", "internlm3"),
    ("it encodes a text before it decodes", "t5 t5gemma t5gemma2 bart mbart pegasus led"),
    (
        "it reads images or sounds",
        "llava llava_next mllama qwen2_vl qwen2_5_vl qwen3_vl qwen2_audio idefics3 smolvlm paligemma pixtral "
        "phi4_multimodal glm4v glm46v cohere2_vision internvl whisper",
    ),
)  # fmt: skip

UNSUPPORTED: Final[Mapping[str, str]] = MappingProxyType(
    {name: reason for reason, names in _BY_REASON for name in names.split()}
)
"""`model_type` -> why no checkpoint of it runs."""
