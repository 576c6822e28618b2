from __future__ import annotations

import pytest

from flywheel.errors import NoGpuError, UsageError
from flywheel.ir import TARGETS
from flywheel.measure.device import Device
from flywheel.search.trials.device import default_gpu, missing_modules, settle_measure

L4, H100 = Device("NVIDIA L4"), Device("NVIDIA H100 80GB HBM3", 132, 85_520_809_984)


def test_latencies_are_predicted_unless_that_would_surprise() -> None:
    h100 = TARGETS["h100"]
    assert settle_measure("auto", h100, None, []) == "predict"
    assert settle_measure("predict", h100, L4, []) == "predict"
    assert settle_measure("predict", h100, H100, []) == "predict"
    with pytest.raises(NoGpuError, match=r"^--gpu h100: this machine has NVIDIA L4; --measure predict"):
        settle_measure("auto", h100, L4, [])
    with pytest.raises(NoGpuError, match=r"^--measure cuda needs an h100: this machine has no GPU$"):
        settle_measure("cuda", h100, None, [])
    with pytest.raises(NoGpuError, match=r"^--measure cuda needs an h100: this machine has NVIDIA L4$"):
        settle_measure("cuda", h100, L4, [])


def test_latencies_are_measured_where_the_gpu_is_here_and_all_that_it_takes() -> None:
    h100, present = TARGETS["h100"], H100
    assert settle_measure("auto", h100, present, []) == "cuda"
    assert settle_measure("cuda", h100, present, []) == "cuda"
    assert settle_measure("auto", h100, present, ["cuda.core"]) == "predict"
    with pytest.raises(UsageError, match=r"^--measure cuda needs torch and cuda\.core: pip install .*\[cuda,torch\]'$"):
        settle_measure("cuda", h100, present, ["torch", "cuda.core"])


def test_a_module_whose_parent_is_missing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.search.trials.device._MEASURES", ("os.path", "nowhere.core", "os.nowhere"))
    assert missing_modules() == ["nowhere.core", "os.nowhere"]


@pytest.mark.parametrize(("gpu", "wanted"), [(H100, "h100"), (Device("NVIDIA T1000"), "generic")])
def test_the_gpu_here_is_the_default(gpu: Device, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.search.trials.device.list_gpus", lambda: [("GPU-0", gpu), ("GPU-1", L4)])
    assert default_gpu("search") == wanted


def test_without_a_gpu_the_names_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.search.trials.device.list_gpus", list)
    with pytest.raises(UsageError, match=r"^evaluate: this machine has no NVIDIA GPU; give --gpu, one of .*h100, "):
        default_gpu("evaluate")
