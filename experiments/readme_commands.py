"""Runs README's commands for a GPU, line by line, on a random checkpoint of the shape of Llama-3.2-1B.

    python experiments/readme_commands.py [--layers 16] [--readme FILE]

The lines are those of the first code block after "## Start, with a GPU". The checkpoint, ./Llama-3.2-1B as Hugging Face
stores one, and the commands' files are in the current folder. Prints each line with its output, its exit code and its
seconds. Exits with the number of lines that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

README = Path(__file__).parents[1] / "README.md"
HEADING = "## Start, with a GPU"
FOLDER = Path("Llama-3.2-1B")
LIMIT_S = 300.0
"""Of one line."""

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "attention_bias": False,
    "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def main() -> int:
    """Write, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    parser.add_argument("--readme", type=Path, default=README)
    asked = parser.parse_args()
    lines = lines_of(asked.readme.read_text(encoding="utf-8"))
    write_checkpoint({**CONFIG, "num_hidden_layers": asked.layers})
    return sum(run(line) != 0 for line in lines)


def lines_of(readme: str) -> list[str]:
    """The commands of the block, without comments. Raises SystemExit where there is none."""
    _, _, behind = readme.partition(f"{HEADING}\n")
    _, _, block = behind.partition("```sh\n")
    lines = [shlex.join(shlex.split(line, comments=True)) for line in block.partition("```")[0].splitlines()]
    if not behind or not any(lines):
        raise SystemExit(f"README: no commands behind {HEADING!r}")
    return [line for line in lines if line]


def run(line: str) -> int:
    """A command's exit code; 124 where it took longer than LIMIT_S."""
    print(f"$ {line}", flush=True)
    program, *arguments = shlex.split(line)
    command = [sys.executable, "-m", program, *arguments]
    environment = {name: text for name, text in os.environ.items() if name != "FLYWHEEL_STORE"}
    start = time.monotonic()
    try:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, env=environment, timeout=LIMIT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        code = 124
    print(f"exit code {code}, {time.monotonic() - start:.1f} s\n", flush=True)
    return code


def write_checkpoint(config: dict[str, Any]) -> None:
    """The files of a checkpoint: random matrices, norms of ones, a word a token."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors_of(config), FOLDER / "model.safetensors", metadata={"format": "pt"})
    words = ["<s>", "</s>", "The", "flywheel", "<unk>"]
    words += [f"w{token}" for token in range(len(words), config["vocab_size"])]
    tokens = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(FOLDER / "tokenizer.json"))


def tensors_of(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """bf16, by the names of transformers."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, width: int) -> torch.Tensor:
        return (torch.randn(rows, width, generator=generator, device=device) * 0.02).bfloat16().cpu()

    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    shapes = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    ones = torch.ones(hidden, dtype=torch.bfloat16)
    found = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden), "model.norm.weight": ones.clone()}
    for layer in range(config["num_hidden_layers"]):
        base = f"model.layers.{layer}"
        found |= {f"{base}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        found |= {f"{base}.{name}.weight": ones.clone() for name in ("input_layernorm", "post_attention_layernorm")}
    return found


if __name__ == "__main__":
    sys.exit(main())
