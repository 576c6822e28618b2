"""A session that does not fit the GPU."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from flywheel.decode import cuda
from flywheel.decode.opening import open_session
from flywheel.decode.source import Source
from flywheel.errors import GpuMemoryError
from flywheel.ir import TARGETS, DType, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec
from flywheel.vm.gpu import driver

SPEC = DecoderSpec("small", "llama", 48, 80, 2, 4, 2, 16, 70, 1e4, 1e-5, 64)


def test_weights_and_caches_that_torch_has_no_memory_for_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.\nMore.")

    monkeypatch.setattr(cuda, "prepare_torch", lambda: None)
    monkeypatch.setattr(driver, "open_gpus", lambda ranks: (SimpleNamespace(total_bytes=2**36),) * ranks)
    monkeypatch.setattr(Source, "weights", full)
    program = lower(decode_step(SPEC, 40, DType.F32, 3), ScheduleConfig(), TARGETS["h100"])
    with ExitStack() as undo, pytest.raises(GpuMemoryError) as caught:
        open_session(program, Source("small", SPEC, None, None), 0, "cuda", undo)
    assert str(caught.value) == (
        "small: its weights and 3 caches of 40 positions: CUDA out of memory. Tried to allocate 8.00 GiB"
    )
