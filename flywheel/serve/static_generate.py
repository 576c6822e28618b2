"""transformers' `generate` with a static cache, under the load of `serve.load`. On a GPU, torch.compile compiles it.

It runs as a separate process, so that its GPU memory is freed when it ends. It reads a line of JSON, `{"folder",
"dtype", "device", "clients": [...], "prompts": [...], "max_tokens"}`. The last line of stdout is the list of loads, one
for each number of clients. `generate` answers that number of prompts as one batch.

Source: huggingface/transformers, `generation/utils.py` (`_valid_auto_compile_criteria`, `_prepare_static_cache`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from flywheel.models.tokenizer import Tokenizer
from flywheel.serve.load import Answered, Load


def main() -> None:
    """Time the load that stdin describes."""
    asked = json.loads(sys.stdin.readline())
    folder = Path(asked["folder"])
    with Tokenizer(folder) as tokenizer:
        prompts = [tokenizer.encode(prompt) for prompt in asked["prompts"]]
    model = load(folder, getattr(torch, asked["dtype"]), asked["device"])
    loads = [put(model, prompts, clients, asked["max_tokens"]).document() for clients in asked["clients"]]
    sys.stdout.write(json.dumps(loads) + "\n")


def load(folder: Path, dtype: torch.dtype, device: str) -> Any:
    """The checkpoint's model; with random weights if the directory has no weights."""
    transformers: Any = import_module("transformers")  # its calls have no types
    if any(folder.glob("*.safetensors*")):
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def put(model: Any, prompts: Sequence[Sequence[int]], clients: int, max_tokens: int) -> Load:
    """Answer all prompts, `clients` at a time. torch compiles beforehand, for the longest prompts."""
    longest = sorted(prompts, key=len)[-clients:]
    for _ in range(2):  # the second run captures a graph
        answer(model, longest, max_tokens)
    started = perf_counter()
    batches = [prompts[begin : begin + clients] for begin in range(0, len(prompts), clients)]
    answered = [each for some in batches for each in answer(model, some, max_tokens)]
    return Load(clients, perf_counter() - started, tuple(answered), ())


def answer(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Answered]:
    """Greedy continuations, which continue after the model's end token."""
    transformers: Any = import_module("transformers")
    width = max(map(len, prompts))
    padding = [width - len(prompt) for prompt in prompts]
    ids = torch.tensor([[0] * left + list(prompt) for left, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor([[0] * left + [1] * (width - left) for left in padding])
    came: list[float] = []

    def note(seen: torch.Tensor, _: object, **__: object) -> torch.Tensor:
        int(seen[0, -1])  # wait until the host has the token
        came.append(perf_counter())
        return torch.zeros(len(seen), dtype=torch.bool, device=seen.device)

    config = transformers.GenerationConfig(
        cache_implementation="static", max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    started = perf_counter()
    with torch.inference_mode():
        model.generate(
            ids.to(model.device), attention_mask=mask.to(model.device), generation_config=config,
            stopping_criteria=transformers.StoppingCriteriaList([note]),
        )
    first, last = came[0] - started, came[-1] - started
    return [Answered(len(prompt), len(came), first, last) for prompt in prompts]


if __name__ == "__main__":
    main()
