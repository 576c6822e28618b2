"""Bundles: a packed program and its kernel as files that need no lowering, proof or compiler to run. Source:
docs/bundle.md."""
