# SPDX-License-Identifier: Apache-2.0
"""Runs tests and benchmarks of the CUDA code on a machine without a GPU. See docs/gpu_less.md."""
