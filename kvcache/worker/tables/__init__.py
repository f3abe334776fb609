# SPDX-License-Identifier: Apache-2.0
"""Block tables on the host and the device, slot mapping, and metadata for attention kernels."""
