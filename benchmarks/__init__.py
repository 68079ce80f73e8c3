"""Measurements; `bench.py` is the driver of the table beside other systems."""
