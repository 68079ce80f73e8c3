"""Measure autoshard on every transformers family that can be built offline: see `__main__`."""
