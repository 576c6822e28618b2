"""Runs a lowered model token by token."""
