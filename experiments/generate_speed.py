"""Times a generated token beside the step that makes it, on this machine's GPU.

    python experiments/generate_speed.py --works llama3.2-1b:llama3.2-1b.schedule.json llama3-8b:llama3-8b.schedule.json

It times three ways in turn, as medians of ROUNDS. "step" is one launch of many back to back at the middle of the text,
as in `flywheel bench`. "queued" is a token of a text whose launches are queued ahead of the host. "one by one" is a
token where the host reads each token before it launches the next. All three decode the same positions after the same
prompt.

Then it times the first token after a prompt, in turn: flywheel's (prefill and one launch), and that of transformers'
forward (sdpa, the same weights, the last token's logits). Each prompt has a length of its own, the longest LENGTHS, as
those of different users have: what is planned anew for each length counts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch

from flywheel.cli.files import load_config
from flywheel.decode.cuda import CudaModel, CudaSession
from flywheel.decode.generate import generate
from flywheel.decode.reference import stream_by_steps
from flywheel.decode.source import Source, open_source
from flywheel.ir import TARGETS, DType, GpuTarget, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.runtime.sequences import Request
from flywheel.vm.gpu.driver import open_gpu

CONTEXT, TOKENS, ROUNDS = 512, 256, 5
LENGTHS = (32, 2048)
PROMPT = tuple(range(1, 129))


def main() -> None:
    """Print a line a work."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--works", nargs="+", required=True, metavar="MODEL:SCHEDULE.json")
    parser.add_argument("--gpu", default="h200")
    arguments = parser.parse_args()
    for work in arguments.works:
        name, _, path = work.partition(":")
        given = load_config(path)
        config = given if isinstance(given, ScheduleConfig) else given.config
        source, dtype = open_source(name), DType.BF16
        program = lower(decode_step(source.spec, CONTEXT, dtype), config, TARGETS[arguments.gpu])
        weights = source.weights(dtype, 0, "cuda")
        with CudaModel(open_gpu(), source.spec, dtype, CONTEXT, weights) as model, model.load(program) as session:
            steps, queued, single = zip(*(one_round(session) for _ in range(ROUNDS)), strict=True)
        step = median(steps)
        print(
            f"{name}: step {spread(steps)}, queued {spread(queued)}, {median(queued) / step:.3f} times, "
            f"one by one {spread(single)}, {median(single) / step:.3f} times; us a token"
        )
        first_tokens(name, source, config, TARGETS[arguments.gpu], weights)


def first_tokens(
    name: str, source: Source, config: ScheduleConfig, target: GpuTarget, weights: Mapping[str, torch.Tensor]
) -> None:
    """Print what the first token behind a prompt takes, and in how many rounds it is transformers' too."""
    text = [(31 * place + 7) % source.spec.vocab for place in range(max(LENGTHS))]
    context = len(text) + 1
    program = lower(decode_step(source.spec, context, DType.BF16), config, target)
    other = transformers_model(source.spec, weights)
    with (
        CudaModel(open_gpu(), source.spec, DType.BF16, context, weights) as model,
        model.load(program) as session,
        torch.no_grad(),
    ):
        for longest in LENGTHS:
            own, theirs, same = [], [], 0
            for turn in range(ROUNDS + 1):
                prompt = text[: longest - turn]
                ids = torch.tensor([prompt], device="cuda")
                start = time.perf_counter()
                generation = generate(session, Request(tuple(prompt), 1))
                between = time.perf_counter()
                chosen = int(other(ids, logits_to_keep=1).logits[0, -1].argmax())
                theirs.append((time.perf_counter() - between) * 1e3)
                own.append((between - start) * 1e3)
                same += generation.token_ids[0] == chosen
            print(
                f"{name}: first token behind {longest - ROUNDS} to {longest - 1} tokens {spread(tuple(own[1:]))} ms, "
                f"transformers' forward {spread(tuple(theirs[1:]))} ms, {median(own[1:]) / median(theirs[1:]):.2f} "
                f"times; the same token {same} of {ROUNDS + 1} times"
            )


def transformers_model(spec: DecoderSpec, weights: Mapping[str, torch.Tensor]) -> Any:
    """Its model of these dimensions over these weights, in bf16, with sdpa."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    kinds = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    config = kinds[spec.family](
        vocab_size=spec.vocab, hidden_size=spec.hidden, intermediate_size=spec.intermediate,
        num_hidden_layers=spec.n_layers, num_attention_heads=spec.n_heads, num_key_value_heads=spec.n_kv_heads,
        head_dim=spec.head_dim, rms_norm_eps=spec.norm_eps, max_position_embeddings=spec.max_position,
        tie_word_embeddings=spec.tied_head, rope_parameters=rope_of(spec), attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    rotary = type(model.model.rotary_emb)(config).to("cuda")
    model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = rotary
    return model.eval()


def rope_of(spec: DecoderSpec) -> dict[str, Any]:
    """Transformers' words for a spec's RoPE."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    return {
        "rope_type": "llama3", "rope_theta": spec.rope_theta, "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }  # fmt: skip


def one_round(session: CudaSession) -> tuple[float, float, float]:
    """Us of a step back to back, of a queued token and of one that the host waits for."""
    last, positions = len(PROMPT) - 1, len(PROMPT) + TOKENS - 1
    session.prefill(PROMPT[:last])
    step = session.time(1, len(PROMPT) + TOKENS // 2, samples=20, warmup=3).batch_us
    assert step is not None
    start = time.perf_counter()
    tokens = list(session.stream(PROMPT, positions, last))
    between = time.perf_counter()
    again = list(stream_by_steps(session, PROMPT, positions, last))
    end = time.perf_counter()
    assert tokens == again, "the same prompt gave other tokens"
    return step, (between - start) / TOKENS * 1e6, (end - between) / TOKENS * 1e6


def spread(values: tuple[float, ...]) -> str:
    """Median and extremes."""
    return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
