from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flywheel.decode.interface import read_interface
from flywheel.errors import TensorError
from flywheel.ir import Buffer, BufferKind, DType, MegakernelProgram
from flywheel.models.spec import DecoderSpec

Lowered = Callable[..., MegakernelProgram]


def changed(program: MegakernelProgram, name: str, change: Callable[[Buffer], Buffer]) -> MegakernelProgram:
    assert any(buffer.name == name for buffer in program.buffers)
    return replace(program, buffers=tuple(change(b) if b.name == name else b for b in program.buffers))


def test_a_lowered_program_shows_its_context_dtype_and_caches(lowered: Lowered, spec: DecoderSpec) -> None:
    interface = read_interface(lowered(DType.F16, context=40), spec)
    assert (interface.context, interface.dtype) == (40, DType.F16)
    assert len(interface.caches) == spec.n_layers
    assert interface.caches[1] == (("L1.k_cache.h0", "L1.k_cache.h1"), ("L1.v_cache.h0", "L1.v_cache.h1"))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("L1.v_cache.h1", lambda b: replace(b, name="L1.v_cache.h2")),
        ("L1.v_cache.h1", lambda b: replace(b, shape=(32, 1, 16))),
        ("L1.v_cache.h1", lambda b: replace(b, dtype=DType.BF16)),
        ("L0.k_cache.h0", lambda b: replace(b, dtype=DType.I8)),
        ("L0.k_cache.h0", lambda b: replace(b, shape=(4096, 1, 16))),
        ("L0.k_cache.h0", lambda b: replace(b, name="cache")),
        ("logits", lambda b: replace(b, shape=(1, 81))),
        ("logits", lambda b: replace(b, name="scores")),
        ("next_token", lambda b: replace(b, kind=BufferKind.ACTIVATION)),
        ("position", lambda b: replace(b, dtype=DType.F32)),
        ("token_id", lambda b: replace(b, name="token")),
    ],
)
def test_what_is_no_decode_step_of_the_model_is_refused_by_buffer(
    name: str, change: Callable[[Buffer], Buffer], lowered: Lowered, spec: DecoderSpec
) -> None:
    program = changed(lowered(), name, change)
    names = {change(buffer).name for buffer in lowered().buffers if buffer.name == name}
    with pytest.raises(TensorError) as caught:
        read_interface(program, spec)
    assert any(repr(each) in str(caught.value) for each in {name, *names})
    assert "\n" not in str(caught.value)


def test_a_program_beyond_the_models_reach_is_refused_by_it(lowered: Lowered, spec: DecoderSpec) -> None:
    program = lowered(DType.F16, context=40)
    assert read_interface(program, replace(spec, max_position=40, window=8)).context == 40
    with pytest.raises(TensorError, match="reaches 39 positions"):
        read_interface(program, replace(spec, max_position=39))


def test_the_program_of_another_model_is_refused(lowered: Lowered, spec: DecoderSpec) -> None:
    for other in (
        replace(spec, n_layers=1),
        replace(spec, n_layers=3),
        replace(spec, n_kv_heads=4),
        replace(spec, vocab=9),
    ):
        with pytest.raises(TensorError, match="small"):
            read_interface(lowered(), other)
