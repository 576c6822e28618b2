"""One colour for each operation in every trace file.

Source: the reserved names of Catapult's trace viewer (tracing/base/color_scheme.html), the only colours that a trace
file can request from chrome://tracing. ui.perfetto.dev takes no colours, and colours slices by name.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

RESERVED: Final = (
    "rail_response",
    "thread_state_runnable",
    "background_memory_dump",
    "rail_idle",
    "bad",
    "rail_load",
    "rail_animation",
    "cq_build_attempt_failed",
    "cq_build_failed",
    "detailed_memory_dump",
    "cq_build_attempt_passed",
    "thread_state_unknown",
    "thread_state_running",
    "thread_state_uninterruptible",
    "generic_work",
    "olive",
)
"""The colours' names, in a fixed order."""

_OPERATIONS: Final = {
    "q_proj": "rail_response",
    "k_proj": "thread_state_runnable",
    "v_proj": "background_memory_dump",
    "attention": "rail_idle",
    "attn_combine": "bad",
    "o_proj": "rail_load",
    "gate_proj": "rail_animation",
    "up_proj": "cq_build_attempt_failed",
    "silu_mul": "cq_build_failed",
    "down_proj": "detailed_memory_dump",
    "lm_head": "cq_build_attempt_passed",
    "embed": "olive",
    "argmax": "olive",
}
_FAMILIES: Final = {
    "norm": "thread_state_unknown",
    "rope": "thread_state_running",
    "append": "thread_state_uninterruptible",
    "add": "generic_work",
    "sum": "generic_work",
}
"""Last word of an operation's name -> its colour's name, so that `q_norm` and `final_norm` look alike."""


def reserved(operation: str) -> str:
    """The name of an operation's colour in a trace file. An unknown operation's depends on its name."""
    known = _OPERATIONS.get(operation) or _FAMILIES.get(operation.rpartition("_")[2])
    return known or RESERVED[crc32(operation.encode(errors="surrogatepass")) % len(RESERVED)]
