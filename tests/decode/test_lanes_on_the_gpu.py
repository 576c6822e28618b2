"""Prompt lookup on a GPU: each lane shows what token by token shows, and no guess changes the text. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flywheel.decode.cuda import CudaModel
from flywheel.decode.generate import generate
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import make_oracle
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY, Sampling, make_request
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu

pytestmark = pytest.mark.gpu

SPEC = DecoderSpec("small", "qwen3", 256, 384, 3, 4, 2, 64, 24, 1e5, 1e-5, 512, qk_norm=True)
"""Few tokens, so that texts repeat themselves."""
CONTEXT = 200
FUSED = (
    ("attn_norm", "q_proj", "k_proj", "v_proj"),
    ("q_norm", "k_norm", "k_rope", "k_append", "v_append", "q_rope", "attention"),
    ("attn_combine", "o_proj", "attn_add"), ("mlp_norm", "gate_proj", "up_proj", "silu_mul"),
    ("down_proj", "mlp_add"), ("final_norm", "lm_head"),
)  # fmt: skip
CONFIGS = {
    "one block, by counters": ScheduleConfig(fusion_grouping=FUSED[1:2]),
    "blocks, by data": ScheduleConfig(
        {"attention": {"kv_block": 64}, "hand_off": {"data": 1}}, FUSED, page_allocation="none"
    ),
}
PROMPT = tuple([3, 7, 0, 3, 7, 11, 2] * 6)


def program_of(gpu: Gpu, config: str, dtype: DType, batch: int, lanes: int) -> MegakernelProgram:
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    graph = decode_step(SPEC, CONTEXT, dtype, batch * lanes, lanes=lanes)
    return lower(graph, CONFIGS[config], replace(alike, name="few", num_sms=12))


def model_of(gpu: Gpu, dtype: DType, batch: int, lanes: int) -> CudaModel:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[dtype], "cuda")
    return CudaModel(gpu, SPEC, dtype, CONTEXT, weights, batch, gpu.granules(), lanes=lanes)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("dtype", "batch", "lanes"), [(DType.BF16, 1, 4), (DType.F32, 2, 3), (DType.BF16, 2, 4)])
def test_greedy_text_is_that_of_no_guesses_and_the_oracles(
    gpu: Gpu, config: str, dtype: DType, batch: int, lanes: int
) -> None:
    program = program_of(gpu, config, dtype, batch, lanes)
    with model_of(gpu, dtype, batch, lanes) as model, model.load(program) as session:
        texts = []
        for sampling in (GREEDY, Sampling(lookup=False)):
            sequences, heard = session.sequences(), list[int]()
            launches = 0
            sequences.join(batch - 1, PROMPT, CONTEXT, sampling)
            while made := sequences.advance():
                heard += [each.token for each in made]
                launches += 1
            sequences.close()
            texts.append((heard, launches))
        (guessed, fewer), (single, more) = texts
        assert guessed == single
        assert len(single) == more == CONTEXT - len(PROMPT) + 1
        assert fewer < more
        request = make_request(PROMPT, 40, frozenset(), SPEC, CONTEXT)
        if batch == 1:
            assert list(generate(session, request, make_oracle(session, model.weights)).token_ids) == guessed[:40]


@pytest.mark.parametrize("config", CONFIGS)
def test_each_lane_shows_what_token_by_token_shows(gpu: Gpu, config: str) -> None:
    dtype, lanes, tokens = DType.BF16, 4, [5, 1, 7, 9]
    with model_of(gpu, dtype, 1, 1) as model, model.load(program_of(gpu, config, dtype, 1, 1)) as session:
        session.prefill(PROMPT)
        wanted = [session.step(token, len(PROMPT) + place) for place, token in enumerate(tokens)]
    with model_of(gpu, dtype, 1, lanes) as model, model.load(program_of(gpu, config, dtype, 1, lanes)) as session:
        session.prefill(PROMPT)
        for _ in range(2):  # what a launch has cached, the next one may write again
            for one, other in zip(session.step_rows(tokens, [len(PROMPT)]), wanted, strict=True):
                scale = float(other.logits.abs().max())
                torch.testing.assert_close(one.logits, other.logits, rtol=0.0, atol=0.02 * scale)
