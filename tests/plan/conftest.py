from __future__ import annotations

from ir.conftest import tiny, with_buffer, with_task

__all__ = ["tiny", "with_buffer", "with_task"]
