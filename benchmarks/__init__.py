"""Measurements, each beside its peer or its limit in the same run. `python -m benchmarks --help`."""
