# SPDX-License-Identifier: Apache-2.0
"""The memory of a pool's pages, and the tensors through which attention kernels access it."""
