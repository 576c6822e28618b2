"""What there are kernels for: opcodes, the steps that they say, and architectures."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from flywheel.errors import ConfigError
from flywheel.ir import InstructionKind

_K = InstructionKind

KERNELS: Final[Mapping[InstructionKind, str]] = MappingProxyType(
    {
        _K.COPY: "copy",
        _K.EMBED: "embed",
        _K.RMSNORM: "rmsnorm",
        _K.LAYERNORM: "layernorm",
        _K.GEMV_TILE: "matrix",
        _K.GEMM_TILE: "matrix",
        _K.ATTENTION_TILE: "attention_tile",
        _K.ROPE: "rope",
        _K.SILU_MUL: "silu_mul",
        _K.GELU: "gelu",
        _K.ADD: "add",
        _K.MUL: "mul",
        _K.DEQUANT: "dequant",
        _K.SOFTMAX: "softmax",
        _K.KV_APPEND: "kv_append",
        _K.SAMPLE_ARGMAX: "sample_argmax",
        _K.ATTENTION_COMBINE: "attention_combine",
        _K.ALLREDUCE_SHARD: "allreduce_shard",
    }
)
"""What runs each opcode on the device: function `op_<name>` of `ops/<name>.cuh`. NOP has nothing to run, and FUSED is
its steps."""

RANKED: Final = frozenset({_K.ALLREDUCE_SHARD})
"""What only kernels for several GPUs have."""

ARCHITECTURES: Final[Mapping[int, str]] = MappingProxyType(
    {80: "sm_80", 86: "sm_86", 89: "sm_89", 90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120"}
)
"""`sm_arch` of a target -> the architecture that its kernels are compiled for."""

BULK_COPY_ARCH: Final = 90
"""First `sm_arch` whose loader can move a whole chunk with one instruction."""

USUAL: Final = (_K.GEMV_TILE, _K.GEMM_TILE, _K.RMSNORM, _K.ROPE, _K.ATTENTION_TILE, _K.ATTENTION_COMBINE)
"""What most steps of a decoder are, the most frequent first, those of one micro-kernel together."""

STEP_KINDS: Final[Mapping[InstructionKind, str]] = MappingProxyType(
    {
        _K.GEMV_TILE: "product",
        _K.GEMM_TILE: "product",
        _K.RMSNORM: "norm",
        _K.ROPE: "rope",
        _K.ATTENTION_TILE: "attention",
        _K.SOFTMAX: "softmax",
        _K.KV_APPEND: "append",
    }
)
"""The member of `amk_step_kind_t` that holds of a step; `plain` of any other."""


def arch_name(sm_arch: int) -> str:
    """The architecture that kernels for `sm_arch` are compiled for. Raises ConfigError for an unsupported one."""
    if sm_arch not in ARCHITECTURES:
        known = ", ".join(map(str, ARCHITECTURES))
        raise ConfigError(f"sm_arch={sm_arch}: there are kernels for {known}")
    return ARCHITECTURES[sm_arch]
