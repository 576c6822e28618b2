from __future__ import annotations

import pytest

from flywheel.errors import NoGpuError, UsageError
from flywheel.ir import TARGETS
from flywheel.search.device import is_target, missing_modules, settle_measure


@pytest.mark.parametrize(
    ("device", "names"),
    [
        ("NVIDIA H100 80GB HBM3", ["h100"]),
        ("NVIDIA H200", ["h200"]),
        ("NVIDIA A100-SXM4-80GB", ["a100"]),
        ("NVIDIA A10G", ["a10g"]),
        ("NVIDIA A10", []),
        ("NVIDIA L4", ["l4"]),
        ("NVIDIA L40S", ["l40s"]),
        ("NVIDIA L40", []),
        ("NVIDIA B200", ["b200"]),
        ("NVIDIA GB200", []),
        ("NVIDIA GeForce RTX 4090", ["rtx4090"]),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", ["rtx5090"]),
        ("Quadro RTX 4000", []),
    ],
)
def test_a_driver_names_at_most_one_target(device: str, names: list[str]) -> None:
    assert [target.name for target in TARGETS.values() if is_target(device, target)] == names


def test_latencies_are_predicted_unless_that_would_surprise() -> None:
    h100 = TARGETS["h100"]
    assert settle_measure("auto", h100, None, []) == "predict"
    assert settle_measure("predict", h100, "NVIDIA L4", []) == "predict"
    assert settle_measure("predict", h100, "NVIDIA H100 80GB HBM3", []) == "predict"
    with pytest.raises(NoGpuError, match=r"^--gpu h100: this machine has NVIDIA L4; --measure predict"):
        settle_measure("auto", h100, "NVIDIA L4", [])
    with pytest.raises(NoGpuError, match=r"^--measure cuda needs an h100: this machine has no GPU$"):
        settle_measure("cuda", h100, None, [])
    with pytest.raises(NoGpuError, match=r"^--measure cuda needs an h100: this machine has NVIDIA L4$"):
        settle_measure("cuda", h100, "NVIDIA L4", [])


def test_latencies_are_measured_where_the_gpu_is_here_and_all_that_it_takes() -> None:
    h100, present = TARGETS["h100"], "NVIDIA H100 80GB HBM3"
    assert settle_measure("auto", h100, present, []) == "cuda"
    assert settle_measure("cuda", h100, present, []) == "cuda"
    assert settle_measure("auto", h100, present, ["cuda.core"]) == "predict"
    with pytest.raises(UsageError, match=r"^--measure cuda needs torch and cuda\.core: pip install 'flywheel\["):
        settle_measure("cuda", h100, present, ["torch", "cuda.core"])


def test_a_module_whose_parent_is_missing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flywheel.search.device._MEASURES", ("os.path", "nowhere.core", "os.nowhere"))
    assert missing_modules() == ["nowhere.core", "os.nowhere"]
