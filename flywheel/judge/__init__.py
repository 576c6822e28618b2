"""Checks a program against the oracle, and measures and traces what it has checked."""
