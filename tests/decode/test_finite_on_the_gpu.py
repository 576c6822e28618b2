"""Logits that are not finite on a GPU: texts end with an error, others go on, the session stays right. Needs a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from spoilt import EMBED, after, overflowing

from flywheel.decode.cuda import CudaModel
from flywheel.decode.generate import generate
from flywheel.errors import FlywheelError, NonFiniteError
from flywheel.ir import NO_TOKEN, TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import make_oracle, verify
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY, Request, Sampling
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu

pytestmark = pytest.mark.gpu

SPEC = DecoderSpec("small", "llama", 256, 384, 2, 4, 2, 64, 520, 1e5, 1e-5, 512)
CONTEXT, PROMPT, OTHER = 128, (5, 17, 99), (40, 41)
CONFIGS = {
    "counters": ScheduleConfig(),
    "data": ScheduleConfig({"hand_off": {"data": 1}}, page_allocation="none"),
}
SAMPLINGS = (GREEDY, Sampling(0.8, seed=1, top_p=0.9), Sampling(repetition_penalty=1.1, logprobs=3))


def program_of(gpu: Gpu, dtype: DType, config: str, batch: int = 1, lanes: int = 1) -> MegakernelProgram:
    alike = next(target for target in TARGETS.values() if target.sm_arch == gpu.sm_arch)
    graph = decode_step(SPEC, CONTEXT, dtype, batch * lanes, lanes=lanes)
    return lower(graph, CONFIGS[config], replace(alike, name="few", num_sms=12))


def weights_of(dtype: DType) -> dict[str, torch.Tensor]:
    return random_weights(SPEC, 1, TORCH_DTYPES[dtype], "cuda")


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_text_that_overflows_f16_ends_with_an_error(gpu: Gpu, config: str, sampling: Sampling) -> None:
    weights = overflowing(weights_of(DType.F16), torch.float16)
    with (
        CudaModel(gpu, SPEC, DType.F16, CONTEXT, weights) as model,
        model.load(program_of(gpu, DType.F16, config)) as session,
    ):
        oracle = make_oracle(session, weights)
        said: list[int] = []
        for _ in range(2):
            with pytest.raises(NonFiniteError) as found:
                generate(session, Request(PROMPT, 6), oracle if sampling is GREEDY else None, said.append, sampling)
            told = str(found.value)
            assert told.startswith("position 2: the logits are not finite; first in layer 0, mlp_out (down_proj): ")
        assert said == []
        assert not verify(session, weights, (0, 9, 10)).passed


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
def test_tokens_before_the_error_stay_and_other_sequences_go_on(gpu: Gpu, config: str, dtype: DType) -> None:
    weights, program = weights_of(dtype), program_of(gpu, dtype, config, 4)
    with CudaModel(gpu, SPEC, dtype, CONTEXT, weights, 4) as model, model.load(program) as session:
        sequences = session.sequences()
        sequences.join(0, PROMPT, 30, GREEDY)
        sequences.join(2, OTHER, 60, Sampling(0.9, seed=3, logprobs=1))
        clean: dict[int, list[int]] = {0: [], 2: []}
        while len(clean[2]) < 50:
            for made in sequences.advance():
                clean[made.row].append(made.token)
        sequences.close()
    place = next(
        place for place, token in enumerate(clean[0])
        if place > 1 and token not in (*PROMPT, *clean[0][:place], *OTHER, *clean[2])
    )  # fmt: skip
    spoilt = after(weights, clean[0][place])
    with CudaModel(gpu, SPEC, dtype, CONTEXT, spoilt, 4) as model, model.load(program) as session:
        sequences = session.sequences()
        sequences.join(0, PROMPT, 30, GREEDY)
        sequences.join(2, OTHER, 60, Sampling(0.9, seed=3, logprobs=1))
        heard: dict[int, list[int]] = {0: [], 2: []}
        lost: dict[int, FlywheelError] = {}
        while len(heard[2]) < 50:
            for made in sequences.advance():
                heard[made.row].append(made.token)
            lost |= sequences.lost()
        assert heard == {0: clean[0][: place + 1], 2: clean[2][: len(heard[2])]}
        assert list(lost) == [0]
        told = f"position {len(PROMPT) + place}: the logits are not finite; weight '{EMBED}' is nan at"
        assert str(lost[0]).startswith(told)
        sequences.close()  # no launch read a row of the embedding that is none
        assert [step.token == NO_TOKEN for step in session.step_rows([clean[0][place], 1, 2, 3], 0)] == [
            True, False, False, False,
        ]  # fmt: skip


def test_drafts_are_taken_up_to_what_is_not_finite(gpu: Gpu) -> None:
    prompt, program = (3, 7, 20) * 2, program_of(gpu, DType.BF16, "counters", 1, 4)
    weights = weights_of(DType.BF16)
    with CudaModel(gpu, SPEC, DType.BF16, CONTEXT, weights, lanes=4) as model, model.load(program) as session:
        clean = generate(session, Request(prompt, 30)).token_ids
    place = next(place for place, token in enumerate(clean) if token not in (*prompt, *clean[:place]))
    spoilt, said = after(weights, clean[place]), list[int]()
    with (
        CudaModel(gpu, SPEC, DType.BF16, CONTEXT, spoilt, lanes=4) as model,
        model.load(program) as session,
        pytest.raises(NonFiniteError, match=f"position {len(prompt) + place}: the logits are not finite"),
    ):
        generate(session, Request(prompt, 30), on_token=said.append)
    assert tuple(said) == clean[: place + 1]
