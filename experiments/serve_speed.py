"""Times `flywheel serve` as its clients see it: the first token and each further one, with 1 client and with 8.

    python experiments/serve_speed.py llama3-8b [--weights int4] [--rows 1 8] [--max-tokens 256]

For each number of rows, `flywheel bench --serve` starts a server of so many rows, which as many clients ask at once.
The model has random weights and a tokenizer with a word a token. Its folder, the loads as JSON and what the commands
write are in the current folder. MODEL[.WEIGHTS][.bROWS].schedule.json there is the schedule, if there is one. Prints
each command with what it says; exits with the number of commands that failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from flywheel.models.catalog import CATALOG
from flywheel.models.spec import DecoderSpec
from flywheel.serve.load import WORDS

REQUESTS = 12
"""For each client up to four; more clients ask fewer each."""
LIMIT_S = 300.0
"""Of one command."""


def main() -> int:
    """A command for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=sorted(name for name, spec in CATALOG.items() if spec.family == "llama"))
    parser.add_argument("--weights", default="bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--layers", type=int, help="of a model that is cut short")
    parser.add_argument("--engines", default="none", help="others under the same load, which takes minutes")
    parser.add_argument("--device", default="cuda", choices=["cuda", "reference"])
    asked = parser.parse_args()
    spec = CATALOG[asked.model]
    folder = Path("served") / asked.model
    write_model(folder, spec, asked.layers or spec.n_layers)
    return sum(measure(folder, rows, asked) != 0 for rows in asked.rows)


def measure(folder: Path, rows: int, asked: argparse.Namespace) -> int:
    """The exit code of the command for so many rows and clients; 124 where it took longer than LIMIT_S."""
    name = asked.model if asked.weights == "bf16" else f"{asked.model}.{asked.weights}"
    name += "" if rows == 1 else f".b{rows}"
    command = [
        "flywheel", "bench", "--serve", "--model", str(folder), "--weights", asked.weights, "--device", asked.device,
        "--batch", str(rows), "--context", str(asked.context), "--clients", str(rows),
        "--requests", str(REQUESTS * min(rows, 4)), "--max-tokens", str(asked.max_tokens),
        "--engines", asked.engines, "-o", f"{name}.serve.json",
    ]  # fmt: skip
    schedule = Path(f"{name}.schedule.json")
    command += ["--config", str(schedule)] if schedule.exists() else []
    print("$ " + " ".join(command), flush=True)
    start = time.monotonic()
    try:
        code = subprocess.run(
            [sys.executable, "-m", *command], stdin=subprocess.DEVNULL, timeout=LIMIT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        code = 124
    print(f"exit code {code}, {time.monotonic() - start:.1f} s\n", flush=True)
    return code


def write_model(folder: Path, spec: DecoderSpec, layers: int) -> None:
    """A checkpoint's directory without weights, so that they are random."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate, "num_hidden_layers": layers, "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads, "head_dim": spec.head_dim, "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_position, "rms_norm_eps": spec.norm_eps, "rope_theta": spec.rope_theta,
        "tie_word_embeddings": spec.tied_head, "hidden_act": "silu", "torch_dtype": "bfloat16", "eos_token_id": 1,
    }  # fmt: skip
    if spec.rope_scaling is not None:
        scaling = spec.rope_scaling
        config["rope_scaling"] = {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = ["<unk>", "</s>", *WORDS]
    words += [f"w{token}" for token in range(len(words), spec.vocab)]
    tokens = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    sys.exit(main())
