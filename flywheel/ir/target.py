"""GPUs as data. Adding a GPU is adding a record."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """What lowering, validation and the floor need to know of a GPU."""

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
        """Time in us that reading `weight_bytes` takes at the datasheet's bandwidth."""
        return weight_bytes / (self.hbm_bandwidth_gbs * 1e9) * 1e6


_KIB, _MIB, _GB = 1024, 1024**2, 10**9
_SMEM_90 = (
    228 * _KIB,
    227 * _KIB,
)  # sm_90, sm_100: CUDA programming guide, "Technical specifications per compute capability"
_SMEM_80 = (164 * _KIB, 163 * _KIB)
_SMEM_86 = (100 * _KIB, 99 * _KIB)  # sm_86, sm_89, sm_120

_TARGETS: Final = (
    GpuTarget("a100", 80, 108, *_SMEM_80, 65536, 2048, 255, 40 * _MIB, 80 * _GB, 2039.0, 312.0, 1.41,
              note="A100 SXM 80 GB datasheet"),
    GpuTarget("a10g", 86, 80, *_SMEM_86, 65536, 1536, 255, 6 * _MIB, 24 * _GB, 600.0, 70.0, 1.71,
              note="NVIDIA A10G product page (AWS G5)"),
    GpuTarget("b200", 100, 148, *_SMEM_90, 65536, 2048, 255, 126 * _MIB, 180 * _GB, 8000.0, 2250.0, 1.965,
              note="Blackwell B200 datasheet, one GPU of an HGX board"),
    GpuTarget("h100", 90, 132, *_SMEM_90, 65536, 2048, 255, 50 * _MIB, 80 * _GB, 3350.0, 989.0, 1.98,
              note="H100 SXM5 datasheet"),
    GpuTarget("h200", 90, 132, *_SMEM_90, 65536, 2048, 255, 50 * _MIB, 141 * _GB, 4800.0, 989.0, 1.98,
              note="H200 SXM datasheet; a plain read kernel reached 4611 GB/s"),
    GpuTarget("l4", 89, 58, *_SMEM_86, 65536, 1536, 255, 48 * _MIB, 24 * _GB, 300.0, 121.0, 2.04,
              note="L4 datasheet"),
    GpuTarget("l40s", 89, 142, *_SMEM_86, 65536, 1536, 255, 96 * _MIB, 48 * _GB, 864.0, 362.0, 2.52,
              note="L40S datasheet"),
    GpuTarget("rtx4090", 89, 128, *_SMEM_86, 65536, 1536, 255, 72 * _MIB, 24 * _GB, 1008.0, 330.0, 2.52,
              note="Ada GPU architecture whitepaper, FP16 with FP16 accumulation"),
    GpuTarget("rtx5090", 120, 82, *_SMEM_86, 65536, 1536, 255, 64 * _MIB, 24 * _GB, 896.0, 228.0, 2.16,
              wddm_tdr=True, note="RTX 5090 Laptop GPU"),
)  # fmt: skip

TARGETS: Final = MappingProxyType({target.name: target for target in _TARGETS})
"""Built-in GPUs by name."""
