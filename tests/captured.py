"""Checks on a machine without a GPU that a CUDA graph could capture what torch computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_STOPS = {
    _aten.lift_fresh.default: "it copies numbers of the host",
    _aten._local_scalar_dense.default: "the host waits for a number",
    _aten.nonzero.default: "the host waits for a shape",
    _aten.masked_select.default: "the host waits for a shape",
}
"""What stops a capture where tensors are on a GPU, and shows in the same operations where they are not."""


class Capturing(TorchDispatchMode):
    """`with Capturing():` fails at an operation that a CUDA graph cannot capture."""

    def __torch_dispatch__(
        self, operation: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        assert operation not in _STOPS, f"{operation}: {_STOPS[operation]}"
        return operation(*args, **(kwargs or {}))
