"""Logits that are not finite, on the CUDA VM's own sources: the host is told, ends one sequence, and goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from effort import sample
from emulator.bundles import loaded, make_files, program_of, write_checkpoint
from emulator.gpu import EmulatedGpu
from emulator.ranks import Peer
from emulator.sessions import emulated_ranks, emulated_session
from emulator.test_ranks import lowered
from safetensors.torch import load_file, save_file
from spoilt import DOWN, EMBED, after, overflowing, overflowing_after

from flywheel.decode.cuda import CudaSession
from flywheel.decode.generate import generate
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import FlywheelError, NonFiniteError
from flywheel.ir import NO_TOKEN, TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.runtime.sequences import GREEDY, Request, Sampling, Sequences
from flywheel.runtime.writing import write_folder
from flywheel.vm.abi import InstructionFlag
from flywheel.vm.pack import pack

SPEC = DecoderSpec("small", "llama", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 64)
CONTEXT, PROMPT = 32, (3, 7, 0)
WEIGHTS = random_weights(SPEC, 1, torch.float32)
CONFIG = ScheduleConfig({"hand_off": {"data": 1}}, page_allocation="none", threads_per_block=192)


def program(batch: int = 1, lanes: int = 1) -> MegakernelProgram:
    gpu = EmulatedGpu()
    target = replace(
        TARGETS["h100"], name="here", num_sms=gpu.num_sms, smem_bytes_per_block_optin=gpu.smem_optin_bytes
    )
    return lower(decode_step(SPEC, CONTEXT, DType.F32, batch * lanes, lanes=lanes), CONFIG, target)


@contextmanager
def session_of(weights: dict[str, torch.Tensor], batch: int = 1, lanes: int = 1) -> Iterator[CudaSession]:
    with emulated_session(EmulatedGpu(), program(batch, lanes), SPEC, weights) as session:
        yield session


@cache
def clean() -> tuple[int, ...]:
    """What follows PROMPT with finite weights."""
    return generate(ReferenceSession(program(), SPEC, WEIGHTS), Request(PROMPT, 12)).token_ids


def spoilt(place: int) -> dict[str, torch.Tensor]:
    """Weights with which a text goes on as `clean` up to the token at that place."""
    assert clean()[place] not in (*PROMPT, *clean()[:place])
    return after(WEIGHTS, clean()[place])


def hear(sequences: Sequences, launches: int) -> tuple[dict[int, list[int]], dict[int, FlywheelError]]:
    """(tokens, errors) of each row over so many calls."""
    heard: dict[int, list[int]] = {}
    lost: dict[int, FlywheelError] = {}
    for _ in range(launches):
        for made in sequences.advance():
            heard.setdefault(made.row, []).append(made.token)
        lost |= sequences.lost()
    return heard, lost


@pytest.mark.parametrize("kept", [True, False], ids=["kept while made", "read again"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_the_kernel_chooses_no_token_in_rows_that_are_not_finite_and_in_no_other(value: float, kept: bool) -> None:
    weights = after(WEIGHTS, 5, value)
    flags = patch("flywheel.plan.routines.find_best", lambda *_: None) if not kept else patch.dict({})
    with flags, session_of(weights, 3) as session:
        taken = pack(program(3)).instructions["flags"] & InstructionFlag.TAKES_BEST
        assert bool(taken.any()) == kept
        steps = session.step_rows([4, 5, 6], 0)
    assert [step.token == NO_TOKEN for step in steps] == [False, True, False]
    assert [step.token for step in steps][::2] == [int(steps[row].logits.argmax()) for row in (0, 2)]


@pytest.mark.parametrize(
    "sampling", sample([GREEDY, Sampling(repetition_penalty=1.0001), Sampling(1e-4, seed=1)]), ids=str
)
def test_a_stream_yields_the_tokens_before_and_ends_with_an_error(sampling: Sampling) -> None:
    with session_of(spoilt(2)) as session:
        for _ in range(2):  # nothing of the first stream disturbs the second
            said = []
            with pytest.raises(NonFiniteError, match=rf"position 5: .* weight '{EMBED}' is nan at \[{clean()[2]}, 3\]"):
                for token in session.stream(PROMPT, 20, 0, sampling):
                    said.append(token)
            assert tuple(said) == clean()[:3]
        assert session.step(PROMPT[0], 0).token != NO_TOKEN


def test_a_tensor_that_overflows_is_named() -> None:
    with session_of(overflowing(WEIGHTS, torch.float32)) as session, pytest.raises(NonFiniteError) as found:
        generate(session, Request(PROMPT, 4))
    assert "position 2: the logits are not finite; first in layer 0, mlp_out (down_proj): " in str(found.value)
    assert bool(torch.isfinite(overflowing(WEIGHTS, torch.float32)[DOWN]).all())


def test_a_sequence_that_left_before_its_error_was_read_spoils_no_other() -> None:
    with session_of(spoilt(0), 3) as session:
        sequences = session.sequences()
        sequences.join(0, PROMPT, 20, GREEDY)
        assert [made.token for made in sequences.advance()] == [clean()[0]]
        sequences.advance()  # what it does not have a token of
        sequences.leave(0)
        sequences.join(0, (11,), 8, GREEDY)
        heard, lost = hear(sequences, 4)
        assert (len(heard[0]), lost) == (4, {})
        sequences.close()


def test_drafts_are_taken_up_to_what_is_not_finite() -> None:
    prompt = (3, 7, 20, 3, 7, 20, 3, 7)
    wanted = generate(ReferenceSession(program(), SPEC, WEIGHTS), Request(prompt, 16)).token_ids
    place = next(place for place, token in enumerate(wanted) if token not in (*prompt, *wanted[:place]))
    said: list[int] = []
    with (
        session_of(after(WEIGHTS, wanted[place]), 1, 4) as session,
        pytest.raises(NonFiniteError, match=f"position {len(prompt) + place}: the logits"),
    ):
        generate(session, Request(prompt, 16), on_token=said.append)
    assert tuple(said) == wanted[: place + 1]


@pytest.mark.parametrize("by_data", sample([True, False]))
def test_two_ranks_choose_no_token_where_one_has_logits_that_are_not_finite(by_data: bool) -> None:
    queues: list[Any] = []
    peers = [Peer(num_sms=2, limit_s=60.0, queues=queues) for _ in range(2)]
    head = WEIGHTS["lm_head.weight"].clone()
    head[-1, 5] = torch.inf
    weights = {**WEIGHTS, "lm_head.weight": head}
    with emulated_ranks(peers, lowered(SPEC, 2, 1, by_data), SPEC, weights) as session:
        said: list[int] = []
        with pytest.raises(NonFiniteError, match=r"position 0: .* weight 'lm_head\.weight' is inf at \[79, 5\]"):
            generate(session, Request((4,), 3), on_token=said.append)
        assert said == []


def tokens_with_errors(decoder: Any, prompts: Sequence[tuple[int, ...]]) -> list[tuple[list[int], str]]:
    answers = [decoder.submit(prompt, max_tokens=6, ignore_end=True) for prompt in prompts]
    while not all(answer.is_over for answer in answers):
        decoder.advance()
    found = []
    for answer in answers:
        tokens: list[int] = []
        try:
            tokens += [piece.token_id for piece in answer]
            found.append((tokens, ""))
        except NonFiniteError as error:
            found.append((tokens, str(error)))
    return found


def test_an_answer_of_a_bundle_ends_alone(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "small")
    file = checkpoint / "model.safetensors"
    save_file(overflowing_after(load_file(file), 5), str(file))
    write_folder(tmp_path / "bundle", make_files(checkpoint, program_of(checkpoint)))
    with loaded(tmp_path / "bundle", str(checkpoint)) as decoder:
        (spoilt_tokens, error), (others, none) = tokens_with_errors(decoder, [(9, 5), (3,)])
        assert (spoilt_tokens, error) == ([], "position 1: the logits are not finite")
        assert (len(others), none) == (6, "")
        drawn = decoder.generate((9, 5), max_tokens=3, sampling=Sampling(1.0, logprobs=1))
        with pytest.raises(NonFiniteError):
            next(drawn)
