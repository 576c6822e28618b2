"""How long tests wait: they judge events, and time only separates what ends from what hangs."""

from __future__ import annotations

from typing import Final

HANG_S: Final = 100.0
"""Seconds that only something that hangs takes, however busy the machine is."""
