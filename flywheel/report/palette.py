"""One colour for each operation, in every picture and trace file, and one for each kind of row.

Source: the operations' colours are the reserved names of Catapult's trace viewer (tracing/base/color_scheme.html), the
only colours that a trace file can request from chrome://tracing. ui.perfetto.dev takes no colours, and colours slices
by name.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

RESERVED: Final = {
    "rail_response": "#4387fd",
    "thread_state_runnable": "#85a0d2",
    "background_memory_dump": "#00b4b4",
    "rail_idle": "#ee8e00",
    "bad": "#b47d00",
    "rail_load": "#0da861",
    "rail_animation": "#f44a3f",
    "cq_build_attempt_failed": "#c55151",
    "cq_build_failed": "#ee8888",
    "detailed_memory_dump": "#b400b4",
    "cq_build_attempt_passed": "#67da23",
    "thread_state_unknown": "#c79b7d",
    "thread_state_running": "#7ec894",
    "thread_state_uninterruptible": "#b67d8f",
    "generic_work": "#7d7d7d",
    "olive": "#646400",
}
"""Name in a trace file -> colour."""

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
    return known or list(RESERVED)[crc32(operation.encode(errors="surrogatepass")) % len(RESERVED)]


def colour(operation: str) -> str:
    """An operation's colour in pictures."""
    return RESERVED[reserved(operation)]
