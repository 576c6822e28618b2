"""Launches queued ahead of the host, on the CUDA VM's own sources: the tokens of the reference VM, one launch each."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from chorus import alone, sing, voices
from effort import sample
from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session

from flywheel.decode.generate import generate
from flywheel.decode.queued import AHEAD
from flywheel.decode.reference import ReferenceSession, stream_by_steps
from flywheel.decode.sequences import SteppedSequences
from flywheel.errors import GpuFaultError, GpuMemoryError, LaunchTimeoutError, UsageError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY, Sampling, make_request
from flywheel.tensors import TORCH_DTYPES

SPEC = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 64)
CONTEXT, PROMPT = 32, (3, 7, 0)
CONFIGS = {
    "counters": ScheduleConfig(threads_per_block=192),
    "data": ScheduleConfig({"hand_off": {"data": 1}}, page_allocation="none", threads_per_block=192),
}


def program_of(config: str, batch: int = 1) -> MegakernelProgram:
    gpu = EmulatedGpu()
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    return lower(decode_step(SPEC, CONTEXT, DType.F32, batch), CONFIGS[config], target)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_stream_is_what_steps_of_the_reference_vm_say(config: str) -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    expected = generate(
        ReferenceSession(program_of(config), SPEC, weights), make_request(PROMPT, 6, frozenset(), SPEC, CONTEXT)
    )
    with emulated_session(EmulatedGpu(), program_of(config), SPEC, weights) as session:
        tokens = list(session.stream(PROMPT, len(PROMPT) + 5))
    assert tuple(tokens) == expected.token_ids
    assert len(set(tokens)) > 1


@pytest.mark.parametrize("sampling", sample([Sampling(1.5, seed=3), Sampling(repetition_penalty=50.0)]), ids=str)
def test_a_stream_draws_what_steps_draw(sampling: Sampling) -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    with emulated_session(EmulatedGpu(), program_of("data"), SPEC, weights) as session:
        queued = list(session.stream(PROMPT, 14, 0, sampling))
        assert queued == list(stream_by_steps(session, PROMPT, 14, 0, sampling))
        assert queued != list(session.stream(PROMPT, 14))


def test_a_stream_that_is_left_early_gives_its_memory_back_and_the_next_one_is_right() -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    gpu = EmulatedGpu()
    with emulated_session(gpu, program_of("data"), SPEC, weights) as session:
        whole = list(session.stream(PROMPT, 6))
        held = set(gpu._held)
        with closing(session.stream(PROMPT, 12)) as stream:
            assert [next(stream), next(stream)] == whole[:2]
        assert set(gpu._held) == held
        assert list(session.stream(PROMPT, 6)) == whole
    assert AHEAD > 1  # so that launches were queued behind the second token


@pytest.mark.parametrize("config", sample(CONFIGS))
def test_sequences_that_come_and_go_are_what_the_reference_vm_says(config: str) -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    program, every = program_of(config, 3), voices(6, SPEC.vocab, CONTEXT, 3)
    expected = sing(ReferenceSession(program, SPEC, weights).sequences(), every)
    gpu = EmulatedGpu()
    with emulated_session(gpu, program, SPEC, weights) as session:
        held = set(gpu._held)
        sequences = session.sequences()
        assert sing(sequences, every) == expected
        sequences.close()
        assert set(gpu._held) == held
        for number in (1, 2):
            assert alone(session.sequences, every[number], number) == expected[number]


def test_queued_sequences_report_what_stepped_ones_do_and_only_where_one_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    asking = [GREEDY, Sampling(1.3, seed=4, logprobs=3), Sampling(logprobs=0)]
    with emulated_session(EmulatedGpu(), program_of("data", 3), SPEC, weights) as session:
        heard = []
        for sequences in (session.sequences(), SteppedSequences(session)):
            for row, sampling in enumerate(asking):
                sequences.join(row, PROMPT, len(PROMPT) + 6, sampling)
            heard.append([sorted(sequences.advance()) for _ in range(7)])
            sequences.close()
        assert heard[0] == heard[1]
        assert [made.logprobs is None for made in heard[0][3]] == [True, False, False]
        monkeypatch.setattr("flywheel.decode.queued.report", None)
        sequences = session.sequences()
        sequences.join(0, PROMPT, 9, GREEDY)
        assert [made.token for made in sequences.advance()] == [heard[0][0][0].token]
        sequences.close()


def test_a_prompt_beyond_the_vocabulary_or_the_context_is_refused_before_a_launch() -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    with emulated_session(EmulatedGpu(), program_of("data"), SPEC, weights) as session:
        with pytest.raises(UsageError, match=r"token 80 is not in 0\.\.79"):
            session.stream((3, 80), 4)
        with pytest.raises(UsageError, match=r"position 32 is not in 0\.\.31"):
            session.stream((3,), CONTEXT + 1)


class SlowGpu(EmulatedGpu):
    """Work that is late: nothing ends in time until it is synchronised with, or where it stops, told to stop."""

    late, stops = False, True

    def wait(self, event: None, limit_s: float) -> bool:
        if self.abort_flag.value and self.stops:
            self.late = False
        return not self.late

    def sync(self) -> None:
        self.late = False


def test_a_prompt_may_take_longer_than_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, weights = SlowGpu(), random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    with emulated_session(gpu, program_of("counters", 3), SPEC, weights) as session:
        voice = voices(1, SPEC.vocab, CONTEXT, 3)[0]
        expected, prefill = alone(session.sequences, voice), session._prefill

        def read(*given: object) -> None:
            prefill(*given)  # type: ignore[arg-type]
            gpu.late = True

        monkeypatch.setattr(session, "_prefill", read)
        assert alone(session.sequences, voice) == expected


@pytest.mark.parametrize(("stops", "error"), [(True, LaunchTimeoutError), (False, GpuFaultError)])
def test_a_launch_that_does_not_end_is_stopped_though_a_sequence_joins(
    stops: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, weights = SlowGpu(), random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    gpu.stops = stops
    with emulated_session(gpu, program_of("counters", 3), SPEC, weights) as session:
        monkeypatch.setattr(session, "_prefill", reading(session._prefill, 2))
        sequences = session.sequences()
        sequences.join(0, PROMPT, 20, GREEDY)
        sequences.advance()
        gpu.late = True
        with pytest.raises(error, match="launch: not over"):
            sequences.join(1, PROMPT, 20, GREEDY)
        sequences.close()


def reading(prefill: Callable[..., None], most: int) -> Callable[..., None]:
    """A prefill for whose prompts memory lasts up to so many tokens."""

    def read(token_ids: tuple[int, ...], *where: object) -> None:
        if len(token_ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        prefill(token_ids, *where)

    return read


def test_a_prompt_that_memory_does_not_hold_is_refused_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    with emulated_session(EmulatedGpu(), program_of("counters", 3), SPEC, weights) as session:
        monkeypatch.setattr(session, "_prefill", reading(session._prefill, 2))
        with closing(session.sequences()) as sequences:
            sequences.join(0, PROMPT, 8, GREEDY)
            alone_first = [sequences.advance() for _ in range(6)]
        with closing(session.sequences()) as sequences:
            sequences.join(0, PROMPT, 8, GREEDY)
            heard = [sequences.advance()]
            with pytest.raises(GpuMemoryError, match=r"prompt of 9 tokens: CUDA out of memory\. Tried"):
                sequences.join(1, PROMPT * 3, 20, GREEDY)
            heard += [sequences.advance() for _ in range(5)]
        assert heard == alone_first
