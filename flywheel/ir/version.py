"""The versions of the format, and the limits of the on-device ABI. Source: docs/ir.md."""

from __future__ import annotations

from typing import Final

IR_VERSION: Final = "0.6.0"
"""Newest version of the on-disk format. A minor bump adds fields, a major one breaks readers. A program has the oldest
version that can express it."""

ABI_VERSION: Final = "0.2"
"""Version of the on-device structs."""

ABI_MAX_INPUTS: Final = 8
ABI_MAX_OUTPUTS: Final = 4
ABI_MAX_WAITS: Final = 8
ABI_MAX_RANK: Final = 4

ABI_MAX_ROWS: Final = 8
"""Rows of x that one matrix step multiplies, which are the columns of a fragment of x. A decode step has at most as
many sequences."""

NO_TOKEN: Final = -1
"""What SAMPLE_ARGMAX chooses where the largest logit is NaN or infinite."""

MAX_RANKS: Final = 8
"""Most GPUs of one program: an ALLREDUCE_SHARD takes a shard of each."""
