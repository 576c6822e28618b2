"""Runs bundles: programs that were proved, packed and compiled before, without torch and without a search."""
