from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flywheel.decode import memory
from flywheel.decode.memory import asked, is_exhausted, memory_named, within_memory
from flywheel.errors import GpuMemoryError

TORCHS = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB of which 1.1 GiB is free. "
    "Process 4711 has 77.00 GiB memory in use. If reserved but unallocated memory is large try setting "
    "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.\nSee documentation"
)
CUDAS = RuntimeError(
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call\n"
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
CUBLAS = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with little free memory, which torch uses."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    room = "1,100 of 79,000 are free; others hold the rest: pid 4711 (python3, 77,000 bytes)"
    monkeypatch.setattr(memory, "open_gpu", lambda index: SimpleNamespace(room=lambda: room))


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (TORCHS, "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (CUDAS, "CUDA error: out of memory"),
        (CUBLAS, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_memory_that_runs_out_is_one_line_with_what_is_free_and_who_holds_the_rest(
    gpu: None, error: RuntimeError, wanted: str, named: bool
) -> None:
    def work() -> None:
        raise error

    with pytest.raises(GpuMemoryError) as caught:
        if named:
            with memory_named("small"):
                work()
        else:
            within_memory("small", work)
    assert str(caught.value) == (
        f"small: {wanted}; 1,100 of 79,000 are free; others hold the rest: pid 4711 (python3, 77,000 bytes)"
    )


def test_other_errors_of_torch_stay_what_they_are(gpu: None) -> None:
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    assert not is_exhausted(fault)
    assert asked(fault) == str(fault)

    def work() -> None:
        raise fault

    with pytest.raises(RuntimeError, match="illegal"), memory_named("small"):
        work()
    with pytest.raises(RuntimeError, match="illegal"):
        within_memory("small", work)
