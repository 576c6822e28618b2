"""Launches queued ahead of the host, on the CUDA VM's own sources: the tokens of the reference VM, one launch each."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch
from chorus import alone, voices
from emulator.gpu import EmulatedGpu
from emulator.sessions import emulated_session

from flywheel.decode.prompts import Prefill, Reading
from flywheel.decode.queued import AHEAD
from flywheel.errors import GpuFaultError, GpuMemoryError, LaunchTimeoutError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY
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


class SlowGpu(EmulatedGpu):
    """Work that is late: nothing ends in time until somebody waits without a limit, or where it stops, told to stop."""

    late, stops = False, True

    def wait(self, event: None, limit_s: float) -> bool:
        if limit_s == inf or (self.abort_flag.value and self.stops):
            self.late = False
        return not self.late

    def sync(self) -> None:
        self.late = False


def test_a_prompt_may_take_longer_than_a_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, weights = SlowGpu(), random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    with emulated_session(gpu, program_of("counters", 3), SPEC, weights) as session:
        voice = voices(1, SPEC.vocab, CONTEXT, 3)[0]
        expected, read, late = alone(session.sequences, voice), Reading.read, []

        def read_late(reading: Reading, layers: int) -> None:
            read(reading, layers)
            late.append(True)
            gpu.late = True

        monkeypatch.setattr(Reading, "read", read_late)
        assert alone(session.sequences, voice) == expected
        assert late


@pytest.mark.parametrize(("stops", "error"), [(True, LaunchTimeoutError), (False, GpuFaultError)])
def test_a_launch_that_does_not_end_is_stopped_though_a_sequence_joins(
    stops: bool, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, weights = SlowGpu(), random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])
    gpu.stops = stops
    with emulated_session(gpu, program_of("counters", 3), SPEC, weights) as session:
        sequences = session.sequences()
        sequences.join(0, PROMPT, 20, GREEDY)
        sequences.advance()
        gpu.late = True
        sequences.join(1, PROMPT, 20, GREEDY)
        with pytest.raises(error, match="launch: not over"):
            sequences.advance()
        sequences.close()


def test_a_prompt_that_memory_does_not_hold_is_refused_and_harms_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, through, failed = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32]), Prefill.through, []

    def short(prefill: Prefill, layer: int, x: torch.Tensor, chunk: Any) -> torch.Tensor:
        if len(x) > 2 and layer == 1:
            failed.append(layer)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        return through(prefill, layer, x, chunk)

    monkeypatch.setattr(Prefill, "through", short)
    with emulated_session(EmulatedGpu(), program_of("counters", 3), SPEC, weights) as session:
        with closing(session.sequences()) as sequences:
            sequences.join(0, PROMPT, 8, GREEDY)
            alone_first = [sequences.advance() for _ in range(6)]
        with closing(session.sequences()) as sequences:
            sequences.join(0, PROMPT, 8, GREEDY)
            heard = [sequences.advance()]
            sequences.join(1, PROMPT * 3, 20, GREEDY)
            heard += [sequences.advance() for _ in range(5)]
            lost = sequences.lost()
            assert list(lost) == [1] and isinstance(lost[1], GpuMemoryError)
            assert str(lost[1]).startswith("prompt of 9 tokens: CUDA out of memory. Tried")
            sequences.join(1, PROMPT, 4, GREEDY)
            again = [made.token for _ in range(4) for made in sequences.advance()]
        assert heard == alone_first
        assert again == [made.token for some in heard[:2] for made in some]
        assert failed == [1, 1]  # once more with the memory of what is over
