"""Runs a lowered model token by token, and checks it."""
