"""GPUs as data. Adding a GPU is adding a record."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """The facts about a GPU that lowering, validation and the floor use."""

    name: str
    sm_arch: int
    num_sms: int
    smem_bytes_per_sm: int
    smem_bytes_per_block_optin: int
    regs_per_sm: int
    max_threads_per_sm: int
    max_regs_per_thread: int
    l2_bytes: int
    hbm_bytes: int
    hbm_bandwidth_gbs: float
    fp16_tflops: float
    clock_ghz: float = 0.0
    supports_cooperative: bool = True
    wddm_tdr: bool = False
    note: str = ""

    def bandwidth_bound_us(self, weight_bytes: int) -> float:
        """The time in us to read `weight_bytes` at the datasheet's bandwidth."""
        return weight_bytes / (self.hbm_bandwidth_gbs * 1e9) * 1e6


_KIB, _MIB, _GIB = 1024, 1024**2, 1024**3
_SMEM_90 = (
    228 * _KIB,
    227 * _KIB,
)  # sm_90, sm_100: CUDA programming guide, "Technical specifications per compute capability"
_SMEM_80 = (164 * _KIB, 163 * _KIB)
_SMEM_86 = (100 * _KIB, 99 * _KIB)  # sm_86, sm_89, sm_120

_HOPPER: Final = (90, 132, *_SMEM_90, 65536, 2048, 255, 50 * _MIB)
_ADA: Final = (*_SMEM_86, 65536, 1536, 255)

# A datasheet's GB of memory are GiB: an H100 of 80 GB has 81,559 MiB by its driver, an H200 of 141 GB 143,771 MiB; ECC
# of GDDR6 takes a sixteenth. Boost clocks in GHz.
_CARDS: Final = (
    (GpuTarget("a100", 80, 108, *_SMEM_80, 65536, 2048, 255, 40 * _MIB, 80 * _GIB, 2039.0, 312.0, 1.41,
               note="A100 SXM 80 GB datasheet"),
     ("A100-SXM4-80GB", "A100-SXM-80GB")),
    (GpuTarget("a100-40gb", 80, 108, *_SMEM_80, 65536, 2048, 255, 40 * _MIB, 40 * _GIB, 1555.0, 312.0, 1.41,
               note="A100 SXM 40 GB datasheet"),
     ("A100-SXM4-40GB", "A100-SXM-40GB")),
    (GpuTarget("a100-pcie", 80, 108, *_SMEM_80, 65536, 2048, 255, 40 * _MIB, 80 * _GIB, 1935.0, 312.0, 1.41,
               note="A100 PCIe 80 GB datasheet"),
     ("A100 80GB PCIe", "A100-PCIE-80GB")),
    (GpuTarget("a100-pcie-40gb", 80, 108, *_SMEM_80, 65536, 2048, 255, 40 * _MIB, 40 * _GIB, 1555.0, 312.0, 1.41,
               note="A100 PCIe 40 GB datasheet"),
     ("A100-PCIE-40GB",)),
    (GpuTarget("a10", 86, 72, *_SMEM_86, 65536, 1536, 255, 6 * _MIB, 24 * _GIB, 600.0, 125.0, 1.695,
               note="A10 datasheet"),
     ("A10",)),
    (GpuTarget("a10g", 86, 80, *_SMEM_86, 65536, 1536, 255, 6 * _MIB, 24 * _GIB, 600.0, 70.0, 1.71,
               note="NVIDIA A10G product page (AWS G5)"),
     ("A10G",)),
    (GpuTarget("b200", 100, 148, *_SMEM_90, 65536, 2048, 255, 126 * _MIB, 180 * _GIB, 8000.0, 2250.0, 1.965,
               note="Blackwell B200 datasheet, one GPU of an HGX board"),
     ("B200",)),
    (GpuTarget("gh200", *_HOPPER, 96 * _GIB, 4000.0, 989.0, 1.98, note="GH200 datasheet, 96 GB of HBM3"),
     ("GH200 480GB",)),
    (GpuTarget("gh200-144gb", *_HOPPER, 144 * _GIB, 4900.0, 989.0, 1.98, note="GH200 datasheet, 144 GB of HBM3e"),
     ("GH200 144G HBM3e",)),
    (GpuTarget("h100", *_HOPPER, 80 * _GIB, 3350.0, 989.0, 1.98, note="H100 SXM5 datasheet"),
     ("H100 80GB HBM3",)),
    (GpuTarget("h100-nvl", *_HOPPER, 94 * _GIB, 3938.0, 835.0, 1.785, note="H100 NVL product brief, one of two cards"),
     ("H100 NVL",)),
    (GpuTarget("h100-pcie", 90, 114, *_SMEM_90, 65536, 2048, 255, 50 * _MIB, 80 * _GIB, 2039.0, 756.0, 1.755,
               note="H100 PCIe product brief"),
     ("H100 PCIe",)),
    (GpuTarget("h200", 90, 132, *_SMEM_90, 65536, 2048, 255, 60 * _MIB, 141 * _GIB, 4800.0, 989.0, 1.98,
               note="H200 SXM datasheet, L2 by its driver; a plain read kernel reached 4611 GB/s"),
     ("H200",)),
    (GpuTarget("h200-nvl", *_HOPPER, 141 * _GIB, 4800.0, 835.0, 1.785, note="H200 NVL datasheet"),
     ("H200 NVL",)),
    (GpuTarget("l4", 89, 58, *_ADA, 48 * _MIB, 24 * _GIB, 300.0, 121.0, 2.04, note="L4 datasheet"),
     ("L4",)),
    (GpuTarget("l40", 89, 142, *_ADA, 96 * _MIB, 48 * _GIB, 864.0, 181.0, 2.49, note="L40 datasheet"),
     ("L40",)),
    (GpuTarget("l40s", 89, 142, *_ADA, 96 * _MIB, 48 * _GIB, 864.0, 362.0, 2.52, note="L40S datasheet"),
     ("L40S",)),
    (GpuTarget("rtx4090", 89, 128, *_ADA, 72 * _MIB, 24 * _GIB, 1008.0, 330.0, 2.52,
               note="Ada GPU architecture whitepaper, FP16 with FP16 accumulation"),
     ("RTX 4090",)),
    (GpuTarget("rtx4090-d", 89, 114, *_ADA, 72 * _MIB, 24 * _GIB, 1008.0, 294.0, 2.52,
               note="GeForce RTX 4090 D product page; FP16 by SMs of the RTX 4090's"),
     ("RTX 4090 D",)),
    (GpuTarget("rtx4090-laptop", 89, 76, *_ADA, 64 * _MIB, 16 * _GIB, 576.0, 159.0, 2.04, wddm_tdr=True,
               note="GeForce RTX 4090 Laptop GPU product page; FP16 by SMs and clock of the RTX 4090's"),
     ("RTX 4090 Laptop GPU",)),
    (GpuTarget("rtx5090", 120, 170, *_ADA, 96 * _MIB, 32 * _GIB, 1792.0, 419.0, 2.407,
               note="RTX Blackwell GPU architecture whitepaper, FP16 with FP16 accumulation"),
     ("RTX 5090",)),
    (GpuTarget("rtx5090-d", 120, 170, *_ADA, 96 * _MIB, 32 * _GIB, 1792.0, 419.0, 2.407,
               note="GeForce RTX 5090 D product page; all but its tensor cores' limit as the RTX 5090"),
     ("RTX 5090 D",)),
    (GpuTarget("rtx5090-laptop", 120, 82, *_ADA, 64 * _MIB, 24 * _GIB, 896.0, 228.0, 2.16, wddm_tdr=True,
               note="RTX 5090 Laptop GPU product page"),
     ("RTX 5090 Laptop GPU",)),
)  # fmt: skip

TARGETS: Final = MappingProxyType({target.name: target for target, _ in _CARDS})
"""Built-in GPUs by name. A name without a suffix is the card that most servers have: `a100`, `h100` and `h200` are SXM
boards, and `a100` has 80 GB. `rtx4090` and `rtx5090` are the desktop cards."""

DRIVER_NAMES: Final = MappingProxyType({target.name: names for target, names in _CARDS})
"""Name -> the names that drivers use, without `NVIDIA` and `GeForce`, which older drivers leave out."""
