"""More clients than rows, with prompts of very different lengths, beside the words of transformers."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from effort import LONG
from serve.conftest import Served, serving
from serve.test_server import metric, post
from tokenizers import Tokenizer, models, pre_tokenizers

CLIENTS, LONGEST, VOCAB = 16, 8000, 90


def make_model(folder: Path) -> Any:
    """A small random llama for long contexts, whose tokens are words."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=VOCAB, max_position_embeddings=LONGEST + 64, initializer_range=0.3, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    return model


def text_of(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def asked(served: Served, prompt: Sequence[int], count: int) -> tuple[str, int]:
    """(the answer, tokens of the prompt that were copied)."""
    body = {"model": "tiny", "prompt": text_of(prompt), "max_tokens": count, "temperature": 0}
    status, told = post(served, "/completions", json.dumps(body).encode())
    assert status == 200, told
    return told["choices"][0]["text"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


@LONG
def test_sixteen_clients_with_prompts_of_1_to_8000_words_get_the_words_of_transformers(tmp_path: Path) -> None:
    model, dice = make_model(tmp_path / "tiny"), random.Random(3)
    beginning = [dice.randrange(VOCAB) for _ in range(3000)]
    prompts = []
    for number in range(2 * CLIENTS):
        length = LONGEST if number == 5 else round(LONGEST ** dice.random())
        shared = beginning[: length // 2] if number % 2 else []
        prompts.append([*shared, *(dice.randrange(VOCAB) for _ in range(length - len(shared)))])
    counts = [dice.randint(1, 10) for _ in prompts]
    options = "--context", str(LONGEST + 32), "--max-sequences", "4"
    with (
        serving([sys.executable, "-m", "flywheel"], tmp_path / "tiny", tmp_path, *options) as served,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        told = list(pool.map(asked, [served] * len(prompts), prompts, counts))
        pieces = metric(served, "flywheel_prompt_pieces_total")
    for prompt, count, (text, _) in zip(prompts, counts, told, strict=True):
        ids = torch.tensor([prompt])
        with torch.no_grad():
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
        assert text.split() == text_of(made[0, len(prompt) :].tolist()).split(), (len(prompt), count)
    assert sum(reused for _, reused in told) > 1000
    assert pieces > len(prompts) + 4
