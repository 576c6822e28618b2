"""Compares transformers, the eager oracle and the reference VM on small random checkpoints of every family.

    python experiments/three_way.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from flywheel.decode.generate import generate
from flywheel.decode.reference import ReferenceSession
from flywheel.decode.source import open_source
from flywheel.judge.verdicts import make_oracle, verify
from flywheel.lowering.lower import lower
from flywheel.models.decoder import DTYPES
from flywheel.models.oracle import EagerDecoder
from flywheel.runtime.sequences import Request
from flywheel.search.space import make_space
from flywheel.search.workload import Workload, find_target
from flywheel.tensors import TORCH_DTYPES

CONTEXT = 160
POSITIONS = (0, 1, 7, 63, 100, CONTEXT - 1)
PROMPT, GENERATED = 40, 32

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama, scaled rope": {"model_type": "llama", "rope_parameters": SCALED},
    "llama, tied head": {"model_type": "llama", "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3, tied head": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}


def main() -> None:
    """Print a table."""
    transformers.utils.logging.disable_progress_bar()
    layers, hidden, vocab = (SIZES[name] for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    print(f"torch {torch.__version__}, transformers {transformers.__version__}; random checkpoints of {layers} layers,")
    print(f"hidden {hidden}, vocab {vocab}, logits of deviation near 1. HF: transformers; VM: the program that search")
    print("tries second, on an H100, its queues in a random order.")
    print(
        f"Max abs error (and over the largest logit of its position) over positions {', '.join(map(str, POSITIONS))},"
    )
    print(f"each behind a filled cache. Greedy: {GENERATED} tokens after {PROMPT}, HF == eager == VM.")
    print()
    print("| family | dtype | eager - HF | VM - HF | VM - eager | verdict | greedy |")
    print("|---|---|---|---|---|---|---|")
    wrong = 0
    for family, fields in FAMILIES.items():
        for dtype in ("f32", "bf16"):
            with tempfile.TemporaryDirectory() as folder:
                columns = _compare(fields, dtype, Path(folder))
            wrong += "FAIL" in columns or "differs" in columns
            print(f"| {family} | {dtype} | {' | '.join(columns)} |")
    sys.exit(bool(wrong))


def _compare(fields: dict[str, Any], dtype: str, folder: Path) -> list[str]:
    model = _save(fields, dtype, folder)
    source = open_source(str(folder))
    workload = Workload(source.name, source.spec, find_target("h100"), dtype, CONTEXT)
    space = make_space(workload)
    program = lower(workload.graph, space.to_config(space.known_good()[1]), workload.target)
    weights = source.weights(DTYPES[dtype], 0)
    session = ReferenceSession(program, source.spec, weights, order="queues", seed=1)
    oracle = make_oracle(session, weights)
    theirs, eager, ours = _logits(model, oracle, session)
    passed = verify(session, weights, POSITIONS).passed
    errors = [_error(eager, theirs), _error(ours, theirs), _error(ours, eager)]
    greedy = _greedy(model, oracle, session) if dtype == "f32" else "-"
    return [*errors, "pass" if passed else "FAIL", greedy]


def _save(fields: dict[str, Any], dtype: str, folder: Path) -> PreTrainedModel:
    """A checkpoint with norms and biases that cannot be left out unnoticed, as transformers reads it back."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **fields}))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            deviation = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.3
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation + mean)
    wanted = TORCH_DTYPES[DTYPES[dtype]]
    model.to(wanted).save_pretrained(folder)
    read: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=wanted).eval()
    return read


def _logits(model: PreTrainedModel, oracle: EagerDecoder, session: ReferenceSession) -> tuple[Tensor, Tensor, Tensor]:
    """transformers', eager's and the VM's, each [len(POSITIONS), vocab]."""
    ids = _tokens(CONTEXT)
    with torch.no_grad():
        theirs = model(torch.tensor([ids])).logits[0, list(POSITIONS)].float()
    eager, ours = [], []
    for position in POSITIONS:
        oracle.reset()
        if position:
            oracle.prefill(ids[:position])
        session.write_cache(oracle.read_cache())
        ours.append(session.step(ids[position], position).logits)
        eager.append(oracle.step(ids[position], position))
    return theirs, torch.stack(eager), torch.stack(ours)


def _error(one: Tensor, other: Tensor) -> str:
    error = (one - other).abs().amax(-1)
    return f"{float(error.max()):.1e} ({float((error / other.abs().amax(-1)).max()):.1e})"


def _greedy(model: PreTrainedModel, oracle: EagerDecoder, session: ReferenceSession) -> str:
    prompt = _tokens(PROMPT)
    with torch.no_grad():
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=GENERATED,
            max_new_tokens=GENERATED,
        )
    ours = generate(session, Request(tuple(prompt), GENERATED))
    oracle.reset()
    eager = [int(oracle.prefill(prompt).argmax())]
    while len(eager) < GENERATED:
        eager.append(int(oracle.step(eager[-1], oracle.length).argmax()))
    return "equal" if list(ours.token_ids) == eager == theirs[0, PROMPT:].tolist() else "differs"


def _tokens(count: int) -> list[int]:
    drawn: list[int] = torch.randint(
        0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(11)
    ).tolist()
    return drawn


if __name__ == "__main__":
    main()
