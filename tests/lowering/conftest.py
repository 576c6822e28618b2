from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flywheel.ir import TARGETS, GpuTarget, MegakernelProgram, ScheduleConfig
from flywheel.lowering.lower import lower
from flywheel.models.decoder import decode_step
from flywheel.models.spec import DecoderSpec

SPEC = DecoderSpec("small", "qwen3", 96, 160, 2, 4, 2, 16, 300, 1e4, 1e-6, 4096, qk_norm=True)
TARGET = replace(TARGETS["h100"], name="few", num_sms=6)


@pytest.fixture(scope="session")
def spec() -> DecoderSpec:
    """Two layers with q and k norms; 4 query heads over 2 KV heads."""
    return SPEC


@pytest.fixture(scope="session")
def target() -> GpuTarget:
    """An H100 of six SMs."""
    return TARGET


@pytest.fixture(scope="session")
def lowered() -> Callable[..., MegakernelProgram]:
    """`lowered(spec=, context=, target=, **config)`: the program of the small spec under that config."""

    def build(
        spec: DecoderSpec = SPEC, context: int = 64, target: GpuTarget = TARGET, **config: Any
    ) -> MegakernelProgram:
        return lower(decode_step(spec, context), ScheduleConfig(**config), target)

    return build
