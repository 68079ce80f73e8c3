"""Passes, their contracts, the pass manager and ``compile_program``."""
