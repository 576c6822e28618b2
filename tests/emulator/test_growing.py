"""Caches that grow with what is used, on the CUDA VM's own sources: an address without memory behind it is a fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from chorus import sing, voices
from effort import sample
from emulator.gpu import EmulatedGpu
from emulator.granules import EmulatedGranules
from emulator.sessions import emulated_session

from flywheel.decode.reference import ReferenceSession
from flywheel.errors import CacheMemoryError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import verify
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY
from flywheel.tensors import TORCH_DTYPES

# A granule of 4096 bytes has 64 positions of a head: a stream of 200 ends inside of one.
SPEC = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 256)
CONTEXT = 200
CONFIGS = {
    "one block": ScheduleConfig(threads_per_block=192),
    "blocks": ScheduleConfig(
        {"attention": {"kv_block": 64}, "hand_off": {"data": 1}},
        (("k_rope", "k_append", "v_append", "q_rope", "attention"),),
        page_allocation="none", threads_per_block=192,
    ),
}  # fmt: skip


def program_of(config: str, batch: int) -> MegakernelProgram:
    gpu = EmulatedGpu()
    target = replace(TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes)
    return lower(decode_step(SPEC, CONTEXT, DType.F32, batch), CONFIGS[config], target)


WEIGHTS = random_weights(SPEC, 1, TORCH_DTYPES[DType.F32])


@pytest.mark.parametrize("config", sample(CONFIGS, 2))
def test_sequences_touch_no_memory_that_they_do_not_have(config: str) -> None:
    program, every = program_of(config, 3), voices(5, SPEC.vocab, CONTEXT // 2, 4)
    expected = sing(ReferenceSession(program, SPEC, WEIGHTS).sequences(), every)
    granules = EmulatedGranules()
    with emulated_session(EmulatedGpu(), program, SPEC, WEIGHTS, granules) as session:
        assert len(granules.made) == 1  # behind the first positions of rows that are free
        with closing(session.sequences()) as sequences:
            assert sing(sequences, every) == expected
        whole = 3 * SPEC.n_layers * 2 * SPEC.n_kv_heads * -(-CONTEXT * 64 // granules.nbytes)
        assert 1 < len(granules.made) < whole
        session.caches.close()
    assert not granules.made and not granules.mapped


def test_a_sequence_grows_as_it_advances_and_its_memory_is_kept_for_the_next_one() -> None:
    granules = EmulatedGranules()
    with (
        emulated_session(EmulatedGpu(), program_of("blocks", 2), SPEC, WEIGHTS, granules) as session,
        closing(session.sequences()) as sequences,
    ):
        counts = []
        for token in (1, 2):
            sequences.join(0, [token] * 60, 70, GREEDY)
            counts.append(len(granules.made))
            while sequences.advance():
                pass
            counts.append(len(granules.made))
            sequences.leave(0)
    begun, grown, *later = counts
    assert 1 < begun < grown
    assert later == [grown, grown]


def test_a_sequence_without_memory_ends_alone_and_what_left_is_taken_first() -> None:
    granules = EmulatedGranules(limit=30)
    with emulated_session(EmulatedGpu(), program_of("one block", 3), SPEC, WEIGHTS, granules) as session:
        with closing(session.sequences()) as sequences:
            sequences.join(0, [1] * 20, 100, GREEDY)
            alone = [made.token for _ in range(5) for made in sequences.advance()]
        session.caches.give_back()
        with closing(session.sequences()) as sequences:
            sequences.join(0, [1] * 20, 100, GREEDY)
            sequences.join(1, [2] * 60, 190, GREEDY)
            heard, lost = [], {}
            while not lost:
                heard += [made.token for made in sequences.advance() if made.row == 0]
                lost = sequences.lost()
            ((row, error),) = lost.items()
            assert row in (0, 1)
            assert "KV caches" in str(error) and "bytes more, 0 are free" in str(error)
            other = 1 - row
            assert [made.row for made in sequences.advance()] == [other]
            sequences.join(2, [3] * 190, 195, GREEDY)
            while not lost.get(2):
                assert [made.row for made in sequences.advance()] == [other]
                lost |= sequences.lost()
            assert isinstance(lost[2], CacheMemoryError)
            sequences.leave(other)
            sequences.join(2, [3] * 60, 70, GREEDY)  # by what the others left
            assert [made.row for made in sequences.advance()] == [2]
            assert heard[:5] == alone or row == 0


def test_the_judge_finds_caches_in_granules_right() -> None:
    with emulated_session(EmulatedGpu(), program_of("blocks", 2), SPEC, WEIGHTS, EmulatedGranules()) as session:
        verdict = verify(session, WEIGHTS, (0, 63, 64, 199))
    assert verdict.passed, verdict.where


FAULT = """
from emulator.granules import EmulatedGranules
from emulator.test_growing import *
with emulated_session(EmulatedGpu(), program_of("blocks", 1), SPEC, WEIGHTS, EmulatedGranules()) as session:
    session.caches.hold(0, 64)
    for position in (63, 190):
        session._prepare(3, position)
        session._launch(session.loaded, position)
        print("over", position, flush=True)
"""


def test_a_launch_beyond_the_memory_that_a_sequence_has_is_a_fault() -> None:
    tests = Path(__file__).parents[1]
    died = subprocess.run(
        [sys.executable, "-c", FAULT], capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)])},
    )  # fmt: skip
    assert (died.returncode, died.stdout) == (-signal.SIGSEGV, "over 63\n"), died.stderr


def test_a_window_of_32768_positions_is_right_in_granules() -> None:
    spec = replace(SPEC, name="long", n_layers=1, n_heads=2, n_kv_heads=1, max_position=32768)
    gpu = EmulatedGpu()
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    config = ScheduleConfig(
        {"attention": {"kv_block": 8192}}, (("k_rope", "k_append", "v_append", "q_rope", "attention"),),
        threads_per_block=192,
    )  # fmt: skip
    program = lower(decode_step(spec, 32768, DType.F32), config, target)
    weights = random_weights(spec, 1, TORCH_DTYPES[DType.F32])
    with emulated_session(gpu, program, spec, weights, EmulatedGranules(nbytes=2**16)) as session:
        verdict = verify(session, weights, (0, 20000, 32767))
    assert verdict.passed, verdict.where
