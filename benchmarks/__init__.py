"""Measurements, each with its peer or limit in the same run. `python -m benchmarks --help`."""
