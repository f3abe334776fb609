# SPDX-License-Identifier: Apache-2.0
"""Block tables on the host and the device, slot mappings, and metadata for attention kernels."""
