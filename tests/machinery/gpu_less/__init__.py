"""Tests and benchmarks of the CUDA code on a machine without a GPU; docs/gpu_less.md says how."""
