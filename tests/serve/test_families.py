"""A chat with a tiny model of a family, from its files alone: template, tokens, answer and text are transformers'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from family_templates import TEMPLATES
from tokenizer_directories import FAMILIES, Directory
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from flywheel.serve.decoder import Decoder

ENDS = [2, 5]
CHAT = [{"role": "user", "content": "hello w 12"}]
MODELS: dict[str, tuple[str, str]] = {
    "gemma2": ("gemma2", "gemma"), "gemma3": ("gemma3_text", "gemma"), "phi3": ("phi3", "phi-3"),
    "granite": ("granite", "granite"), "granite4": ("granitemoehybrid", "granite"), "smollm3": ("smollm3", "smollm3"),
    "olmo2": ("olmo2", "olmo"), "glm": ("glm4", "glm"), "cohere2": ("cohere2", "cohere2"),
    "starcoder2": ("starcoder2", "olmo"), "tekken": ("ministral", "mistral"), "qwen3": ("qwen3", "qwen3"),
}  # fmt: skip
"""Files of a tokenizer -> `model_type`, chat template."""
OWN: dict[str, dict[str, Any]] = {
    **{kind: {"sliding_window": 16} for kind in ("gemma2", "gemma3_text", "cohere2", "ministral")},
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["attention"] * 2, "shared_intermediate_size": 96},
}


def write(folder: Path, family: str) -> Any:
    """A checkpoint in the folder; returns transformers' model of it."""
    kind, template = MODELS[family]
    files = FAMILIES[family]()
    files["tokenizer_config.json"].pop("chat_template", None)
    Directory(family, {**files, "chat_template.jinja": TEMPLATES[template]}).write(folder)
    torch.manual_seed(2)
    config = AutoConfig.for_model(
        kind, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=512, max_position_embeddings=512, initializer_range=0.2, pad_token_id=0,
        eos_token_id=ENDS, **OWN.get(kind, {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return model


@pytest.mark.parametrize("family", MODELS)
def test_a_chat_is_answered_as_by_transformers(family: str, tmp_path: Path) -> None:
    model = write(tmp_path, family)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    with Decoder.load(str(tmp_path), device="reference", context=len(ids) + 12) as decoder:
        assert decoder.chat(CHAT) == ids
        answer = decoder.complete(ids, max_tokens=10)
    ends = [*ENDS, *([] if theirs.eos_token_id is None else [theirs.eos_token_id])]
    whole = model.generate(torch.tensor([ids]), max_new_tokens=10, do_sample=False, eos_token_id=ends, pad_token_id=0)
    assert list(answer.token_ids) == whole[0][len(ids) :].tolist()
    text = theirs.decode(answer.token_ids, skip_special_tokens=True)
    assert answer.text == text or "\ufffd" in text  # beside broken bytes, pieces that were shown stay
