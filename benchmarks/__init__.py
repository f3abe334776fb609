"""Benchmarks, each with its peer or limit measured in the same run. See `python -m benchmarks --help`."""
