# SPDX-License-Identifier: Apache-2.0
"""Interprets the PTX of the CUDA kernels, independently of csrc/emul. See docs/gpu_less.md."""
