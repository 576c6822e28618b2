"""Driver calls in the context of one GPU of several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from flywheel.errors import GpuFaultError


class ContextDriver:
    """cuda.bindings.driver whose functions run in `context`. Each then restores the thread's current context.

    The wrapper is needed because torch, and every other GPU of the process, change the current context.
    """

    def __init__(self, driver: ModuleType, context: Any) -> None:
        self._driver: Final = driver
        self._context: Final = context

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current within the block. Raises GpuFaultError where it is gone."""
        (result,) = self._driver.cuCtxPushCurrent(self._context)
        if result != self._driver.CUresult.CUDA_SUCCESS:
            raise GpuFaultError(f"GPU: cuCtxPushCurrent: {result.name}")
        try:
            yield
        finally:
            self._driver.cuCtxPopCurrent()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        if not name.startswith("cu"):  # functions begin with cu, types with CU
            return found
        return self._in_context(found)

    def _in_context(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.current():
                return function(*args)

        return call
