# SPDX-License-Identifier: Apache-2.0
"""Interprets the PTX of the CUDA kernels, independently of the emulator. See docs/gpu_less.md."""
