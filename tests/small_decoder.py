"""Fixtures of a small decoder: its spec, its programs, their sessions, and the GPU here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from flywheel.decode.cuda import prepare_torch
from flywheel.decode.reference import ReferenceSession
from flywheel.errors import NoGpuError
from flywheel.ir import TARGETS, DType, MegakernelProgram, ScheduleConfig
from flywheel.judge.verdicts import make_oracle
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.oracle import EagerDecoder
from flywheel.models.rope import RopeScaling
from flywheel.models.spec import DecoderSpec
from flywheel.models.weights import random_weights
from flywheel.tensors import TORCH_DTYPES
from flywheel.vm.gpu.driver import Gpu, open_gpu

CONTEXT = 64
SPEC = DecoderSpec(
    "small", "qwen3", 64, 96, 2, 4, 2, 16, 80, 1e4, 1e-6, 128,
    qkv_bias=True, qk_norm=True, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 32),
)  # fmt: skip


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    """The GPU here."""
    try:
        prepare_torch()
        return open_gpu()
    except NoGpuError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spec() -> DecoderSpec:
    """Two layers with everything that a decoder can have."""
    return SPEC


@pytest.fixture
def lowered() -> Callable[..., MegakernelProgram]:
    """`lowered(dtype, **config)`: the small spec's program for an H100 of six SMs."""

    def build(dtype: DType = DType.F32, context: int = CONTEXT, **config: object) -> MegakernelProgram:
        target = replace(TARGETS["h100"], name="few", num_sms=6)
        return lower(decode_step(SPEC, context, dtype), ScheduleConfig(**config), target)  # type: ignore[arg-type]

    return build


@pytest.fixture
def opened(
    lowered: Callable[..., MegakernelProgram],
) -> Callable[..., tuple[ReferenceSession, EagerDecoder]]:
    """`opened(program, order, seed)`: its session, and the oracle of the same random weights."""

    def build(
        program: MegakernelProgram | None = None, dtype: DType = DType.F32, order: str = "list", seed: int = 0
    ) -> tuple[ReferenceSession, EagerDecoder]:
        weights = random_weights(SPEC, 1, TORCH_DTYPES[dtype])
        session = ReferenceSession(program or lowered(dtype), SPEC, weights, order=order, seed=seed)
        return session, make_oracle(session, weights)

    return build
